"""The scoreboard: every planted fault on the quickstart model, first step, initial weights. Writes docs/faults.md.

python -m parity_tests.faults.board
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from core.config_file import load_config
from core.parity.bands import recipe
from core.parity.evidence import gather, uneven_weights
from core.parity.judge import Reference, judge
from core.parity.verdict import Check
from core.run_data import RunData
from core.sinks.phrases import bounds
from jax_backend.session import JaxBackend
from parity_tests.faults import CATALOG
from torch_backend.session import TorchBackend

ROOT = Path(__file__).resolve().parent.parent.parent


def check_of(backend: TorchBackend, reference: Reference, data: RunData) -> Check:
    """The check of the first step, as `lockstep parity --steps 1` makes it."""
    torch._dynamo.reset()
    batch = uneven_weights(data.batch(1), data.config.seed)
    return judge(gather(backend.open(data.config), data.config, batch), reference)


def row(name: str, doc: str, expected: str, check: Check) -> str:
    """One row of the table."""
    origin = check.origin
    if origin is None:
        return f"| {name} | {doc} | {check.verdict} | {expected} | nothing | | |"
    measure = origin.worst
    broken = sum(not f.ok for f in check.findings)
    where = f"`{origin.stage}` at `{origin.tap}`"
    value = f"{measure.name.replace('_', ' ')} {measure.value:.3g} ({bounds(measure.low, measure.high)})"
    return (
        f"| {name} | {doc} | {check.verdict} | `{expected}` | {where} | {value} | {broken} of {len(check.findings)} |"
    )


def main() -> None:
    """Judge every fault under eager and compiled bf16."""
    lines = [
        "# Planted faults, caught in the first step",
        "",
        "Made by `python -m parity_tests.faults.board` on the quickstart model and data from initial weights, with "
        f"torch {torch.__version__.split('+')[0]} on {platform.machine()} ({platform.system()}), CPU. Each is a "
        "`Backend` in `parity_tests/faults/`: `lockstep parity configs/quickstart.toml --candidate FILE.py:NAME`.",
        "",
    ]
    for compiled in ("false", "true"):
        config = load_config(ROOT / "configs/quickstart.toml", {"compile.enabled": compiled, "device": "cpu"})
        data = RunData.open(config)
        reference = Reference.open(JaxBackend(), config)
        started = time.perf_counter()
        rows, named = [], 0
        for fault in CATALOG:
            check = check_of(fault.make(), reference, data)
            named += check.verdict == "disagreed" and check.origin is not None and check.origin.stage == fault.stage
            rows.append(row(fault.name, (fault.make.__doc__ or "").strip(), fault.stage, check))
            print(rows[-1], flush=True)
        honest = check_of(TorchBackend(), reference, data)
        lines += [
            f"## {recipe(config)}",
            "",
            f"{named} of {len(CATALOG)} faults traced to their stage. The honest trainer: {honest.verdict}, "
            f"{len(honest.findings)} findings. All in {time.perf_counter() - started:.0f} s.",
            "",
            "| fault | what is wrong | verdict | planted in | origin named | measured (bound) | broken findings |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    (ROOT / "docs/faults.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
