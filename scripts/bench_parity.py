"""What a check costs, in compiled training steps of the same micro-batch. Writes docs/bench_parity.json and .md.

lockstep bench parity [--config configs/quickstart.toml]

All rows are measured in one process, in turns, after compilation; medians. A training step here is forward and backward
of one micro-batch and the optimizer's update, through the compiled program.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import jax
import torch
from torch import Tensor

from core.config import ModelConfig, RunConfig
from core.config_file import load_config
from core.errors import UserError
from core.names import parameter_shapes, tap_names
from core.parity import end_to_end, local
from core.parity.compare import Reference
from core.parity.evidence import gather
from core.parity.observations import Observation
from core.parity.record import observe, probe_of, save_observations
from core.parity.shadow import Shadow
from core.parity.sketch import K
from core.run_data import RunData
from jax_backend.session import JaxBackend
from scripts.arguments import parse
from scripts.backends import REFERENCE
from torch_backend.session import TorchBackend, TorchSession
from torch_backend.sketch import sign_table, sketch, sketches_of

ROOT = Path(__file__).resolve().parent.parent
JSON, PAGE = ROOT / "docs/bench_parity.json", ROOT / "docs/bench_parity.md"
CHECK_EVERY = 100
MOST_THREADS = 1024


@dataclass
class BenchParity:
    """Measure what a check costs."""

    config: Path = ROOT / "configs/quickstart.toml"
    """run file"""
    repeats: int = 7
    """of each row, in turns; the median counts"""
    threads: int = 0
    """of torch; 0 = one less than there are cores, which leaves one to the reference"""


def in_turns(rows: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each row, one after the other, `repeats` times; a first round is not counted."""
    for run in rows.values():
        run()
    taken: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(repeats):
        for name, run in rows.items():
            gc.collect()
            started = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - started)
    return taken


def sketches_alone(tensors: dict[str, Tensor], table: Tensor) -> dict[str, Tensor]:
    """`sketches_of` without norm, largest magnitude, mean and count of what is not finite: a second pass."""
    return {name: sketch(x, table=table) for name, x in tensors.items()}


def sketch_all(session: TorchSession, of_all: Callable[..., Any]) -> Callable[[], Any]:
    """One compiled program that sketches every gradient of a step."""
    table = sign_table(max(p.numel() for p in session.parameters.values()), session.device)
    program = session.compiled(of_all)
    grads = {name: torch.randn_like(p) for name, p in session.parameters.items()}
    return lambda: program(grads, table)


def measure(options: BenchParity) -> dict[str, Any]:
    """Every row, in seconds and in steps."""
    torch.set_num_threads(options.threads or max(1, (os.cpu_count() or 2) - 1))
    whole = load_config(options.config, {"device": "cpu", "compile.enabled": "true"})
    config = whole
    one = config.train.model_copy(update={"batch_size": config.train.micro_batch_size})
    config = config.model_copy(update={"train": one})
    data = RunData.open(config)
    session = TorchBackend().open_rank(config)
    reference = Reference.open(JaxBackend(), config)
    batch = data.batch(1)
    probe = probe_of(batch, config)
    evidence = gather(session, config, batch, probe)
    kept = end_to_end.observations_of(evidence, config.model)

    def of(side: str) -> Reference:
        return Reference(config, getattr(reference, side), getattr(reference, side))

    def repeat(side: str, whole: bool) -> Callable[[], Any]:
        asked = kept if whole else {name: o for name, o in kept.items() if not name.startswith("grad/")}
        target = batch if whole else probe
        return lambda: end_to_end.repeat(asked, evidence.before, target, evidence.tapped, of(side), [])

    def every_stage(side: str) -> Callable[[], Any]:
        return lambda: list(local.stages(evidence, of(side), []))

    rows = {
        "training step": lambda: session.step(batch),
        "sketches of all gradients": sketch_all(session, sketches_alone),
        "sketches and statistics of all gradients": sketch_all(session, sketches_of),
        "observations, in the compiled programs": lambda: observe(session, config, probe),
        "end to end, twin": repeat("twin", True),
        "end to end, truth": repeat("truth", True),
        "local stages, twin": every_stage("twin"),
        "local stages, truth": every_stage("truth"),
        "evidence of a check during training": lambda: gather(session, config, batch, probe),
    }
    seconds = in_turns(rows, options.repeats)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    with tempfile.TemporaryDirectory() as folder:
        size = save_observations(Path(folder), 1, batch, probe, kept).stat().st_size
    return {
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {"torch": torch.__version__, "jax": jax.__version__, "python": platform.python_version()},
        "config": str(options.config.name),
        "seconds": seconds,
        "medians": medians,
        "steps": {name: value / medians["training step"] for name, value in medians.items()},
        "shadow": shadow_overhead(whole, options.repeats),
        "observation_bytes": size,
        "observation_bytes_1b": observation_bytes(load_config(ROOT / "configs/llama-1b.toml", {}).model),
    }


def shadow_overhead(config: RunConfig, repeats: int) -> dict[str, float]:
    """Seconds that a check adds to the trainer's own step, the worker running beside it."""
    data = RunData.open(config)
    session = TorchBackend().open_rank(config)
    plain, checked = [], []
    parity = config.parity.model_copy(update={"every": CHECK_EVERY, "queue": 1})
    with Shadow(config.model_copy(update={"parity": parity}), REFERENCE) as shadow:
        for number in range(repeats + 1):
            started = time.perf_counter()
            shadow.step(session, data.batch(number + 1), False)
            taken = time.perf_counter() - started
            list(shadow.drain())
            for _ in range(3):
                started = time.perf_counter()
                session.step(data.batch(number + 1))
                plain.append(time.perf_counter() - started)
            if number:  # the first compiles
                checked.append(taken)
    step, check = statistics.median(plain), statistics.median(checked)
    extra = check - step
    return {"step": step, "checked_step": check, "added": extra, "share": extra / (CHECK_EVERY * step)}


def observation_bytes(model: ModelConfig) -> int:
    """Bytes of a step's observations: a sketch and six numbers for each tap, its gradient and each parameter's."""
    names = [n for tap in tap_names(model) for n in (tap, f"grad/{tap}")]
    names += [f"gradient/{name}" for name in parameter_shapes(model)] + ["nll/probe"]
    statistics_of_each = len(Observation.__dataclass_fields__) - 1
    return len(names) * (4 * K + 8 * statistics_of_each + max(map(len, names)))


def page(found: dict[str, Any]) -> str:
    """docs/bench_parity.md."""
    steps, machine, versions = found["steps"], found["machine"], found["versions"]
    lines = [
        "# What a check costs",
        "",
        f"Made by `lockstep bench parity`: {found['config']}, one micro-batch a step, bf16, torch.compile; "
        f"torch {versions['torch'].split('+')[0]}, jax {versions['jax']}, {machine['processor']} CPU, "
        f"{machine['cores']} cores, {machine['threads']} threads; medians of interleaved repetitions, compilation "
        "aside ([every repetition](bench_parity.json)).",
        "",
        "| what | seconds | in training steps |",
        "|---|---|---|",
        *(f"| {name} | {value:.3f} | {steps[name]:.3g} |" for name, value in found["medians"].items()),
        "",
        f"- End to end, twin and truth together: {steps['end to end, twin'] + steps['end to end, truth']:.1f} steps.",
        f"- All local stages, twin and truth: {steps['local stages, twin'] + steps['local stages, truth']:.1f} steps.",
        f"- Sketching all gradients: {100 * steps['sketches of all gradients']:.1f} % of a step; with norm, largest "
        "magnitude, mean and count of non-finite values, which is another pass over them, "
        f"{100 * steps['sketches and statistics of all gradients']:.1f} %.",
        f"- Shadow, one check in {CHECK_EVERY} steps, the worker at work beside the trainer: a checked step, "
        f"with all its micro-batches, takes {found['shadow']['checked_step']:.3f} s instead of "
        f"{found['shadow']['step']:.3f} s, "
        f"{100 * found['shadow']['share']:.2f} % of the time of {CHECK_EVERY} steps.",
        f"- Observations: {found['observation_bytes']:,} bytes a step ({found['observation_bytes'] / 2**20:.2f} MiB); "
        f"for the 1.24B model, computed: {found['observation_bytes_1b']:,} bytes "
        f"({found['observation_bytes_1b'] / 2**20:.2f} MiB).",
        "",
    ]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Measure and write both files."""
    options, _ = parse(BenchParity, "bench parity", argv, with_settings=False)
    if options.repeats < 1:
        raise UserError(f"command line: repeats = {options.repeats}: at least one is needed")
    if not 0 <= options.threads <= MOST_THREADS:
        raise UserError(f"command line: threads = {options.threads}: must be a number from 0 to {MOST_THREADS}")
    found = measure(options)
    JSON.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(page(found))
    print(page(found))
    return 0
