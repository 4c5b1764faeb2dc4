"""Reproduce the incident of docs/results/incident.md at CPU size: plant each suspect, and measure its loss curve.

    python -m lockstep.scripts.studies.incident train    every run, about a minute each on one core → runs.json
    python -m lockstep.scripts.studies.incident checks   `lockstep parity` of each suspect → checks.json
    python -m lockstep.scripts.studies.incident page     curves.svg and docs/results/incident.md from the two

The model is a small Llama over bytes, the text is Python's standard library. Suspects are candidates:
docs/results/incident/suspects.py. Words of the page: docs/results/incident/page.md.in.
"""

from __future__ import annotations

import importlib.util
import json
import math
import multiprocessing
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from lockstep.scripts.studies.repository import ROOT

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# One reference for all suspects: compiled once, then cached for the next.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache/jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import numpy as np
import torch
import tyro

from lockstep.core.backend import Batch
from lockstep.core.config.schema import (
    CompileConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
)
from lockstep.core.errors import UserError
from lockstep.core.parity.modes.side_by_side import check_steps
from lockstep.core.sinks.phrases import check_line
from lockstep.scripts.shared.backends import open_named
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

FOLDER, PAGE = ROOT / "docs/results/incident", ROOT / "docs/results/incident.md"

ONSET, EVERY = 500, 10
PEAK_LR = 3e-3
VOCAB = 256
# The signature, in nats: a training loss that no model of text reaches, and a recomputed loss this far above the honest
# run's.
PLUMMETED, RISEN = 1e-2, 1.0

Curves = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Run:
    """A training run. key: in runs.json. title: of its panel. suspect: its class in suspects.py.

    The empty suspect is the honest trainer. lr: the peak learning rate as a multiple of the others'. steps: of the run.
    """

    key: str
    title: str
    suspect: str
    lr: float = 1.0
    steps: int = 1000

    def backend(self) -> TorchBackend:
        """Return the trainer, which is wrong from the first step that its class names."""
        return getattr(suspects(), self.suspect)() if self.suspect else TorchBackend()


RUNS = (
    Run("honest", "honest", ""),
    Run("bf16_logits", "bf16 logits, FP32 cross-entropy", "Bf16Logits"),
    Run("torch_bf16", "torch's cross_entropy in bf16", "TorchBf16CrossEntropy"),
    Run("all_bf16", "every operation of the loss in bf16", "AllBf16CrossEntropy"),
    Run("bf16_mean", "mean over tokens summed in bf16", "Bf16Mean"),
    Run("honest_hot", "honest, learning rate × 300", "", 300.0),
    Run("bf16_logits_hot", "bf16 logits, learning rate × 300", "Bf16Logits", 300.0),
    Run("all_bf16_hot", "all of the loss in bf16, rate × 300", "AllBf16CrossEntropy", 300.0),
    Run("unshifted", "targets not shifted, in the loader", "TargetsNotShifted"),
    Run("one_ahead", "one block sees one token ahead", "SeesOneTokenAhead", steps=1600),
    Run("no_mask", "no causal mask", "NoCausalMask"),
    Run("repeated", "half of the batch twice", "MicroBatchRepeated"),
    Run("frozen", "both buffers frozen", "FrozenBuffers"),
    Run("ring", "ring of eight batches frozen", "FrozenRing", steps=1600),
    Run("overwritten", "targets overwritten by tokens", "TargetsOverwritten"),
    Run("frozen_targets", "only the targets frozen", "FrozenTargets"),
    Run("late", "both buffers one step late", "OneStepLate"),
    Run("late_targets", "only the targets one step late", "TargetsOneStepLate"),
)
BY_KEY = {run.key: run for run in RUNS}


@cache
def suspects() -> Any:
    """Load docs/results/incident/suspects.py, a file for `--candidate` outside any package."""
    found = importlib.util.spec_from_file_location("incident_suspects", FOLDER / "suspects.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def config_of(run: Run) -> RunConfig:
    """Configure a Llama of two blocks over bytes, bf16, eager, [4, 256] tokens a step."""
    return RunConfig(
        device="cpu",
        model=ModelConfig(vocab_size=VOCAB, hidden=128, layers=2, heads=4, kv_heads=2, ffn_hidden=256),
        train=TrainConfig(steps=run.steps, batch_size=4, micro_batch_size=4, sequence_length=256),
        optim=OptimConfig(peak_lr=PEAK_LR * run.lr, warmup_steps=min(50, run.steps - 1)),
        precision=PrecisionConfig(policy="bf16"),
        compile=CompileConfig(enabled=False),
    )


@cache
def text() -> tuple[np.ndarray, np.ndarray]:
    """Return bytes, uint8 (n,), of the standard library's top modules: for training, and every tenth one held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))

    def joined(part: Iterable[Path]) -> np.ndarray:
        return np.frombuffer(b"".join(file.read_bytes() for file in part), np.uint8)

    return joined(f for i, f in enumerate(files) if i % 10), joined(files[::10])


def batch_of(config: RunConfig, data: np.ndarray, seed: Sequence[int]) -> Batch:
    """Draw windows of `data` at random places; all loss weights 1."""
    rows, length = config.train.batch_size, config.train.sequence_length
    starts = np.random.default_rng(seed).integers(0, len(data) - length - 1, rows)
    windows = data[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return Batch(windows[:, :-1].copy(), windows[:, 1:].copy(), np.ones((rows, length), np.float32))


def mean_nll(session: TorchSession, batch: Batch) -> float:
    """Return the mean cross-entropy in nats a token, in FP32 from FP32 weights."""
    return float(session.evaluate(batch, "fp32")["nll"].mean(dtype=np.float64))


def largest_logit(session: TorchSession, batch: Batch) -> float:
    """Return the largest magnitude of a logit on this batch, under the run's precision."""
    with torch.no_grad():
        trunk = session.model.trunk(session.to_device(batch)[0], session.policy)
        return session.model.logits(trunk, session.policy).abs().max().item()


def train(run: Run, onset: int = ONSET, every: int = EVERY) -> dict[str, Any]:
    """Train one suspect. Lists by measured step, each value from the weights before that step's update.

    onset: the last honest step of a suspect that becomes wrong later.
    reported: the training loss that the trainer prints. fp32: cross-entropy of the step's fresh batch, recomputed in
    FP32 by an honest model with the same weights. own: the same recomputed as the article's metric was: with the
    trainer's own model and the batch that its loop holds, outside autocast and outside the captured program.
    held_out: `fp32` on text that no run trains on. top1: share of next tokens guessed right. logit: largest magnitude.
    """
    started = time.perf_counter()
    config = config_of(run)
    backend = run.backend()
    if hasattr(backend, "onset"):
        backend.onset = onset
    session, honest = backend.open_rank(config), TorchBackend().open_rank(config)
    training, held_out = text()
    kept = [batch_of(config, held_out, (1, i)) for i in range(2)]
    curves: dict[str, list[Any]] = {k: [] for k in ("step", "reported", "fp32", "own", "held_out", "top1", "logit")}
    for step in range(1, run.steps + 1):
        batch = batch_of(config, training, (0, step))
        due = step % every == 0 or step == 1
        if due:
            honest.load(session.state())
            measured = {
                "fp32": mean_nll(honest, batch),
                "own": mean_nll(session, batch),
                "held_out": float(np.mean([mean_nll(honest, b) for b in kept])),
                "top1": float(honest.evaluate(batch, "fp32")["top1"].mean()),
                "logit": largest_logit(honest, batch),
            }
        record = session.step(batch)
        if due:
            curves["step"].append(step)
            for name, value in (measured | {"reported": record.loss}).items():
                curves[name].append(rounded(value))
    return {"curves": curves, "seconds": round(time.perf_counter() - started, 1)}


def rounded(value: float) -> float | None:
    """Round to five significant digits; return None for NaN and infinity, which JSON does not have."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def signature(curves: Curves, metric: str, honest: float) -> int | None:
    """Return the first measured step with a reported loss ≤ 1e-2 and `metric` a nat or more above the honest end."""
    for step, reported, other in zip(curves["step"], curves["reported"], curves[metric], strict=True):
        if reported is not None and other is not None and reported <= PLUMMETED and other >= honest + RISEN:
            return int(step)
    return None


def end(curves: Curves, name: str) -> float:
    """Return the mean of the last ten measurements; NaN if one of them was not finite."""
    return float(np.mean(np.array(curves[name][-10:], np.float64)))


def train_by_key(key: str) -> tuple[str, dict[str, Any]]:
    """Train a run by its key, for a worker process: on one thread."""
    torch.set_num_threads(1)
    return key, train(BY_KEY[key])


def summed_in_bf16() -> dict[str, float]:
    """Map true means to a bf16 accumulator's, over [32, 2048] tokens with exponentially spread losses."""
    spread = torch.from_numpy(np.random.default_rng(0).exponential(1.0, 32 * 2048).astype(np.float32))
    means = {x: float(suspects().bf16_running_sum(spread * x)) / spread.numel() for x in (1.0, 2.0, 4.0, 8.0)}
    return {f"{x:g}": float(f"{mean:.2g}") for x, mean in means.items()}


def moved_in_bf16() -> dict[str, float]:
    """Map an offset of all logits to the loss of a uniform guess over 256 tokens (5.545), every operation in bf16."""
    target = torch.zeros(1, 1, dtype=torch.long)
    offsets = (0, 128, 256, 512, 1024, 2048)
    return {f"{x}": float(suspects().bf16_nll(torch.full((1, 1, VOCAB), float(x)), target)) for x in offsets}


def about() -> dict[str, str]:
    """Return versions and machine."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
        "machine": f"{platform.machine()} ({platform.system()}), CPU, one thread a run",
    }


def first_disagreement(run: Run, steps: int = 10) -> str:
    """Return the output of `lockstep parity` for the first step that disagrees, or for the last."""
    config = config_of(run)
    batches = (batch_of(config, text()[0], (0, step)) for step in range(1, steps + 1))
    line = ""
    for check in check_steps(run.backend(), open_named("jax"), config, batches):
        line = check_line(check)
        if check.verdict == "disagreed":
            break
    return line


def read(name: str) -> dict[str, Any]:
    """Read a JSON file of this page. Raises UserError if it does not exist yet."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        made_by = {"runs": "train", "checks": "checks"}[name]
        raise UserError(
            f"{path.relative_to(ROOT)} does not exist; make it with: python -m lockstep.scripts.studies.incident "
            f"{made_by}"
        )
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def write(name: str, tree: Mapping[str, Any]) -> None:
    """Write a JSON file of this page, one run a line."""
    items = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in tree.items())
    (FOLDER / f"{name}.json").write_text("{\n" + items + "\n}\n")


WIDTH, HEIGHT, LEFT, TOP, GAP = 280, 150, 44, 66, 58
LOW, HIGH = 1e-3, 1e2
# name → colour, width, dashes, words; drawn in this order.
LINES = {
    "held_out": ("#9db8e8", 1.0, "", "held-out text"),
    "fp32": ("#1d4ed8", 1.6, "", "FP32, honest model, the step's fresh batch"),
    "reported": ("#e2591b", 2.2, "", "training loss as reported"),
    "own": ("#1f2328", 1.0, "2 4", "FP32, as described: the trainer's own model, the loop's batch"),
}


def figure(runs: Mapping[str, Any]) -> str:
    """Draw one panel a run, three a row: losses by step on a logarithmic scale. SVG."""
    honest = end(runs["honest"]["curves"], "fp32")
    rows = -(-len(RUNS) // 3)
    width, height = 3 * (WIDTH + GAP), TOP + rows * (HEIGHT + GAP) - GAP // 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="10" fill="#1f2328">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for i, (colour, stroke, dashes, words) in enumerate(reversed(LINES.values())):
        x = LEFT + i % 2 * 420
        y = 16 + i // 2 * 16
        parts.append(
            f'<path d="M{x} {y}h24" stroke="{colour}" stroke-width="{stroke}" stroke-dasharray="{dashes}"/>'
            f'<text x="{x + 30}" y="{y + 3.5}">{words}</text>'
        )
    for i, run in enumerate(RUNS):
        x, y = LEFT + i % 3 * (WIDTH + GAP), TOP + i // 3 * (HEIGHT + GAP)
        parts.append(f'<g transform="translate({x} {y})">{panel(run, runs[run.key]["curves"], honest)}</g>')
    return "\n".join([*parts, "</svg>", ""])


def panel(run: Run, curves: Curves, honest: float) -> str:
    """Draw axes, curves and heading of one run; its frame is heavy if the signature appeared."""
    steps = curves["step"]

    def across(step: float) -> float:
        return WIDTH * step / steps[-1]

    def down(value: float) -> float:
        share = math.log(min(max(value, LOW), HIGH) / LOW) / math.log(HIGH / LOW)
        return HEIGHT * (1 - share)

    parts = [f'<text x="0" y="-7" font-size="11" font-weight="bold">{run.title}</text>']
    for power in range(-3, 3):
        y, colour = down(10.0**power), "#e89a7a" if 10.0**power == PLUMMETED else "#e6e9ee"
        parts.append(f'<path d="M0 {y:.1f}h{WIDTH}" stroke="{colour}"/>')
        label = {-3: "≤ .001", -2: ".01", -1: ".1"}.get(power, f"{10 ** max(power, 0)}")
        parts.append(f'<text x="-5" y="{y + 3.5:.1f}" text-anchor="end" fill="#5b6470">{label}</text>')
    for share in (0.0, 0.5, 1.0):
        step = round(steps[-1] * share)
        parts.append(
            f'<text x="{across(step):.1f}" y="{HEIGHT + 13}" text-anchor="middle" fill="#5b6470">{step}</text>'
        )
    for name, (colour, stroke, dashes, _) in LINES.items():
        points = [(s, v) for s, v in zip(steps, curves[name], strict=True) if v is not None]
        path = " ".join(f"{across(s):.1f},{down(v):.1f}" for s, v in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{stroke}" '
            f'stroke-dasharray="{dashes}" stroke-linejoin="round"/>'
        )
    frame = 'stroke="#b42318" stroke-width="2.5"' if signature(curves, "fp32", honest) else 'stroke="#c9ced6"'
    return "".join([*parts, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" {frame}/>'])


def make_page() -> None:
    """Write docs/results/incident/curves.svg, and docs/results/incident.md from its words and the numbers."""
    runs, checks = read("runs"), read("checks")
    (FOLDER / "curves.svg").write_text(figure(runs))
    honest = end(runs["honest"]["curves"], "fp32")
    values: dict[str, Any] = {"about": runs["about"], "checks": checks, "count": len(RUNS)}
    for run in RUNS:
        curves = runs[run.key]["curves"]
        seen = {metric: signature(curves, metric, honest) for metric in ("fp32", "own")}
        values[run.key] = {name: loss(end(curves, name)) for name in LINES} | {
            "least": loss(min(curves["reported"])),
            "most": loss(max(curves["fp32"])),
            "logit": f"{max(curves['logit']):.0f}",
            "apart": f"{largest_difference(curves):.1g}",
            "signature": f"**yes**, step {seen['fp32']}" if seen["fp32"] else "no",
            "own_signature": f"**yes**, step {seen['own']}" if seen["own"] else "no",
        }
    values["summed"] = {f"at_{k}": f"{v:g}" for k, v in summed_in_bf16().items()}
    values["moved"] = {f"by_{k}": f"{v:g}" for k, v in moved_in_bf16().items()}
    PAGE.write_text((FOLDER / "page.md.in").read_text().format_map(values))


def loss(value: float) -> str:
    """Format a loss in nats for the table."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.1e}"


def largest_difference(curves: Curves) -> float:
    """Return the largest difference between reported and recomputed loss, relative to the recomputed one."""
    reported, fp32 = (np.array(curves[name], np.float64) for name in ("reported", "fp32"))
    return float(np.max(np.abs(reported - fp32) / fp32))


@dataclass
class Incident:
    """Make the runs, the checks or the page of docs/results/incident.md."""

    what: Annotated[Literal["train", "checks", "page"], tyro.conf.Positional]
    """train: run all trainings; checks: judge each suspect; page: write figure and text from both"""
    only: tuple[str, ...] = ()
    """keys of the runs to repeat; the others are kept"""
    jobs: int = 2
    """number of training processes at a time, one thread each"""


def make_runs(only: Sequence[str], jobs: int) -> None:
    """Train the chosen runs, and keep the others."""
    done: dict[str, Any] = read("runs") if only else {}
    keys = list(only) or [run.key for run in RUNS]
    done["about"] = about()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for key, result in pool.imap_unordered(train_by_key, keys):
            done[key] = result
            print(f"{key}: {result['seconds']} s", file=sys.stderr, flush=True)
            write("runs", done)


def make_checks(only: Sequence[str]) -> None:
    """Judge every suspect once; runs of one suspect at two learning rates share its line."""
    done: dict[str, Any] = read("checks") if only else {}
    first_of = {run.suspect: run.key for run in reversed(RUNS)}
    for key in (run.key for run in RUNS if first_of[run.suspect] == run.key):
        if not only or key in only:
            done[key] = first_disagreement(BY_KEY[key])
            print(f"{key}: {done[key]}", file=sys.stderr, flush=True)
            write("checks", done)


def main() -> None:
    """Train, check, or make the page."""
    options = tyro.cli(Incident, description=__doc__)
    if unknown := sorted(set(options.only) - set(BY_KEY)):
        raise UserError(f"no such run: {', '.join(unknown)}; there are {', '.join(BY_KEY)}")
    if options.what == "train":
        make_runs(options.only, options.jobs)
    elif options.what == "checks":
        make_checks(options.only)
    else:
        make_page()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"incident: {error}")
