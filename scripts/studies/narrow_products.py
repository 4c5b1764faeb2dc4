"""Compare torch's own bf16 products on this CPU with FP32 products that are rounded (torch_backend/precision.py).

    python -m lockstep.scripts.studies.narrow_products                docs/results/narrow_products.json and .md
    python -m lockstep.scripts.studies.narrow_products --page-only    the page alone

It takes a quarter of an hour where torch has only plain loops for bf16.

Contenders take turns in one process, so that a slow machine slows all of them; a time is the median of the rounds.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import tyro
from torch import Tensor

from lockstep.core.config.file import load_config
from lockstep.scripts.studies.cpu_auto import RUN, TOKENS, settings
from lockstep.scripts.studies.repository import ROOT
from lockstep.torch_backend import precision
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.tools.bench import random_batches

PAGE = ROOT / "docs/results/narrow_products.md"
ROUNDS, WARM = 5, 1
# (tokens, input width, output width) of a linear layer.
SHAPES = ((64, 64, 256), (1024, 256, 688), (512, 768, 2048))
OWN, BY_FP32, FP32 = "bf16, torch's own", "bf16, computed in FP32", "FP32"
# Policy, and whether torch's own bf16 products are used.
CONTENDERS = {OWN: ("bf16", True), BY_FP32: ("bf16", False), FP32: ("fp32", True)}
STEPS = ((128, False, "auto"), (128, True, "auto"), (256, False, "flash"), (256, False, "math"))


@contextmanager
def by_onednn(own: bool) -> Iterator[None]:
    """Use torch's own bf16 products in the context, or products computed in FP32."""
    before = precision.BF16_BY_ONEDNN
    precision.BF16_BY_ONEDNN = own
    try:
        yield
    finally:
        precision.BF16_BY_ONEDNN = before


def in_turns(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the milliseconds of each call, the median of ROUNDS rounds."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(WARM + ROUNDS):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if number >= WARM:
                taken[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(times) for name, times in taken.items()}


def products(rows: int, into: int, out: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of a linear layer's three products: output, gradient of the input, gradient of the weight."""
    x, weight, grad = torch.randn(rows, into), torch.randn(out, into), torch.randn(rows, out)
    operands = {"output": (x, weight.T), "gradient of x": (grad, weight), "gradient of the weight": (grad.T, x)}

    def narrow(pair: tuple[Tensor, Tensor]) -> list[Tensor]:
        # The cast keeps a transposed operand transposed, as it is in a step.
        return [one.bfloat16() for one in pair]

    return {
        name: in_turns(
            {
                OWN: partial(torch.mm, *narrow(pair)),
                BY_FP32: partial(precision.by_fp32, *narrow(pair)),
                FP32: partial(torch.mm, *pair),
            }
        )
        for name, pair in operands.items()
    }


def steps(length: int, compiled: bool, kernel: str) -> dict[str, float]:
    """Return milliseconds of a whole step of the quickstart's model, by contender."""
    calls, sessions = {}, []
    for name, (policy, own) in CONTENDERS.items():
        config = load_config(RUN, {**settings(length, compiled, policy), "attention.kernel": kernel})
        session = TorchBackend().open(config)
        sessions.append(session)
        (batch,) = random_batches(config, 1)
        calls[name] = by_onednn(own)(partial(session.step, batch))
    found = in_turns(calls)
    for session in sessions:
        session.close()
    torch._dynamo.reset()
    return found


def measure() -> dict[str, Any]:
    """Measure every row of the page."""
    return {
        "machine": f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "by_onednn": precision.BF16_BY_ONEDNN,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "products": [{"shape": shape, "ms": products(*shape)} for shape in SHAPES],
        "steps": [{"length": one[0], "compiled": one[1], "kernel": one[2], "ms": steps(*one)} for one in STEPS],
    }


def page(found: Mapping[str, Any]) -> str:
    """Write the results as Markdown."""
    chosen = "torch's own products" if found["by_onednn"] else "the products computed in FP32"
    lines = [
        "# bf16 products on the CPU",
        "",
        f"Made by `python -m lockstep.scripts.studies.narrow_products`: {found['machine']}, instructions of torch's "
        f"kernels {found['instructions']}, torch {found['versions']['torch']}.",
        f"Contenders take turns in one process; a time is the median of {ROUNDS} rounds.",
        "",
        "torch hands bf16 products to oneDNN on x86 with AVX-512, and on Arm with bf16 instructions. On other CPUs it "
        "has only plain loops. There Lockstep casts both",
        "operands to FP32, multiplies, and rounds once. The product of two bf16 numbers is exact in FP32, so the "
        "result has the rounding of a bf16 product.",
        f"On this CPU Lockstep uses {chosen}. ×: the time of a contender over FP32's.",
        "",
        f"| tokens, input, output | product | {OWN}, ms | × | {BY_FP32}, ms | × | {FP32}, ms |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in found["products"]:
        lines += [
            f"| {', '.join(f'{n:,}' for n in row['shape'])} | {name} | {_cells(ms)} |" for name, ms in row["ms"].items()
        ]
    lines += [
        "",
        f"A whole step of configs/quickstart.toml's model, {TOKENS:,} tokens in one micro-batch:",
        "",
        f"| tokens a sequence | program | attention | {OWN}, ms | × | {BY_FP32}, ms | × | {FP32}, ms |",
        "|--:|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in found["steps"]:
        program = "compiled" if row["compiled"] else "eager"
        lines.append(f"| {row['length']} | {program} | `{row['kernel']}` | {_cells(row['ms'])} |")
    return "\n".join(lines) + "\n"


def _cells(ms: Mapping[str, float]) -> str:
    def figure(number: float) -> str:
        return f"{number:,.2f}" if number < 10 else f"{number:,.0f}"

    narrow = [cell for name in (OWN, BY_FP32) for cell in (figure(ms[name]), f"{ms[name] / ms[FP32]:.1f}")]
    return " | ".join([*narrow, figure(ms[FP32])])


def main(page_only: bool = False) -> None:
    """Measure, and write both files."""
    file = PAGE.with_suffix(".json")
    if not page_only:
        file.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(json.loads(file.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main)
