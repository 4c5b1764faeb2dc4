"""The ranks of a run as peers: each runs the same program, and each finds out which rank fails or hangs.

All ranks make the same calls in the same order, and write their progress to the store. A rank that fails writes its
error there and ends. Its sockets close, and every rank that waits for it gets an error at once. Each rank then finds
the rank at fault from the errors, the sockets and the progress. One rank reports it: rank 0, or the first other rank if
rank 0 is at fault.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lockstep.core.backend import NotSupported
from lockstep.core.data.loader import LoaderError
from lockstep.core.train.finite import NotFinite, of_ranks
from lockstep.torch_backend.ranks.process_groups import (
    DONE,
    IDLE,
    PATIENCE,
    Progress,
    RankError,
    RankProgress,
    join_group,
    meet,
    of_link,
    set_timeout,
    silence,
    take_device,
    timed_out,
)
from lockstep.torch_backend.ranks.sharing import Sharing

T = TypeVar("T")

# Seconds to wait for the failed rank's error in the store: the other ranks may notice the failure before it is written.
WORDS_SECONDS = 2.0
# Seconds for which a rank that is not at fault stays, so that rank 0 can report the rank at fault.
TELL_SECONDS = 30.0
GONE = "its process has ended, or the network does not reach it"
DEVICE = "lockstep/device"

_joined: Peers | None = None


class Peers(RankProgress):
    """The ranks that torchrun launched, seen from this process; a `Ranks` of core/run/ranks.py.

    lost: the reason why the ranks cannot continue; None while they can. tells: True if this rank reports the reason.
    """

    def __init__(self, cuda: bool | None, place: tuple[int, int, Store] | None = None) -> None:
        """Join the process group.

        cuda: True if ranks compute on GPUs; only rank 0's value counts. place: (rank, ranks, store); None takes
        torchrun's.
        """
        rank, ranks, store = place or meet()
        if rank == 0:
            store.set(DEVICE, "cuda" if cuda else "cpu")
        on_gpus = store.get(DEVICE).decode() == "cuda"
        self.device = take_device(int(os.environ.get("LOCAL_RANK", rank)), on_gpus)
        join_group(rank, ranks, store, self.device)
        super().__init__()
        self._where = getattr(store, "host", "localhost"), int(getattr(store, "port", 0))
        # Two groups with different timeouts: one for waits while rank 0 works alone, one for waits for each other.
        self._of_first = dist.new_group(backend="gloo", timeout=IDLE)
        self._of_all = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._patience = PATIENCE
        self._calls = 0
        self.lost: str | None = None
        self.tells = self.rank == 0
        self._own_trouble = False

    def be_patient_for(self, seconds: float) -> None:
        """Set the timeout of a wait for other ranks; it does not limit waits while rank 0 works alone."""
        self._patience = timedelta(seconds=seconds)
        set_timeout(self._patience)
        set_timeout(self._patience, self._of_all)
        self.store.set_timeout(self._patience)

    def of_first(self, compute: Callable[[], T], asked: str = "receive rank 0's decision") -> T:
        """Call `compute` on rank 0 only, and return its result on every rank.

        If it raises, every rank raises: rank 0 the error itself, other ranks NotSupported if it was that, else
        RankError.
        """
        raised = None
        with self._watched(asked):
            found: list[Any] = ["done", None]
            if self.rank == 0:
                try:
                    found = ["done", compute()]
                except Exception as error:
                    raised = error
                    found = ["not supported" if isinstance(error, NotSupported) else "raised", str(error)]
            dist.broadcast_object_list(found, src=0, group=self._of_first)
        if raised is not None:
            raise raised
        kind, value = found
        if kind == "not supported":
            raise NotSupported(value)
        if kind == "raised":
            raise RankError(f"rank 0: {value}")
        heard: T = value
        return heard

    def gather(self, value: T, asked: str = "exchange results") -> list[T]:
        """Return every rank's value, in the order of ranks."""
        with self._watched(asked):
            return self._exchanged(value)

    def to_first(self, value: T) -> list[T]:
        """Return every rank's value on rank 0, and only this rank's value on other ranks."""
        with self._watched("send results to rank 0"):
            found: list[Any] | None = [None] * self.count if self.rank == 0 else None
            dist.gather_object(value, found, dst=0, group=self._of_all)
            return [value] if found is None else found

    def do(self, asked: str, own: Callable[[], T], sharing: Sharing | None, together: bool, step: bool = False) -> T:
        """Call `own` on every rank and return this rank's result; if it raises on one rank, raise on every rank.

        Args:
            asked: the name of the call, for messages.
            own: the call.
            sharing: object that reports the parts that the call sends to other ranks; None if it sends none.
            together: True if other ranks may block on a rank that raises inside the call; then that rank must end.
            step: True for an optimizer step, which may be skipped.

        Raises the error of `own`, NotSupported or RankError for another rank's error, and NotFinite with the messages
        of all ranks.
        """
        mine: T | None = None
        raised: Exception | None = None
        with self._watched(asked) as call:
            if sharing is not None:
                sharing.on_sent = partial(self._report_next, call, count(1))
            outcome: tuple[str, str | None] = "done", None
            try:
                mine = own()
                outcome = "done", left_out(mine) if step else None
            except NotFinite as error:
                raised, outcome = error, ("not finite", error.where)
            except NotSupported as error:
                raised, outcome = error, ("not supported", str(error))
            except Exception as error:
                if together:
                    raise
                raised, outcome = error, ("raised", in_words(error))
            self.report(call, DONE)
            outcomes = self._exchanged(outcome)
        self._require_finite(raised, outcomes)
        if raised is not None:
            raise raised
        for rank, (kind, words) in enumerate(outcomes):
            if kind == "not supported":
                raise NotSupported(f"rank {rank}: {words}")
            if kind == "raised":
                raise RankError(f"rank {rank}: {words}")
        return self._left_out_by_all(mine, [words for _, words in outcomes]) if step else mine  # type: ignore[return-value]

    def failed(self, error: BaseException) -> None:
        """Write this rank's error to the store, unless all ranks already have it.

        A rank that is not at fault then stays until rank 0 has reported. The rank at fault returns at once, because the
        others wait for its end.
        """
        known = self.lost is not None or isinstance(error, NotFinite | LoaderError | RankError)
        if not known:
            with contextlib.suppress(RuntimeError):  # the store is rank 0's
                self.leave_words("own", in_words(error))
        elif not self._own_trouble and not self.tells:
            until = time.monotonic() + TELL_SECONDS
            while self._first_is_there() and time.monotonic() < until:
                time.sleep(0.1)

    def _first_is_there(self) -> bool:
        """Return whether rank 0, whose process serves the store, still runs; torch's own test prints a long warning."""
        with contextlib.suppress(OSError):
            socket.create_connection(self._where, 1.0).close()
            return True
        return False

    def leave(self) -> None:
        """Leave the process group and close its sockets."""
        global _joined
        _joined = None
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def _watched(self, asked: str) -> Iterator[int]:
        """Yield the number of a call that all ranks make; if the call fails, find the rank at fault."""
        if self.lost is not None:
            raise RankError(self.lost)
        self._calls += 1
        call = self._calls
        try:
            self.report(call, 0)
            yield call
        except BaseException as error:
            self._give_up(error, call, asked)
            raise

    def _exchanged(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self._of_all)
        return found

    def _report_next(self, call: int, numbers: Iterator[int], what: str) -> None:
        self.report(call, next(numbers), what)

    def _left_out_by_all(self, mine: Any, said: Sequence[str | None]) -> Any:
        """Return a step's result, with each rank's reason if all skipped it. Raises RankError if only some did."""
        places = {rank: words for rank, words in enumerate(said) if words is not None}
        if not places:
            return mine
        if len(places) < self.count:
            self._ranks_part(places)
        return saying(mine, of_ranks(places))

    def _require_finite(self, raised: Exception | None, outcomes: Sequence[tuple[str, str | None]]) -> None:
        """Raise NotFinite with all ranks' messages if the step was not finite on all; RankError if only on some."""
        places = {rank: words or "" for rank, (kind, words) in enumerate(outcomes) if kind == "not finite"}
        if not places:
            return
        if len(places) == self.count and isinstance(raised, NotFinite):
            raise NotFinite(raised.record, of_ranks(places)) from raised
        self._ranks_part(places, raised)

    def _ranks_part(self, places: Mapping[int, str], raised: Exception | None = None) -> NoReturn:
        """Raise RankError: values were not finite on some ranks and finite on others."""
        which = ", ".join(map(str, sorted(places)))
        self.lost = f"rank {which}: loss or gradients not finite after the sum over ranks, and finite on the others"
        raise RankError(self.lost) from raised

    def _give_up(self, error: BaseException, call: int, asked: str) -> None:
        """Find the rank that failed and raise RankError; return if it is this rank."""
        linked = isinstance(error, RuntimeError) and of_link(error)
        said: dict[tuple[int, ...], str] = {}
        try:
            self.leave_words("link" if linked else "own", in_words(error))
            if isinstance(error, RuntimeError):
                said = self._found(error, linked, call, asked)
        except RuntimeError:
            # Rank 0 serves the store and has ended. It has reported its error, or torchrun reports it.
            said = {(0,): GONE} if self.rank else {}
        told = [f"{_named(ranks)}{text}" for ranks, text in said.items()]
        self.lost = "; ".join(told) or f"rank {self.rank} failed during a step: {in_words(error)}"
        self._own_trouble = not said
        if said:
            raise RankError(self.lost) from error

    def _found(self, error: RuntimeError, linked: bool, call: int, asked: str) -> dict[tuple[int, ...], str]:
        """Return the faults of other ranks, ranks → message; () → message if no rank is at fault."""
        own, of_links = self._words()
        if own:
            return {(rank,): words for rank, words in own.items()}
        if any(map(timed_out, (error, *of_links))):
            return self._late(call, asked)
        if not linked:
            return {}
        others = [rank for rank in range(self.count) if rank != self.rank]
        return {(rank,): GONE for rank in others if silence(rank, self._of_first)}

    def _words(self) -> tuple[dict[int, str], list[RuntimeError]]:
        """Return the errors that other ranks reported, by rank, and their connection errors; wait a while for them."""
        until = time.monotonic() + WORDS_SECONDS
        while True:
            words = {rank: self.last_words(rank) for rank in range(self.count) if rank != self.rank}
            found = {rank: said for rank, said in words.items() if said is not None}
            own = {rank: text for rank, (kind, text) in found.items() if kind == "own"}
            if own or time.monotonic() > until:
                return own, [RuntimeError(text) for kind, text in found.values() if kind == "link"]
            time.sleep(0.05)

    def _late(self, call: int, asked: str) -> dict[tuple[int, ...], str]:
        """Return the ranks with the least progress, for which the others wait, and a message."""
        waited = f"no answer within {self._patience.total_seconds():g} s to {asked}"
        progress = self.by_rank()
        last, first = min(progress.values(), key=_order), max(progress.values(), key=_order)
        behind = [rank for rank, one in progress.items() if _order(one) == _order(last)]
        if len(behind) == self.count:
            return {(): f"{waited}, and no rank is behind the others: the network between them does not work"}
        begun, sent, _ = last
        how_far = (
            "it has not started the call"
            if begun < call
            else f"it has started the call, and sent {sent or 'none'} of its gradients' parts"
            if not first.what
            else f"it has started the call, but not yet {first.what}"
        )
        if sent == DONE and begun == call:
            how_far = "it has finished the call, but did not report it"
        well = [rank for rank in range(self.count) if rank not in behind]
        self.tells = self.rank == well[0]
        return {tuple(behind): f"{waited}: {how_far}"}


def left_out(made: Any) -> str | None:
    """Return the reason for which a step was skipped, or None. made: result of `step` or `step_and_gradients`."""
    record = made[0] if isinstance(made, tuple) else made
    words: str | None = getattr(record, "left_out", None)
    return words


def saying(made: Any, words: str) -> Any:
    """Return the result of a step with another reason for which it was skipped."""
    return (replace(made[0], left_out=words), *made[1:]) if isinstance(made, tuple) else replace(made, left_out=words)


def in_words(error: BaseException) -> str:
    """Return an error's class and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def join(cuda: bool | None = None) -> Peers:
    """Join the ranks that torchrun launched, once per process.

    cuda: True if ranks compute on GPUs; only rank 0's value counts.
    """
    global _joined
    if _joined is None:
        _joined = Peers(cuda)
    return _joined


def joined() -> Peers | None:
    """Return the ranks that this process has joined, or None."""
    return _joined


def _named(ranks: Sequence[int]) -> str:
    """Return `rank 1: ` or `ranks 1, 2: `; empty for no ranks."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: " if ranks else ""


def _order(progress: Progress) -> tuple[int, int]:
    return progress.command, progress.phase
