"""Rank 0's end: the followers of this process, what they are told, and which of them fails."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from lockstep.core.backend import NotSupported
from lockstep.core.errors import UserError
from lockstep.core.run.launch import launched
from lockstep.core.train.finite import NotFinite, of_ranks
from lockstep.torch_backend.ranks.process_groups import (
    PATIENCE,
    Links,
    Mark,
    RankError,
    join_group,
    meet,
    take_device,
    timed_out,
)
from lockstep.torch_backend.ranks.worker import DONE, STEPS, Member, ends_all, left_out, marked, saying, spawned

T = TypeVar("T")

# Those that wait notice at about the same time; who went first may have left words already, or leaves them soon.
WORDS_SECONDS = 2.0
# A follower that is told to end may take so long.
END_SECONDS = 5.0


class World:
    """Rank 0's end: the followers of this process, however many sessions they hold."""

    def __init__(self, ranks: int, cuda: bool) -> None:
        self.ranks = ranks
        self.lost: str | None = None
        self.patience = PATIENCE.total_seconds()
        self.dropped: list[int] = []
        self.open: weakref.WeakSet[Any] = weakref.WeakSet()
        self.processes: dict[int, BaseProcess] = {}
        place = launched()
        if place is not None:
            device = take_device(int(os.environ.get("LOCAL_RANK", 0)), cuda)
            join_group(*meet(), device)
        else:
            self._spawn(cuda)
        self._links = Links()
        self._numbered = count(1)
        self._calling: int | None = None

    def _spawn(self, cuda: bool) -> None:
        if dist.is_initialized():
            raise UserError(f"train.ranks = {self.ranks}: this process is in another process group already")
        if cuda and torch.cuda.device_count() < self.ranks:
            raise UserError(
                f"train.ranks = {self.ranks}: torch sees {torch.cuda.device_count()} GPUs, one a rank is needed"
            )
        # Threads that wait must not take the cores of those that work; read when a follower loads torch.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # The store, and the ranks, are of this machine: its outer name need not even lead back to it.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        store = TCPStore("127.0.0.1", 0, self.ranks, True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        threads = max(1, torch.get_num_threads() // self.ranks)
        with _uninterrupted():
            for rank in range(1, self.ranks):
                process = context.Process(
                    target=spawned,
                    args=(rank, self.ranks, store.port, cuda, threads),
                    daemon=True,
                    name=f"lockstep-rank-{rank}",
                )
                process.start()
                self.processes[rank] = process
        join_group(0, self.ranks, store, take_device(0, cuda))

    def be_patient_for(self, seconds: float) -> None:
        """How long rank 0 waits for the others."""
        self.patience = seconds
        self._links.be_patient_for(seconds)

    def do(
        self,
        what: str,
        session: int,
        arguments: Sequence[Any],
        own: Callable[[], T],
        member: Member | None = None,
        asked: str = "",
    ) -> tuple[T, list[Any]]:
        """`what` on every rank: `own` is rank 0's part. Returns its result and the other ranks' answers.

        member: whose method `own` is. asked: what the ranks are to do, in words. Raises what `own` raises, RankError,
        or NotFinite with what every rank says of it.
        """
        if self.lost is not None:
            raise RankError(self.lost)
        dropped, self.dropped = self.dropped, []
        command = next(self._numbered)
        try:
            for rank in range(1, self.ranks):
                self._calling = rank
                self._links.command(rank, command, what, session, arguments, dropped)
            self._calling = None
            mine, raised = None, None
            try:
                with marked(self._links, command, member):
                    mine = own()
            except Exception as error:
                if ends_all(what, member) and not isinstance(error, (NotSupported, NotFinite)):
                    raise
                raised = error
            answers = [self._links.answered(rank) for rank in range(1, self.ranks)]
        except BaseException as error:
            self._give_up(error, command, asked or what)
            raise
        self._require_finite(raised, answers)
        if raised is not None:
            raise raised
        for rank, (kind, value) in enumerate(answers, 1):
            if kind == "not supported":
                raise NotSupported(f"rank {rank}: {value}")
            if kind == "raised":
                raise RankError(f"rank {rank}: {value}")
        values = [value for _, value in answers]
        if what in STEPS:
            return self._left_out_by_all(mine, values), values
        return mine, values  # type: ignore[return-value]

    def _left_out_by_all(self, mine: Any, others: Sequence[str | None]) -> Any:
        """What rank 0's step gave, with every rank's words if it was left out. Raises RankError if only some did."""
        places = {rank: words for rank, words in enumerate((left_out(mine), *others)) if words is not None}
        if not places:
            return mine
        if len(places) < self.ranks:
            self._ranks_part(places)
        return saying(mine, of_ranks(places))

    def _require_finite(self, raised: Exception | None, answers: Sequence[tuple[str, Any]]) -> None:
        """Raise NotFinite with every rank's words if the step was that, or RankError if only some say so."""
        places = {rank: words for rank, (kind, words) in enumerate(answers, 1) if kind == "not finite"}
        if isinstance(raised, NotFinite):
            places[0] = raised.where
        if not places:
            return
        if len(places) == self.ranks and isinstance(raised, NotFinite):
            raise NotFinite(raised.record, of_ranks(places)) from raised
        self._ranks_part(places, raised)

    def _ranks_part(self, places: Mapping[int, str], raised: Exception | None = None) -> NoReturn:
        """Raise RankError: some ranks had what is not finite, and others had not."""
        which = ", ".join(map(str, sorted(places)))
        self.lost = f"rank {which}: loss or gradients not finite after the sum over ranks, and finite on the others"
        raise RankError(self.lost) from raised

    def _give_up(self, error: BaseException, command: int, asked: str) -> None:
        """Find out which rank has failed and raise RankError; return if it was rank 0 itself."""
        linked = isinstance(error, RuntimeError)
        own, of_links = self._failed(linked)
        said = [f"rank {rank}: {words}" for rank, words in own.items()]
        if not said and (timed_out(error) or any(map(timed_out, of_links))):
            said = [self._late(command, asked)]
        elif not said and linked and not self.processes:
            silent = {rank: self._links.silence(rank) for rank in range(1, self.ranks)}
            said = [f"rank {rank}: does not answer: {why}" for rank, why in silent.items() if why]
        self.lost = "; ".join(said) or f"rank 0 failed in the midst of a step: {type(error).__name__}: {error}"
        self.end(at_once=True)
        if said:
            raise RankError(self.lost) from error

    def _failed(self, linked: bool) -> tuple[dict[int, str], list[RuntimeError]]:
        """What ranks say of trouble of their own, by rank, and what they met with in their links to others.

        linked: whether an error may have come from a link to another rank.
        """
        until = time.monotonic() + (WORDS_SECONDS if linked else 0.0)
        while True:
            words = {rank: self._links.last_words(rank) for rank in range(1, self.ranks)}
            found = {rank: said for rank, said in words.items() if said is not None}
            own = {rank: text for rank, (kind, text) in found.items() if kind == "own"}
            own |= {
                rank: f"its process has died (exit code {process.exitcode})"
                for rank, process in self.processes.items()
                if rank not in found and not process.is_alive()
            }
            if own or time.monotonic() > until:
                return dict(sorted(own.items())), [RuntimeError(t) for kind, t in found.values() if kind == "link"]
            time.sleep(0.05)

    def _late(self, command: int, asked: str) -> str:
        """Which rank keeps the others waiting: the one whose marks end first."""
        waited = f"no answer within {self.patience:g} s"
        if self._calling is not None:
            return f"rank {self._calling}: {waited} to {asked}: it does not take the command"
        marks = self._links.marks()
        last, first = min(marks.values(), key=_place), max(marks.values(), key=_place)
        behind = [rank for rank, mark in marks.items() if _place(mark) == _place(last)]
        if len(behind) == self.ranks:
            return f"{waited} to {asked}, and no rank is behind the others: what lies between them carries nothing"
        begun, sent, _ = last
        how_far = (
            "it has not begun"
            if begun < command
            else f"it has begun, and sent {sent or 'none'} of its gradients' parts"
            if not first.what
            else f"it has begun, and is not yet in {first.what}"
        )
        if sent == DONE and begun == command:
            how_far = "it has done it, and not said so"
        which = "rank" if len(behind) == 1 else "ranks"
        return f"{which} {', '.join(map(str, behind))}: {waited} to {asked}: {how_far}"

    def end(self, at_once: bool = False) -> None:
        """Let the followers go; `at_once` without a word."""
        global _world
        if self.lost is None:
            self.lost = "the ranks were let go"
            with contextlib.suppress(RuntimeError):
                for rank in range(1, self.ranks):
                    self._links.command(rank, 0, "end", -1, (), ())
        for process in self.processes.values():
            process.join(timeout=0.0 if at_once else END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        # Sockets close: a follower of torchrun that still waits for this rank hears of it.
        if dist.is_initialized():
            dist.destroy_process_group()
        if _world is self:
            _world = None


def _place(mark: Mark) -> tuple[int, int]:
    return mark.command, mark.phase


_world: World | None = None


def ranks_of(ranks: int, cuda: bool) -> World:
    """The followers of this process, started if there are none."""
    global _world
    if _world is not None and _world.ranks != ranks:
        if len(_world.open):
            raise UserError(f"train.ranks = {ranks}: a session of {_world.ranks} ranks is open in this process")
        _world.end()
    if _world is None:
        _world = World(ranks, cuda)
    return _world


@atexit.register
def let_go() -> None:
    """End the followers of this process."""
    if _world is not None:
        _world.end()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C reaches the whole group of processes: those that are started inherit that it is ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
