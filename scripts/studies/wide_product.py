"""Compare oneDNN's block product of bf16 operands with products of FP32 copies (torch_backend/kernels/wide_product.py).

    python -m lockstep.scripts.studies.wide_product                docs/results/wide_product.json and .md
    python -m lockstep.scripts.studies.wide_product --page-only    the page alone

Contenders take turns in one process, so that a slow machine slows all of them; a time is the median of the rounds.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import tyro
from torch import Tensor

from lockstep.core.config.file import load_config
from lockstep.scripts.studies.narrow_products import ROUNDS, in_turns
from lockstep.scripts.studies.repository import ROOT
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.precision import add_product, wide_product
from lockstep.torch_backend.tools.bench import instructions, random_batches

PAGE = ROOT / "docs/results/wide_product.md"
# (tokens, hidden width, vocabulary) of a head.
SHAPES = ((512, 256, 8192), (1024, 512, 16384), (512, 768, 32768))
NAMES = {"brgemm": "block product", "blas": "FP32 copies, MKL", "onednn": "FP32 copies, oneDNN", "bf16": "bf16 result"}
RUNS = ("configs/quickstart.toml", "configs/peers/25m.toml", "configs/peers/100m.toml")
# Rows of logits whose errors are computed.
JUDGED = 64


def products(tokens: int, hidden: int, vocabulary: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of a head's products with FP32 results by contender; "bf16" rounds its result."""
    sizes = (tokens, hidden), (vocabulary, hidden), (tokens, vocabulary)
    x, weight, grad = (torch.randn(*size).bfloat16() for size in sizes)
    total = torch.zeros(vocabulary, hidden)
    logits = {name: partial(wide_product, x, weight.T, torch.float32, name) for name in ("brgemm", "blas", "onednn")}
    gradient = {name: partial(add_product, total, grad.T, x, name) for name in ("brgemm", "blas", "onednn")}
    return {
        "logits": in_turns({**logits, "bf16": partial(torch.mm, x, weight.T)}),
        "gradient of the weight, added": in_turns({**gradient, "bf16": lambda: total.add_(grad.T @ x)}),
        "relative error of the logits": {name: _error(product(), x, weight) for name, product in logits.items()},
    }


def _error(logits: Tensor, x: Tensor, weight: Tensor) -> float:
    exact = x[:JUDGED].double() @ weight.T.double()
    return float((logits[:JUDGED] - exact).norm() / exact.norm())


def steps(file: str, compiled: bool) -> dict[str, float]:
    """Return milliseconds of a whole bf16 step of a run, by library."""
    sessions = {}
    for name in ("brgemm", "blas"):
        settings = {"device": "cpu", "precision.policy": "bf16", "compile.enabled": str(compiled).lower()}
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
        "products": [{"shape": shape, "found": products(*shape)} for shape in SHAPES],
        "steps": [{"run": run, "compiled": one, "ms": steps(run, one)} for run in RUNS for one in (False, True)],
    }


def page(found: Mapping[str, Any]) -> str:
    """Write the results as Markdown."""
    lines = [
        "# Products of bf16 operands with FP32 results on the CPU",
        "",
        f"Made by `python -m lockstep.scripts.studies.wide_product`: {found['machine']}, "
        f"{', '.join(found['instructions'])}, torch {found['versions']['torch']}.",
        f"Contenders take turns in one process; a time is the median of {ROUNDS} rounds.",
        "",
        "The head multiplies bf16 operands, and its logits and the gradient of its weight are FP32. On the CPU torch's "
        "own products have the dtype of their operands,",
        'so both operands are copied to FP32. `precision.cpu_products = "brgemm"` multiplies the bf16 numbers by '
        "oneDNN's block product, with FP32 sums. `torch.autocast`",
        "rounds the result to bf16 (the last column).",
        "",
        "| tokens, hidden, vocabulary | product | " + " | ".join(f"{name}, ms" for name in NAMES.values()) + " |",
        "|---|---|" + "--:|" * len(NAMES),
    ]
    for row in found["products"]:
        shape = ", ".join(f"{n:,}" for n in row["shape"])
        for name, figures in row["found"].items():
            cells = [_cell(figures[one]) if one in figures else "" for one in NAMES]
            lines.append(f"| {shape} | {name} | {' | '.join(cells)} |")
    lines += [
        "",
        f"The last row of each shape is ‖result − exact‖ / ‖exact‖ of {JUDGED} rows, exact in FP64.",
        "",
        "A whole step of a run, in bf16:",
        "",
        "| run | program | block product, ms | FP32 copies, MKL, ms | × |",
        "|---|---|--:|--:|--:|",
    ]
    for row in found["steps"]:
        program, ms = "compiled" if row["compiled"] else "eager", row["ms"]
        speed = ms["blas"] / ms["brgemm"]
        lines.append(f"| {row['run']} | {program} | {_cell(ms['brgemm'])} | {_cell(ms['blas'])} | {speed:.2f} |")
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
