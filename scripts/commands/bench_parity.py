"""`lockstep bench parity`: the cost of a check, in time and in bytes a step.

All rows of a model are measured in one process, in turns, after compilation. The figures are medians. A training step
is the forward and backward pass of one micro-batch and the optimizer's update, by the compiled program.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import jax
import torch
import tyro
from torch import Tensor

from lockstep.core.backend import Batch
from lockstep.core.bench import parity_costs
from lockstep.core.bench.files import read_results, write_page
from lockstep.core.bench.parity_costs import CHECK, GRADIENTS, OFF, SHADOW, TAPS
from lockstep.core.config.file import load_config
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.files.atomic import write_atomically
from lockstep.core.model.budget import parameter_count
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.recorded import observe, probe_of
from lockstep.core.parity.evidence.recorder import Recorder
from lockstep.core.parity.judge import end_to_end, local
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.measures.compare import Reference
from lockstep.core.parity.modes.shadow import Shadow
from lockstep.core.run.data import RunData
from lockstep.jax_backend.backend import JaxBackend
from lockstep.scripts.shared.arguments import check_file, parse
from lockstep.scripts.shared.backends import REFERENCE
from lockstep.scripts.shared.installation import shipped_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession
from lockstep.torch_backend.tools.bench import random_batches
from lockstep.torch_backend.tools.sketch import sign_table, sketch, sketches_of

QUICKSTART, LARGE = shipped_config("quickstart"), shipped_config("llama-1b")
# Blocks of the 1.24B model for a machine with little memory: width, heads and feed-forward are the model's own.
SCALED = {"model.layers": "1", "model.vocab_size": "4096", "train.sequence_length": "128", "train.curriculum": ""}
SCALED |= {"train.batch_size": "1", "train.micro_batch_size": "1", "device": "cpu", "train.ranks": "1"}
MOST_THREADS = 1024


@dataclass
class BenchParity:
    """Measure the cost of observing a step.

    Rows: no taps, gradients or taps each step, a full check every N steps, the shadow. Measured are the whole
    quickstart model and blocks of the 1.24B model's shapes. Bytes are computed for the whole 1.24B model.
    """

    config: Path = QUICKSTART
    """run file whose whole model is measured"""
    every: int = 100
    """N: steps from one check to the next"""
    repeats: int = 7
    """timings of each row, in turns; the median is reported"""
    threads: int = 0
    """threads of torch; 0 = all cores but one, which the reference uses"""
    small: bool = False
    """leave out the 1.24B model's shapes, which take 2.5 GB"""
    json: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("bench_parity.json")
    """file of the results"""
    page: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: not written)")] = None
    """measure nothing; write a Markdown page of the results"""


def in_turns(rows: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Return `repeats` timings of each row, taken in turns; the first round is a warm-up and is dropped."""
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
    """Sketch as `sketches_of` does, without norm, largest magnitude, mean and non-finite count: a second pass."""
    return {name: sketch(x, table=table) for name, x in tensors.items()}


def sketch_all(session: TorchSession, of_all: Callable[..., Any]) -> Callable[[], Any]:
    """Return one compiled program that sketches every gradient of a step."""
    table = sign_table(max(p.numel() for p in session.parameters.values()), session.device)
    program = session.compiled(of_all)
    grads = {name: torch.randn_like(p) for name, p in session.parameters.items()}
    return lambda: program(grads, table)


@contextmanager
def recorded(
    session: TorchSession, config: RunConfig, folder: Path, batch: Batch
) -> Iterator[dict[str, Callable[[], Any]]]:
    """Yield a function that records a training step, for each kind of recording. Each has a folder of its own."""
    with ExitStack() as stack:

        def step(mode: str, **every: int) -> Callable[[], Any]:
            settings = config.model_copy(update={"parity": config.parity.model_copy(update=every)})
            recorder = stack.enter_context(Recorder(settings, folder / mode, None))
            return lambda: recorder.due(1) and recorder.step(session, batch, False)

        yield {GRADIENTS: step(GRADIENTS, record_every=1), TAPS: step(TAPS, record_every=1, record_taps_every=1)}


def measure(options: BenchParity) -> dict[str, Any]:
    """Return every row, in seconds and in steps."""
    # The quickstart compiles block by block to start sooner. One program for the whole step is faster.
    scope = {"compile.scope": "model"} if options.config == QUICKSTART else {}
    whole = load_config(options.config, {"device": "cpu", "compile.enabled": "true", **scope})
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
        "judgement of a check during training": lambda: judge(evidence, reference),
        "evidence of a check during training": lambda: gather(session, config, batch, probe),
        CHECK: lambda: judge(gather(session, config, batch, probe), reference),
    }
    with tempfile.TemporaryDirectory() as folder:
        with recorded(session, config, Path(folder), batch) as recording_rows:
            seconds = in_turns({**rows, **recording_rows}, options.repeats)
        least, size = (next(Path(folder, mode).iterdir()).stat().st_size for mode in (GRADIENTS, TAPS))
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    step, evident = medians["training step"], parity_costs.array_bytes(evidence)
    recording, shadow = overheads(whole, options.repeats, options.every)
    waits = (medians[CHECK] - step) / options.every
    modes = {
        OFF: _mode(step, step, 0, 0),
        GRADIENTS: _mode(step * (1 + recording["share"]), step, least, least),
        TAPS: _mode(medians[TAPS], step, size, size),
        CHECK: _mode(step + waits, step, (evident + size) / options.every, (evident + size) / options.every),
        SHADOW: _mode(step * (1 + shadow["share"]), step, *[(evident + size) / options.every] * 2),
    }
    model = {
        "name": whole.name,
        "scaled": "",
        "modes": modes,
        "remarks": [
            f"A full check takes {medians[CHECK]:.3f} s with its step; the trainer waits for all of it.",
            "A step whose gradients are recorded, with all its micro-batches, takes "
            f"{recording['recorded_step']:.3f} s instead of {recording['step']:.3f} s; one of a single micro-batch "
            f"{medians[GRADIENTS]:.3f} s instead of {step:.3f} s.",
            f"A step that the shadow checks, with all its micro-batches, takes {shadow['checked_step']:.3f} s instead "
            f"of {shadow['step']:.3f} s, the worker at work beside it.",
            f"A step's observations: {size:,} bytes; the evidence of a check, which is handed over and not kept: "
            f"{evident:,}.",
        ],
    }
    return {
        "config": str(options.config.name),
        "seconds": seconds,
        "medians": medians,
        "steps": {name: value / step for name, value in medians.items()},
        "recording": recording,
        "shadow": shadow,
        "models": [model],
    }


def _mode(seconds: float | None, step: float, size: float | None, whole: float | None) -> dict[str, Any]:
    more = None if seconds is None else seconds / step - 1
    return {"seconds": seconds, "more": more, "bytes": size, "bytes_whole": whole}


def measure_large(options: BenchParity, threads: int) -> dict[str, Any]:
    """Measure step and sketches of blocks of the 1.24B model's shapes; compute all bytes for the whole model."""
    torch.set_num_threads(threads)
    whole = load_config(LARGE)
    config = load_config(LARGE, {**SCALED, "compile.enabled": "true"})
    session, batch = TorchBackend().open_rank(config), random_batches(config, 1)[0]
    with tempfile.TemporaryDirectory() as folder:
        with recorded(session, config, Path(folder), batch) as rows:
            taken = in_turns({OFF: lambda: session.step(batch), **rows}, options.repeats)
        least, size = (next(Path(folder, mode).iterdir()).stat().st_size for mode in (GRADIENTS, TAPS))
    step, lightly, seen = (statistics.median(taken[mode]) for mode in (OFF, GRADIENTS, TAPS))
    observed = parity_costs.observation_bytes(whole)
    handed = (parity_costs.evidence_bytes(whole) + observed) / options.every
    here = (parity_costs.evidence_bytes(config, 1) + parity_costs.observation_bytes(config)) / options.every
    model, train = config.model, config.train
    return {
        "name": f"{whole.name}, blocks of its shapes",
        "scaled": f"Measured with {model.layers} layer of {whole.model.layers}, a vocabulary of {model.vocab_size:,} "
        f"of {whole.model.vocab_size:,}, [{train.batch_size}, {train.sequence_length}] tokens instead of "
        f"[{whole.train.micro_batch_size}, {whole.train.sequence_length}]; hidden {model.hidden}, {model.heads} heads, "
        f"{model.kv_heads} KV heads and feed-forward {model.ffn_hidden:,} as they are: {parameter_count(model):,} "
        f"parameters of {parameter_count(whole.model):,}. The last column is computed for all of it.",
        "modes": {
            OFF: _mode(step, step, 0, 0),
            GRADIENTS: _mode(lightly, step, least, parity_costs.gradient_bytes(whole)),
            TAPS: _mode(seen, step, size, observed),
            CHECK: _mode(None, step, here, handed),
            SHADOW: _mode(None, step, here, handed),
        },
        "seconds": taken,
        "remarks": [
            f"Sketches, computed: {len(parity_costs.observation_names(whole))} of {4 * 1021:,} bytes are "
            f"{parity_costs.sketch_bytes(whole):,}; with statistics and names {observed:,}. They do not grow with the "
            f"batch: against a step of 2²⁰ tokens the time of a sketch is a smaller share than against one of "
            f"{train.batch_size * train.sequence_length}.",
            f"The evidence of a check, computed: {parity_costs.evidence_bytes(whole):,} bytes, of which weights, "
            "moments and gradients before and after are the most.",
            "A full check and the shadow are not measured: weights, moments and evidence of several copies, FP64 "
            "among them, are more than the memory that was given.",
        ],
    }


def overheads(config: RunConfig, repeats: int, every: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return seconds that recording its gradients adds to the trainer's step, and a check with the worker beside it."""
    data = RunData.open(config)
    session = TorchBackend().open_rank(config)
    with tempfile.TemporaryDirectory() as folder:
        batch = data.batch(1)
        with recorded(session, config, Path(folder), batch) as rows:
            taken = in_turns({OFF: lambda: session.step(batch), GRADIENTS: rows[GRADIENTS]}, 3 * repeats)
    step, with_record = (statistics.median(taken[mode]) for mode in (OFF, GRADIENTS))
    recording = {"step": step, "recorded_step": with_record, "share": with_record / step - 1}
    plain, checked = [], []
    parity = config.parity.model_copy(update={"every": every, "queue": 1})
    with Shadow(config.model_copy(update={"parity": parity}), REFERENCE) as shadow:
        for number in range(repeats + 1):
            started = time.perf_counter()
            shadow.step(session, data.batch(number + 1), False)
            seconds = time.perf_counter() - started
            list(shadow.drain())
            for _ in range(3):
                started = time.perf_counter()
                session.step(data.batch(number + 1))
                plain.append(time.perf_counter() - started)
            if number:  # the first compiles
                checked.append(seconds)
    step, check = statistics.median(plain), statistics.median(checked)
    extra = check - step
    return recording, {"step": step, "checked_step": check, "added": extra, "share": extra / (every * step)}


def main(argv: list[str]) -> int:
    """Measure, or write the page."""
    options, _ = parse(BenchParity, "bench parity", argv, with_settings=False)
    for name in ("repeats", "every"):
        if getattr(options, name) < 1:
            raise UserError(f"command line: {name} = {getattr(options, name)}: must be at least 1")
    if not 0 <= options.threads <= MOST_THREADS:
        raise UserError(f"command line: threads = {options.threads}: must be a number from 0 to {MOST_THREADS}")
    check_file("json", options.json)
    check_file("page", options.page)
    if options.page:
        results = read_results(options.json, parity_costs.SUITE, parity_costs.SCHEMA)
        write_page(options.page, parity_costs.page(results))
        print(options.page)
        return 0
    torch.set_num_threads(options.threads or max(1, (os.cpu_count() or 2) - 1))
    found = {
        "schema": parity_costs.SCHEMA,
        "suite": parity_costs.SUITE,
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {"torch": torch.__version__, "jax": jax.__version__, "python": platform.python_version()},
        "every": options.every,
        **measure(options),
    }
    if not options.small:
        # A process of its own keeps the other model's session and reference out of the measured memory.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as own:
            found["models"].append(own.submit(measure_large, options, torch.get_num_threads()).result())
    write_atomically(options.json, [(json.dumps(found, indent=1) + "\n").encode()])
    print(parity_costs.page(found))
    return 0
