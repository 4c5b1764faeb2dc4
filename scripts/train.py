"""`lockstep train`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from core.errors import UserError
from scripts.arguments import parse
from scripts.backends import REFERENCE, on_its_device, spec


@dataclass
class Train:
    """Train a run file: `lockstep train CONFIG`. Ctrl-C writes a checkpoint after the step; --resume RUN goes on.

    Ends 0 when finished, 1 if a parity check disagreed, 2 if it could not start, 130 after Ctrl-C.
    """

    config: Annotated[Path | None, tyro.conf.Positional] = None
    """run file (TOML)"""
    resume: Path | None = None
    """run directory to go on with, from its last checkpoint"""
    out: Path = Path("runs")
    """folder of run directories"""
    overwrite: bool = False
    """replace an earlier run of the same name"""
    backend: Literal["torch", "jax"] = "torch"
    """who trains; jax trains the reference itself"""


def main(argv: list[str]) -> int:
    """Open everything that can fail, then train."""
    from core.config_file import load_config
    from core.parity.load import load_backend
    from core.run_data import RunData

    options, given = parse(Train, "train", argv, with_settings=True)
    if (options.config is None) == (options.resume is None):
        raise UserError("name a run file to train, or --resume RUN to go on with one")
    if options.resume and options.overwrite:
        raise UserError("--overwrite and --resume exclude each other")
    resumed = _resumed(options.resume, given) if options.resume else None
    config = resumed.config if resumed else load_config(options.config, given)
    name = resumed.info.get("backend", "torch") if resumed else options.backend
    _one_rank(config.train.ranks)
    data = RunData.open(config)
    backend = load_backend(spec(name))
    config = on_its_device(config, backend)
    about = backend.describe(config)
    with ExitStack() as stack:
        if resumed:
            resumed.close()
            run = stack.enter_context(_reopen(resumed.path, data))
        else:
            run = stack.enter_context(_create(options, config, name, about, data))
        return _train(stack, run, data, backend, about, resuming=resumed is not None)


def _train(stack: ExitStack, run: Any, data: Any, backend: Any, about: Mapping[str, Any], resuming: bool) -> int:
    from rich.console import Console

    from core.loop import train
    from core.parity.shadow import Shadow
    from core.parity.verdict import Check
    from core.sinks.console import ConsoleSink
    from core.sinks.jsonl import JsonlSink
    from core.sinks.wandb import WandbSink
    from scripts.start import print_start

    config = run.config
    console = Console(highlight=False)
    session = backend.open(config)
    stack.callback(session.close)
    first = 1
    if resuming:
        state, extra = run.load_latest(lambda text: console.print(text, style="yellow", markup=False))
        if extra.get("data_fingerprint") != data.dataset.fingerprint:
            raise UserError(
                f"{run.path}: its checkpoint was made with another data set than {config.data.path} holds now"
            )
        session.load(state)
        run.resume_from(state.step)
        first = state.step + 1
        console.print(f"{run.path}: going on from step {state.step}", markup=False)
        if first > config.train.steps:
            run.finish()
            console.print("all steps are done", markup=False)
            return 0
    print_start(console, run, data, about)
    interrupted = stack.enter_context(_interrupts(console))
    sinks: list[Any] = [JsonlSink(run)]
    if config.log.wandb != "disabled":
        sinks.append(WandbSink(run, lambda text: console.print(text, style="yellow", markup=False)))
    sinks.append(ConsoleSink(config.train.steps, first - 1, console))
    disagreed: list[int] = []

    class Verdicts:
        """Remembers which checks disagreed, for the exit code."""

        def check(self, check: Check) -> None:
            if check.verdict == "disagreed":
                disagreed.append(check.step)

        def record(self, record: object) -> None: ...
        def skipped(self, step: int, reason: str) -> None: ...
        def note(self, text: str) -> None: ...
        def close(self) -> None: ...

    sinks.append(Verdicts())
    for sink in sinks:
        stack.callback(sink.close)
    watch = None
    if config.parity.every:
        watch = Shadow(config, REFERENCE)
        stack.callback(watch.close)
    finished = train(session, data, run, sinks, interrupted, first, str(about["device"]), watch)
    stack.close()
    if not finished:
        console.print(f"stopped; go on with: lockstep train --resume {run.path}", markup=False)
        return 130
    return 1 if disagreed else 0


def _resumed(path: Path, given: Mapping[str, str]) -> Any:
    from core.run import RunDir

    if given:
        raise UserError(f"a resumed run keeps its settings; take away: {', '.join(sorted(given))}")
    return RunDir.open(path)


def _one_rank(ranks: int) -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != 1 or world != 1:
        raise UserError(
            f"train.ranks = {ranks}, {world} launched: this version trains in one process; "
            "set train.ranks = 1 and launch without torchrun"
        )


def _reopen(path: Path, data: Any) -> Any:
    from core.run import RunDir

    run = RunDir.open(path, write=True)
    made_with = run.info.get("data", {})
    for what, now in (("tokenizer", data.dataset.index.tokenizer_sha256), ("data set", data.dataset.fingerprint)):
        key = "tokenizer_fingerprint" if what == "tokenizer" else "fingerprint"
        if made_with.get(key) != now:
            run.close()
            raise UserError(
                f"{path} was made with another {what}: {str(made_with.get(key))[:16]}, "
                f"but {run.config.data.path} holds {now[:16]}"
            )
    return run


def _create(options: Train, config: Any, backend: str, about: Mapping[str, Any], data: Any) -> Any:
    from core.run import RunDir
    from scripts.start import run_info

    return RunDir.create(options.out / config.name, config, run_info(config, backend, about, data), options.overwrite)


@contextmanager
def _interrupts(console: Any) -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM set a flag the first time; the second Ctrl-C stops at once."""
    flag = threading.Event()

    def stop(signum: int, frame: object) -> None:
        if flag.is_set() and signum == signal.SIGINT:
            raise KeyboardInterrupt
        flag.set()
        console.print("finishing this step, then writing a checkpoint (Ctrl-C again stops at once)", markup=False)

    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
