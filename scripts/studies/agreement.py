"""Compare torch with JAX on the quickstart model, over precisions, programs and micro-batches. Writes agreement.md.

python -m lockstep.scripts.studies.agreement
"""

from __future__ import annotations

import os
import platform
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import jax
import torch
import tyro

from lockstep.core.config.file import load_config
from lockstep.core.parity.measures.verdict import Check, overall
from lockstep.core.parity.modes.side_by_side import check_steps
from lockstep.core.run.data import RunData
from lockstep.jax_backend.backend import JaxBackend
from lockstep.scripts.studies.repository import ROOT
from lockstep.torch_backend.backend import TorchBackend

STEPS = 3


def values(checks: list[Check], stage: str, measure: str) -> list[float]:
    """Return every value of one measure at one stage, without the geometric mean over gradients."""
    return [
        m.value
        for c in checks
        for f in c.findings
        for m in f.measures
        if f.stage == stage and m.name == measure and f.tap != "geometric mean"
    ]


def row(policy: str, compiled: bool, micro_batches: int) -> str:
    """Check one combination, and return its row of the table."""
    torch._dynamo.reset()
    started = time.perf_counter()
    config = load_config(ROOT / "configs/quickstart.toml", {"precision.policy": policy, "device": "cpu"})
    train = config.train.model_copy(update={"micro_batch_size": config.train.batch_size // micro_batches})
    program = config.compile.model_copy(update={"enabled": compiled, "scope": "model"})
    config = config.model_copy(update={"train": train, "compile": program})
    data = RunData.open(config)
    checks = list(check_steps(TorchBackend(), JaxBackend(), config, (data.batch(s) for s in range(1, STEPS + 1))))
    relative, excess = values(checks, "gradients", "relative_error"), values(checks, "gradients", "excess")
    update = values(checks, "update", "excess")
    findings = sum(len(c.findings) for c in checks)
    return (
        f"| {policy} | {'compiled' if compiled else 'eager'} | {micro_batches} | {overall(checks)} | {findings} "
        f"| {f'{max(relative):.1e}' if relative else ''} "
        f"| {f'{min(excess):.2f} … {max(excess):.2f}' if excess else ''} "
        f"| {f'{min(update):.3f} … {max(update):.3f}' if update else ''} | {time.perf_counter() - started:.0f} s |"
    )


def main() -> None:
    """Check every combination, and print the page."""
    lines = [
        "# Agreement of torch and JAX",
        "",
        f"Made by `python -m lockstep.scripts.studies.agreement`: `configs/quickstart.toml`, {STEPS} steps, uneven "
        "loss "
        "weights, "
        f"torch {torch.__version__}, jax {jax.__version__}, {platform.machine()} {platform.system()} CPU.",
        "",
        "| precision | program | micro-batches | verdict | findings | worst gradient, relative error "
        "| excess of gradients | excess of updates | time |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for policy in ("fp64", "fp32", "bf16"):
        for compiled in (False, True):
            for micro_batches in (1, 4):
                lines.append(row(policy, compiled, micro_batches))
                print(lines[-1], flush=True)
    (ROOT / "docs/results/agreement.md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
