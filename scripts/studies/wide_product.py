"""Compare oneDNN's block product with other products that have FP32 results (torch_backend/kernels/wide_product.py).

    python -m lockstep.scripts.studies.wide_product                docs/results/wide_product.json and .md
    python -m lockstep.scripts.studies.wide_product --page-only    the page alone

Contenders take turns in one process, so that a slow machine slows all of them; a time is the median of the rounds.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import tyro
from torch import Tensor

from lockstep.core.config.file import load_config
from lockstep.scripts.studies.narrow_products import ROUNDS, in_turns
from lockstep.scripts.studies.repository import ROOT
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.precision import DTYPES, add_product, wide_product
from lockstep.torch_backend.tools.bench import instructions, random_batches

PAGE = ROOT / "docs/results/wide_product.md"
# (tokens, hidden width, vocabulary) of a head.
SHAPES = ((512, 256, 8192), (1024, 512, 16384), (512, 768, 32768))
NAMES = {"brgemm": "block product", "blas": "MKL", "onednn": "oneDNN's whole product", "bf16": "bf16 result"}
LIBRARIES = {"bf16": ("brgemm", "blas"), "fp32": ("brgemm", "blas", "onednn")}
RUNS = ("configs/quickstart.toml", "configs/peers/25m.toml", "configs/peers/100m.toml")
# Rows of logits whose errors are computed.
JUDGED = 64


def products(operand: torch.dtype, tokens: int, hidden: int, vocabulary: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of a head's products with FP32 results by contender; "bf16" rounds its result."""
    sizes = (tokens, hidden), (vocabulary, hidden), (tokens, vocabulary)
    x, weight, grad = (torch.randn(*size).to(operand) for size in sizes)
    total = torch.zeros(vocabulary, hidden)
    libraries = LIBRARIES["fp32"]
    wide = torch.float32
    logits: dict[str, Callable[[], Tensor]]
    gradient: dict[str, Callable[[], object]]
    logits = {name: partial(wide_product, x, weight.T, wide, name) for name in libraries}
    gradient = {name: partial(add_product, total, grad.T, x, name) for name in libraries}
    found = {"relative error of the logits": {name: _error(product(), x, weight) for name, product in logits.items()}}
    if operand == torch.bfloat16:
        logits["bf16"], gradient["bf16"] = partial(torch.mm, x, weight.T), lambda: total.add_(grad.T @ x)
    else:
        backward = {name: partial(wide_product, grad, weight, wide, name) for name in libraries}
        found["gradient of the input"] = in_turns(backward)
    return {"logits": in_turns(logits), "gradient of the weight, added": in_turns(gradient), **found}


def _error(logits: Tensor, x: Tensor, weight: Tensor) -> float:
    exact = x[:JUDGED].double() @ weight.T.double()
    return float((logits[:JUDGED] - exact).norm() / exact.norm())


def steps(file: str, compiled: bool, policy: str) -> dict[str, float]:
    """Return milliseconds of a whole step of a run, by library."""
    sessions = {}
    for name in LIBRARIES[policy]:
        settings = {"device": "cpu", "precision.policy": policy, "compile.enabled": str(compiled).lower()}
        config = load_config(ROOT / file, {**settings, "precision.cpu_products": name})
        sessions[name] = TorchBackend().open(config)
    (batch,) = random_batches(config, 1)
    found = in_turns({name: partial(session.step, batch) for name, session in sessions.items()})
    for session in sessions.values():
        session.close()
    torch._dynamo.reset()
    return found


def measure() -> dict[str, Any]:
    """Measure every row of the page."""
    return {
        "machine": f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "instructions": instructions(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "products": [
            {"shape": shape, "policy": policy, "found": products(DTYPES[policy], *shape)}
            for policy in LIBRARIES
            for shape in SHAPES
        ],
        "steps": [
            {"run": run, "policy": policy, "compiled": compiled, "ms": steps(run, compiled, policy)}
            for policy in LIBRARIES
            for run in RUNS
            for compiled in (False, True)
        ],
    }


def page(found: Mapping[str, Any]) -> str:
    """Write the results as Markdown."""
    lines = [
        "# Products with FP32 results on the CPU",
        "",
        f"Made by `python -m lockstep.scripts.studies.wide_product`: {found['machine']}, "
        f"{', '.join(found['instructions'])}, torch {found['versions']['torch']}.",
        f"Contenders take turns in one process; a time is the median of {ROUNDS} rounds.",
        "",
        "Under bf16 the head multiplies bf16 operands, and its logits and the gradient of its weight are FP32. On the "
        "CPU torch's own products have the dtype of their",
        'operands, so both operands are copied to FP32. `precision.cpu_products = "brgemm"` multiplies the bf16 '
        "numbers by oneDNN's block product, with FP32 sums.",
        "`torch.autocast` rounds the result to bf16 (the last column).",
        "",
        "Under fp32 it multiplies FP32 operands, in every linear layer. MKL uses no more than AVX2 on CPUs that are "
        "not Intel's. For oneDNN's whole product torch",
        "copies a transposed left operand on one core, as in the gradient of the weight.",
        "",
        "| policy | tokens, hidden, vocabulary | product | "
        + " | ".join(f"{name}, ms" for name in NAMES.values())
        + " |",
        "|---|---|---|" + "--:|" * len(NAMES),
    ]
    for row in found["products"]:
        shape = ", ".join(f"{n:,}" for n in row["shape"])
        for name, figures in row["found"].items():
            cells = [_cell(figures[one]) if one in figures else "" for one in NAMES]
            lines.append(f"| {row['policy']} | {shape} | {name} | {' | '.join(cells)} |")
    lines += [
        "",
        f"The relative error is ‖result − exact‖ / ‖exact‖ of {JUDGED} rows, exact in FP64.",
        "",
        "A whole step of a run, and how many times as fast it is with the block product as with MKL's:",
        "",
        "| policy | run | program | block product, ms | MKL, ms | × | oneDNN's whole product, ms |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    for row in found["steps"]:
        program, ms = "compiled" if row["compiled"] else "eager", row["ms"]
        cells = [_cell(ms["brgemm"]), _cell(ms["blas"]), f"{ms['blas'] / ms['brgemm']:.2f}"]
        cells.append(_cell(ms["onednn"]) if "onednn" in ms else "")
        lines.append(f"| {row['policy']} | {row['run']} | {program} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(number: float) -> str:
    if number < 1e-3:
        return f"{number:.1e}"
    return f"{number:,.1f}" if number < 100 else f"{number:,.0f}"


def main(page_only: bool = False) -> None:
    """Measure, and write both files."""
    file = PAGE.with_suffix(".json")
    if not page_only:
        file.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(json.loads(file.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main)
