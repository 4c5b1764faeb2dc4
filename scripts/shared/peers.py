"""A command on several ranks: it starts them as torchrun does, every rank runs it, and rank 0 reports."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.backend import NotSupported
from lockstep.core.capabilities import OpensRanks, ask
from lockstep.core.errors import UserError
from lockstep.core.run.launch import launched, require_ranks
from lockstep.core.run.ranks import ONE
from lockstep.scripts.shared.backends import open_named

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

    from lockstep.core.backend import Backend
    from lockstep.core.config.schema import RunConfig
    from lockstep.core.run.ranks import Ranks

# The process that started these ranks by `start_ranks`; they end with it.
STARTED_BY = "LOCKSTEP_STARTED_BY"
# When a rank dies, torchrun ends the others. Rank 0 has this many seconds to name the dead rank.
TELL_SECONDS = 4.0


class Untold(UserError):
    """The end of this rank without a message; another rank prints it."""

    def __init__(self) -> None:
        super().__init__()


class Told(UserError):
    """A message that a rank other than 0 prints because rank 0 has ended or hangs."""


def start_ranks(ranks: int, words: Sequence[str], quiet: bool = False) -> int:
    """Run the command line `words` on `ranks` processes of this machine, as torchrun does; return rank 0's exit code.

    When one of them dies, all are ended, and the code is 2 unless rank 0 ended before. quiet: discard their output.
    """
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    import lockstep

    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):  # rank 0 prints one line instead of many
            logging.getLogger(name).setLevel(logging.CRITICAL)
    here = str(Path(lockstep.__file__).parents[1])
    changed = {
        "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // ranks)),
        "PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])]),
        STARTED_BY: str(os.getpid()),
    }
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    sys.stdout.flush()
    try:
        with _silenced() if quiet else contextlib.nullcontext():
            elastic_launch(launch_here(ranks), sys.executable)("-m", "lockstep", *words)
    except ChildFailedError as error:
        code = error.failures[0].exitcode if 0 in error.failures else 2
        if code in (1, 2, 130):
            return code
        if abs(code) in (
            signal.SIGTERM,
            128 + signal.SIGTERM,
        ):  # ended because of another rank, whose error it has reported
            return 2
        raise UserError(f"rank 0: its process died (exit code {code})") from error
    except (SignalException, KeyboardInterrupt):
        return 130
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    return 0


def launch_here(ranks: int) -> LaunchConfig:
    """Configure a launch of `ranks` processes on this machine, under a unique name, as `torchrun --standalone` does."""
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )


@contextmanager
def _silenced() -> Iterator[None]:
    """Discard the stdout of processes that are started meanwhile."""
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def needs_start(config: RunConfig, candidate: Backend | None = None) -> bool:
    """Return whether a command must start a run's ranks itself: there are several, and torchrun has launched none.

    candidate: the backend; None for one that has already trained over several ranks. Raises UserError if torchrun
    launched another number of processes.
    """
    if launched() is not None:
        require_ranks(config.train.ranks)
        return False
    return config.train.ranks > 1 and (candidate is None or opens_ranks(candidate))


def opens_ranks(backend: object) -> bool:
    """Return whether a backend opens sessions of several ranks."""
    try:
        return ask(backend, OpensRanks).ranked
    except NotSupported:
        return False


@contextmanager
def ranks_of_launch(config: RunConfig | None) -> Iterator[Ranks]:
    """Open the ranks of this launch while they run a command; `ONE` without torchrun.

    config: rank 0's settings, which hold the device that ranks compute on. One of the ranks reports the error that ends
    any of them.
    """
    if launched() is None:
        yield ONE
        return
    from lockstep.torch_backend.device import resolve_device
    from lockstep.torch_backend.ranks.peers import join

    if (started_by := os.environ.get(STARTED_BY)) is not None:
        threading.Thread(target=_end_with, args=(int(started_by),), daemon=True).start()
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end_soon)
    ranks = join(None if config is None else resolve_device(config).type == "cuda")
    if ranks.rank:
        print(f"rank {ranks.rank} of {ranks.count}: pid {os.getpid()}, device {ranks.device}", flush=True)
    try:
        yield ranks
    except BaseException as error:
        with contextlib.suppress(KeyboardInterrupt):  # torchrun ends it meanwhile
            ranks.failed(error)
        if ranks.tells and ranks.rank:
            raise Told(str(error)) from error
        if ranks.tells:
            raise
        raise Untold from error
    finally:
        ranks.leave()


def on_every_rank(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Wrap a command that every rank runs: ranks other than 0 drop their output and end with 0."""

    @functools.wraps(main)
    def run(argv: list[str]) -> int:
        if (place := launched()) is None or place[0] == 0:
            return main(argv)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            try:
                main(argv)
            except Told:
                raise
            except (Exception, KeyboardInterrupt) as error:
                raise Untold from error
        return 0

    return run


def reference_of(name: str, ranks: Ranks) -> Backend:
    """Open the reference of a command, which rank 0 alone uses. Raises UserError as `open_named` does."""
    return judge_of(lambda: open_named(name), ranks)


def judge_of(made: Callable[[], Backend], ranks: Ranks) -> Backend:
    """Return the backend that `made` returns as a reference for all ranks; with several ranks, only rank 0 makes it."""
    from lockstep.core.parity.measures.compare import JudgeOfRanks

    if ranks.count == 1:
        return made()
    return JudgeOfRanks(made() if ranks.rank == 0 else None, ranks)


def _end_soon(signum: int, frame: object) -> None:
    """End this process after a delay, in which it may still name another rank that died."""
    timer = threading.Timer(TELL_SECONDS, os._exit, (128 + signum,))
    timer.daemon = True
    timer.start()


def _end_with(parent: int) -> None:
    """End this process when the process that started it is gone."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
