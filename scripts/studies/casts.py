"""Measure plans of casts (`precision.casts`) on the CPU: seconds of a step, memory, and errors against FP64.

    python -m lockstep.scripts.studies.casts            docs/results/casts.json and .md

Plans run the same steps in turns, in one process. Errors of the per-token loss and of each gradient are those of one
micro-batch against the reference in FP64, at weights trained for a while under Lockstep's own casts.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import tyro

from lockstep.core.backend import Batch, Gradients, State
from lockstep.core.config.file import load_config
from lockstep.core.config.schema import PrecisionConfig, RunConfig
from lockstep.jax_backend.backend import JaxBackend
from lockstep.scripts.shared.open_data import open_data
from lockstep.scripts.studies.cpu_auto import RUN, peak, settings
from lockstep.scripts.studies.repository import ROOT
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.tools.bench import random_batches

PAGE = ROOT / "docs/results/casts.md"
PLANS = (
    "lockstep",
    "residual=bf16",
    "logits=bf16",
    "residual=bf16, logits=bf16",
    "residual=bf16, norm=bf16, linear=bf16, rope=after rotation, act=after product, logits=bf16",
    "autocast",
)
LENGTH, ROUNDS, WARM, TRAINED = 128, 9, 2, 100


def steps(compiled: bool) -> dict[str, list[float]]:
    """Return the seconds of each timed step, by plan."""
    common = settings(LENGTH, compiled, "bf16")
    sessions = {plan: TorchBackend().open(load_config(RUN, {**common, "precision.casts": plan})) for plan in PLANS}
    (batch,) = random_batches(load_config(RUN, common), 1)
    taken: dict[str, list[float]] = {plan: [] for plan in PLANS}
    for number in range(WARM + ROUNDS):
        for plan, session in sessions.items():
            started = time.perf_counter()
            session.step(batch)
            if number >= WARM:
                taken[plan].append(time.perf_counter() - started)
    for session in sessions.values():
        session.close()
    torch._dynamo.reset()
    return taken


def trained() -> tuple[RunConfig, State, Batch]:
    """Return the quickstart's model after some training under Lockstep's own casts, and an unseen micro-batch."""
    overrides = {"compile.enabled": "false", "device": "cpu", "train.batch_size": "8", "train.micro_batch_size": "8"}
    config = load_config(RUN, overrides)
    data = open_data(config, RUN, overrides)
    session = TorchBackend().open(config)
    for step in range(1, TRAINED + 1):
        session.step(data.batch(step))
    return config, session.state(), data.batch(TRAINED + 1)


def errors(config: RunConfig, state: State, batch: Batch) -> dict[str, dict[str, float]]:
    """Return each plan's errors against FP64: loss, per-token loss (RMS), and gradients (geometric mean)."""
    exact = config.model_copy(update={"precision": PrecisionConfig(policy="fp64")})
    truth = _gradients(JaxBackend(), exact, state, batch)
    found = {}
    for plan in PLANS:
        precision = config.precision.model_copy(update={"casts": plan})
        made = _gradients(TorchBackend(), config.model_copy(update={"precision": precision}), state, batch)
        relative = [
            np.linalg.norm(grad.astype(np.float64) - truth.grads[name]) / np.linalg.norm(truth.grads[name])
            for name, grad in made.grads.items()
        ]
        found[plan] = {
            "loss": made.loss - truth.loss,
            "nll": float(np.sqrt(np.mean((made.nll.astype(np.float64) - truth.nll) ** 2))),
            "gradients": math.exp(statistics.fmean(map(math.log, relative))),
        }
    return found


def _gradients(backend: Any, config: RunConfig, state: State, batch: Batch) -> Gradients:
    session = backend.open(config)
    session.load(state)
    found: Gradients = session.gradients(batch)
    session.close()
    return found


def measure() -> dict[str, Any]:
    """Measure every row of the page."""
    taken = {"eager": steps(compiled=False), "compiled": steps(compiled=True)}
    of_plan = errors(*trained())
    rows = []
    for plan in PLANS:
        row: dict[str, Any] = {"casts": plan, **of_plan[plan]}
        for program, by_plan in taken.items():
            row[f"{program}_ms"] = 1e3 * statistics.median(by_plan[plan])
            pairs = zip(by_plan["lockstep"], by_plan[plan], strict=True)
            row[f"{program}_ratio"] = statistics.median(ours / theirs for ours, theirs in pairs)
        row["eager_mb"] = peak(settings(LENGTH, False, "bf16"), {"precision.casts": plan})
        print(row, flush=True)
        rows.append(row)
    return {
        "machine": f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "rows": rows,
    }


def page(found: Mapping[str, Any]) -> str:
    """Write the results as Markdown."""
    own = found["rows"][0]
    lines = [
        "# Plans of casts: what they cost and what they save",
        "",
        "Generated by `python -m lockstep.scripts.studies.casts`: the model of configs/quickstart.toml, 2,048 tokens a "
        f"step in sequences of {LENGTH}.",
        f"{found['machine']}, torch {found['versions']['torch']}. Plans take the same steps in turns; × is the median "
        f"of {ROUNDS} rounds' ratios, above 1 faster",
        "than Lockstep's own casts. Memory: the peak of three eager steps above what the process held before. Errors "
        f"against FP64, after {TRAINED} steps",
        "of training: of the per-token loss (RMS, nats) and of gradients (geometric mean over parameters of the "
        "relative error), each also as a multiple",
        "of that of Lockstep's own casts. On an H100: not measured.",
        "",
        "| `precision.casts` | eager, ms | × | compiled, ms | × | memory, MB | error of the loss a token | × "
        "| error of gradients | × |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        lines.append(
            f"| {row['casts']} | {row['eager_ms']:.0f} | {row['eager_ratio']:.2f} | {row['compiled_ms']:.0f} | "
            f"{row['compiled_ratio']:.2f} | {row['eager_mb']:,.0f} | {row['nll']:.1e} | {row['nll'] / own['nll']:.2f} "
            f"| {row['gradients']:.1e} | {row['gradients'] / own['gradients']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write both files."""
    found = measure()
    PAGE.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
