"""`lockstep profile`."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lockstep.core.errors import UserError
from lockstep.core.sinks.lines import announce
from lockstep.scripts.shared.arguments import parse
from lockstep.scripts.shared.backends import TRAINER, on_its_device, open_named
from lockstep.scripts.shared.peers import needs_start, on_every_rank, ranks_of_launch, start_ranks

if TYPE_CHECKING:
    from lockstep.core.backend import Batch
    from lockstep.core.config.schema import RunConfig
    from lockstep.core.run.ranks import Ranks

TRACE, SUMMARY, PAGE = "trace.json.gz", "summary.json", "summary.md"
# Record only the profiled steps, and list each kernel inside a CUDA graph.
NSYS = (
    "nsys profile --trace=cuda,nvtx,cublas,cudnn --sample=none --cpuctxsw=none --cuda-graph-trace=node "
    "--capture-range=cudaProfilerApi --capture-range-end=stop --force-overwrite=true"
)


@dataclass
class Profile:
    """Record three training steps of a run file by PyTorch's profiler: `lockstep profile CONFIG`.

    Writes trace.json.gz (Perfetto and Chrome open it), summary.json and summary.md, and prints the summary. Under
    torchrun rank 0 is recorded.
    """

    config: Annotated[
        Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CONFIG]", help_behavior_hint="(this or --trace)")
    ] = None
    """run file (TOML); the tokens are random if its data is not prepared"""
    out: Annotated[
        Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: profiles/NAME; with --trace: none)")
    ] = None
    """folder for the profile; an earlier profile in it is replaced"""
    trace: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: record one)")] = None
    """record nothing; summarize this trace of PyTorch's profiler"""
    top: int = 20
    """number of kernels in the summary"""
    no_floor: bool = False
    """do not measure the lower bound of the step's time"""
    nvtx: bool = False
    """write nothing; run the steps with NVTX ranges. Nsight Systems starts this command (see the summary)"""


@on_every_rank
def main(argv: list[str]) -> int:
    """Record, or read a trace; summarize."""
    from lockstep.core.config.file import load_config
    from lockstep.core.profile.summary import summarize
    from lockstep.core.profile.trace import read_trace

    # Before torch is loaded: its profiler notes every start on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    options, given = parse(Profile, "profile", argv, with_settings=True)
    if (options.config is None) == (options.trace is None):
        raise UserError("name either a run file to profile or --trace FILE to summarize, not both")
    if options.top < 1:
        raise UserError(f"top = {options.top}: must be at least 1")
    if options.trace:
        if given or options.nvtx:
            raise UserError("--trace reads an existing trace; leave out the settings and --nvtx")
        found = summarize(read_trace(options.trace), options.top)
        if options.out:
            make(options.out)
            write(options.out, options.trace.name, found)
        return say(options.trace.name, found)
    config = load_config(options.config, given)
    if needs_start(config):
        return start_ranks(config.train.ranks, ["profile", *argv])
    with ranks_of_launch(config) as ranks:
        return profile(options, config, given, argv, ranks)


def profile(options: Profile, config: RunConfig, given: Mapping[str, str], argv: list[str], ranks: Ranks) -> int:
    """Record steps of a run, summarize them, and print the command for Nsight Systems.

    Every rank runs the steps, and rank 0 records them.
    """
    from lockstep.core.profile.summary import summarize
    from lockstep.core.profile.trace import read_trace
    from lockstep.torch_backend.tools.profile import STEPS, record, under_nsight, unrecorded

    # None of these steps may lie beyond the schedule's end.
    train = config.train.model_copy(update={"steps": max(config.train.steps, STEPS)})
    config = config.model_copy(update={"train": train})
    backend: Any = open_named(TRAINER)
    config = on_its_device(config, backend)
    about = backend.describe(config)
    out = options.out or Path("profiles") / config.name
    with ExitStack() as stack:
        batches, tokens = batches_of(stack, options, config, given)
        if not options.nvtx and ranks.rank == 0:
            make(out)
        session = backend.open(config)
        stack.callback(session.close)
        own = session.own if config.train.ranks > 1 else session
        if options.nvtx:
            print(f"{under_nsight(session, own, batches):.4g} s a step, with NVTX ranges")
            return 0
        if ranks.rank:
            unrecorded(session, batches)
            return 0
        measured = record(session, own, batches, out / TRACE)
    found = summarize(read_trace(out / TRACE), options.top) | measured
    found["floor_seconds"] = None if options.no_floor else floor_of(config)
    found["about"] = {
        "device": f"{about['device']}, torch {about['versions']['torch']}",
        "a step": f"{train.batch_size} sequences of {train.sequence_length}: {tokens}",
        **about["in_force"],
    }
    if config.train.ranks > 1:
        found["about"]["recorded rank"] = f"0 of {config.train.ranks}"
    write(out, f"Profile of {config.name}", found)
    say(f"Profile of {config.name}", found)
    announce(f"written: {', '.join(str(out / name) for name in (TRACE, SUMMARY, PAGE))}")
    if about["device_kind"] == "cuda":
        announce("for Nsight Systems: " + nsys(out, argv, config.train.ranks))
    return 0


def batches_of(
    stack: ExitStack, options: Profile, config: RunConfig, given: Mapping[str, str]
) -> tuple[Iterator[Batch], str]:
    """Return the run's batches, or random ones if no data is prepared, and a description of them."""
    from lockstep.core.data.index import INDEX_NAME
    from lockstep.core.data.loader import Prefetcher
    from lockstep.scripts.shared.open_data import open_data
    from lockstep.torch_backend.tools.bench import random_batches
    from lockstep.torch_backend.tools.profile import STEPS

    assert options.config is not None
    missing = [folder for folder in config.data.folders if not (Path(folder) / INDEX_NAME).is_file()]
    if missing and not config.attention.needs_documents:
        return itertools.cycle(random_batches(config)), f"random tokens: {missing[0]} holds no prepared data"
    data = open_data(config, options.config, given)
    batches = stack.enter_context(Prefetcher(data.batch, 1, STEPS + 1, config.data.prefetch))
    return batches, f"tokens of {config.data.title}"


def floor_of(config: RunConfig) -> float | None:
    """Return a lower bound of one rank's step, in seconds (core/model/budget.py)."""
    from lockstep.core.model.budget import floor_seconds
    from lockstep.torch_backend.tools.bench import measure_floor

    train = config.train.model_copy(update={"batch_size": config.train.batch_size // config.train.ranks})
    measured = measure_floor()
    return floor_seconds(config.model_copy(update={"train": train}), measured["rates"], measured["bandwidth"])


def nsys(out: Path, argv: list[str], ranks: int = 1) -> str:
    """Return the command that records the same steps with Nsight Systems."""
    lockstep = "lockstep" if ranks == 1 else f"torchrun --nproc-per-node {ranks} -m lockstep"
    return f"{NSYS} --output={shlex.quote(str(out / 'nsys'))} {lockstep} {shlex.join(['profile', *argv, '--nvtx'])}"


def make(folder: Path) -> None:
    """Make the folder. Raises UserError if this fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {folder}: {error.strerror or error}") from error


def write(folder: Path, title: str, found: Mapping[str, Any]) -> None:
    """Write summary.json and summary.md."""
    from lockstep.core.files.atomic import write_atomically
    from lockstep.core.profile.page import page
    from lockstep.core.sinks.visible import markdown

    write_atomically(folder / SUMMARY, [json.dumps(found, indent=2, ensure_ascii=False).encode() + b"\n"])
    write_atomically(folder / PAGE, [markdown(page(title, found)).encode()])


def say(title: str, found: Mapping[str, Any]) -> int:
    """Print the summary."""
    from lockstep.core.profile.page import page
    from lockstep.core.sinks.lines import announce, terminal_width

    announce(page(title, found, terminal_width(sys.stdout)).rstrip("\n"))
    return 0
