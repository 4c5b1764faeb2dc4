"""The ranks of a run as peers: each runs the same program, and each finds out for itself which of them fails or hangs.

All ranks make the same calls in the same order. Each reports its progress to the store; one that fails leaves its last
words there and ends, so that sockets close and whoever waits for it gets an error at once. Then the words, the sockets
and the progress identify the rank at fault, and one rank reports it: rank 0, or the first of the others if rank 0 is at
fault.
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

# Waiting ranks notice a failure at about the same time; the failed one may have left words already, or leaves them
# soon.
WORDS_SECONDS = 2.0
# Seconds for which a rank that only noticed a failure stays, so that rank 0 can report its source.
TELL_SECONDS = 30.0
GONE = "its process has died, or nothing reaches it"
DEVICE = "lockstep/device"

_joined: Peers | None = None


class Peers(RankProgress):
    """The ranks that torchrun launched, as this process sees them; a `Ranks` of core/run/ranks.py.

    lost: why the ranks cannot go on, in words; None while they can. tells: whether this rank is the one to say so.
    """

    def __init__(self, cuda: bool | None, place: tuple[int, int, Store] | None = None) -> None:
        """Take this rank's place among the ranks.

        cuda: whether ranks compute on GPUs, which rank 0 knows. place: (rank, ranks, store), else torchrun's.
        """
        rank, ranks, store = place or meet()
        if rank == 0:
            store.set(DEVICE, "cuda" if cuda else "cpu")
        on_gpus = store.get(DEVICE).decode() == "cuda"
        self.device = take_device(int(os.environ.get("LOCAL_RANK", rank)), on_gpus)
        join_group(rank, ranks, store, self.device)
        super().__init__()
        self._where = getattr(store, "host", "localhost"), int(getattr(store, "port", 0))
        # Two groups: ranks wait on the first while rank 0 works alone, and on the second for each other.
        self._of_first = dist.new_group(backend="gloo", timeout=IDLE)
        self._of_all = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._patience = PATIENCE
        self._calls = 0
        self.lost: str | None = None
        self.tells = self.rank == 0
        self._own_trouble = False

    def be_patient_for(self, seconds: float) -> None:
        """Set how long this rank waits for another one, but for rank 0 where it works alone."""
        self._patience = timedelta(seconds=seconds)
        set_timeout(self._patience)
        set_timeout(self._patience, self._of_all)
        self.store.set_timeout(self._patience)

    def of_first(self, compute: Callable[[], T], asked: str = "hear what rank 0 decides") -> T:
        """Call `compute` on rank 0 alone, and return its result on every rank.

        If it raises, so does every rank: rank 0 the error itself, others NotSupported for that, else RankError.
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

    def gather(self, value: T, asked: str = "tell each other how it goes") -> list[T]:
        """Return every rank's value, rank 0's first."""
        with self._watched(asked):
            return self._exchanged(value)

    def to_first(self, value: T) -> list[T]:
        """Return every rank's value on rank 0, and this rank's alone elsewhere."""
        with self._watched("give rank 0 what is theirs"):
            found: list[Any] | None = [None] * self.count if self.rank == 0 else None
            dist.gather_object(value, found, dst=0, group=self._of_all)
            return [value] if found is None else found

    def do(self, asked: str, own: Callable[[], T], sharing: Sharing | None, together: bool, step: bool = False) -> T:
        """Return what `own` gives, which every rank calls; raise on every rank what one raises.

        asked: what the ranks do, in words. sharing: reports what the call sends. together: whether other ranks wait for
        one that raises in the midst of it; then it ends. step: whether it is an optimizer step, which may be left out.

        Raises what `own` raises, NotSupported, RankError, and NotFinite with the words of every rank.
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
        """Leave last words of what ends this rank, unless it is known; then stay until rank 0 has reported.

        A rank whose own trouble it is goes at once: the others wait for it.
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
        """Return whether rank 0, whose process has the store, still runs. Asking torch would print a long warning."""
        with contextlib.suppress(OSError):
            socket.create_connection(self._where, 1.0).close()
            return True
        return False

    def leave(self) -> None:
        """Leave the group: sockets close."""
        global _joined
        _joined = None
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def _watched(self, asked: str) -> Iterator[int]:
        """Yield the number of a call that all ranks make; if an error ends it on one of them, find the cause."""
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
        """Raise NotFinite with every rank's words if the step was that, or RankError if only some say so."""
        places = {rank: words or "" for rank, (kind, words) in enumerate(outcomes) if kind == "not finite"}
        if not places:
            return
        if len(places) == self.count and isinstance(raised, NotFinite):
            raise NotFinite(raised.record, of_ranks(places)) from raised
        self._ranks_part(places, raised)

    def _ranks_part(self, places: Mapping[int, str], raised: Exception | None = None) -> NoReturn:
        """Raise RankError: some ranks had what is not finite, and others had not."""
        which = ", ".join(map(str, sorted(places)))
        self.lost = f"rank {which}: loss or gradients not finite after the sum over ranks, and finite on the others"
        raise RankError(self.lost) from raised

    def _give_up(self, error: BaseException, call: int, asked: str) -> None:
        """Find out which rank has failed and raise RankError; return if it is this one."""
        linked = isinstance(error, RuntimeError) and of_link(error)
        said: dict[tuple[int, ...], str] = {}
        try:
            self.leave_words("link" if linked else "own", in_words(error))
            if isinstance(error, RuntimeError):
                said = self._found(error, linked, call, asked)
        except RuntimeError:
            # The store is rank 0's. It has reported what has ended it, or torchrun does.
            said = {(0,): GONE} if self.rank else {}
        told = [f"{_named(ranks)}{text}" for ranks, text in said.items()]
        self.lost = "; ".join(told) or f"rank {self.rank} failed in the midst of a step: {in_words(error)}"
        self._own_trouble = not said
        if said:
            raise RankError(self.lost) from error

    def _found(self, error: RuntimeError, linked: bool, call: int, asked: str) -> dict[tuple[int, ...], str]:
        """Return the faults of other ranks, by rank or ranks; by none where no rank is at fault."""
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
        """Find the rank that keeps the others waiting: the one whose progress ends first."""
        waited = f"no answer within {self._patience.total_seconds():g} s to {asked}"
        progress = self.by_rank()
        last, first = min(progress.values(), key=_order), max(progress.values(), key=_order)
        behind = [rank for rank, one in progress.items() if _order(one) == _order(last)]
        if len(behind) == self.count:
            return {(): f"{waited}, and no rank is behind the others: what lies between them carries nothing"}
        begun, sent, _ = last
        how_far = (
            "it has not begun"
            if begun < call
            else f"it has begun, and sent {sent or 'none'} of its gradients' parts"
            if not first.what
            else f"it has begun, and is not yet in {first.what}"
        )
        if sent == DONE and begun == call:
            how_far = "it has done it, and not said so"
        well = [rank for rank in range(self.count) if rank not in behind]
        self.tells = self.rank == well[0]
        return {tuple(behind): f"{waited}: {how_far}"}


def left_out(made: Any) -> str | None:
    """Return the words that a step was left out with, if it was; of what `step` or `step_and_gradients` gave."""
    record = made[0] if isinstance(made, tuple) else made
    words: str | None = getattr(record, "left_out", None)
    return words


def saying(made: Any, words: str) -> Any:
    """Return what a step gave, left out with other words."""
    return (replace(made[0], left_out=words), *made[1:]) if isinstance(made, tuple) else replace(made, left_out=words)


def in_words(error: BaseException) -> str:
    """Return an error's class and its first line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def join(cuda: bool | None = None) -> Peers:
    """Join the ranks that torchrun launched, once in a process. cuda: whether they compute on GPUs; rank 0 knows."""
    global _joined
    if _joined is None:
        _joined = Peers(cuda)
    return _joined


def joined() -> Peers | None:
    """Return the ranks that this process has joined, if it has."""
    return _joined


def _named(ranks: Sequence[int]) -> str:
    """Return `rank 1: ` or `ranks 1, 2: `; empty for no ranks."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: " if ranks else ""


def _order(progress: Progress) -> tuple[int, int]:
    return progress.command, progress.phase
