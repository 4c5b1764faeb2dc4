"""Several ranks behind one session: rank 0 leads, the others run the same methods on sessions of their own.

Launched by torchrun, its processes are the ranks. Otherwise rank 0 starts the others itself, on this machine. Each
command is sent to every follower, which answers when it is done: what was raised, or what it gave. The default process
group carries gradients (nccl on CUDA, gloo on the CPU), two gloo groups beside it commands and answers.

A follower that raises in the midst of a step leaves the others waiting for its gradients. So it says why in the store
and ends: whoever waits for it gets an error at once, and rank 0 raises a RankError with its words. One that hangs says
nothing: every rank marks in the store how far it is, and when the wait is over the one farthest behind is named.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from core.backend import Arrays, Batch, Gradients, NotSupported, RankReport, State, StepRecord
from core.config import RunConfig
from core.errors import UserError
from core.finite import NotFinite, of_ranks
from core.launch import launched, require_ranks
from core.parity.load import module_from_file
from core.parity.observations import Observation
from core.parity.step import flat
from torch_backend.checkpoint import WritingTorch
from torch_backend.ranks import Ranks

if TYPE_CHECKING:
    from torch_backend.session import TorchBackend, TorchSession

T = TypeVar("T")

# Until a run says how long a rank may keep the others waiting (`parallel.timeout_seconds`).
PATIENCE = timedelta(minutes=10)
# Those that wait notice at about the same time; who went first may have left words already, or leaves them soon.
WORDS_SECONDS = 2.0
# How long a follower waits for its next command: rank 0 may judge a check or write a checkpoint meanwhile.
IDLE = timedelta(days=7)
# A follower that is told to end may take so long.
END_SECONDS = 5.0
# In these, ranks wait for each other; what is raised in one of them ends the ranks.
TOGETHER = ("open", "step", "gradients", "step_and_gradients", "costs_of_determinism")


class RankError(UserError):
    """A rank failed, hangs, or is gone: which one, and what it said."""


# The ranks of this process and how they find each other


def follow() -> int:
    """A rank above 0 of torchrun: serve rank 0 until it is done. Returns the exit code."""
    place = launched()
    assert place is not None
    rank, ranks = place
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # rank 0 finishes its step, and says when it is over
        signal.signal(number, signal.SIG_IGN)
    device = _take_device(int(os.environ.get("LOCAL_RANK", rank)), torch.cuda.is_available())
    print(f"rank {rank} of {ranks}: pid {os.getpid()}, device {device}", flush=True)
    dist.init_process_group(_backend(device), timeout=PATIENCE)
    return _serve(_Links())


def _spawned(rank: int, ranks: int, port: int, cuda: bool, threads: int) -> None:
    """A rank that rank 0 has started."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    _join_group(rank, ranks, TCPStore("127.0.0.1", port, ranks, False), _take_device(rank, cuda))
    sys.exit(_serve(_Links()))


def _end_with_parent() -> None:
    parent: Any = multiprocessing.parent_process()
    parent.join()
    os._exit(1)


def _take_device(local: int, cuda: bool) -> torch.device:
    if not cuda:
        return torch.device("cpu")
    if torch.cuda.device_count() <= local:
        raise UserError(f"local rank {local} has no GPU: torch sees {torch.cuda.device_count()}")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _join_group(rank: int, ranks: int, store: Store, device: torch.device) -> None:
    dist.init_process_group(_backend(device), store=store, rank=rank, world_size=ranks, timeout=PATIENCE)


class _Links:
    """Commands from rank 0, answers to it, and places for marks and last words."""

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._commands = dist.new_group(backend="gloo", timeout=IDLE)
        self._answers = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._patience = PATIENCE
        self._store = dist.distributed_c10d._get_default_store()

    def be_patient_for(self, seconds: float) -> None:
        """How long this rank waits for another one, but for its next command."""
        self._patience = timedelta(seconds=seconds)
        dist.distributed_c10d._set_pg_timeout(self._patience)

    def command(self, rank: int, *said: Any) -> None:
        _send(said, rank, self._commands, self._patience)

    def commanded(self) -> tuple[Any, ...]:
        heard: tuple[Any, ...] = _receive(0, self._commands, IDLE)
        return heard

    def answer(self, kind: str, value: Any) -> None:
        _send((kind, value), 0, self._answers, self._patience)

    def answered(self, rank: int) -> tuple[str, Any]:
        heard: tuple[str, Any] = _receive(rank, self._answers, self._patience)
        return heard

    def silence(self, rank: int) -> str:
        """Why nothing can be sent to a rank; nothing if it is there, though it may be busy."""
        try:
            work = dist.isend(torch.zeros(1), rank, group=self._commands)
            if work is not None:
                work.wait(timedelta(seconds=1))
        except RuntimeError as error:
            return "" if _timed_out(error) else str(error).splitlines()[0]
        return ""

    def mark(self, command: int, phase: int) -> None:
        """Note how far this rank is: in which command, and in it 0 begun, n after it sent n parts, or DONE."""
        self._store.set(f"lockstep/mark/{self.rank}", f"{command} {phase}")

    def marks(self) -> dict[int, tuple[int, int]]:
        """(command, phase) of each rank; (0, 0) of one that has marked nothing."""
        found = {}
        for rank in range(self.count):
            said = self._said(f"lockstep/mark/{rank}")
            command, phase = (said or "0 0").split()
            found[rank] = int(command), int(phase)
        return found

    def leave_words(self, kind: str, words: str) -> None:
        """kind: `own` trouble, or that of a `link` to another rank."""
        self._store.set(f"lockstep/last words/{self.rank}", f"{kind} {words}")

    def last_words(self, rank: int) -> tuple[str, str] | None:
        """(kind, words)."""
        said = self._said(f"lockstep/last words/{rank}")
        return None if said is None else (said.partition(" ")[0], said.partition(" ")[2])

    def _said(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None


def _send(value: Any, rank: int, group: Any, patience: timedelta) -> None:
    """`dist.send_object_list` waits as long as its group was once made to; this as long as it is told."""
    raw = bytearray(pickle.dumps(value))
    for tensor in (torch.tensor([len(raw)]), torch.frombuffer(raw, dtype=torch.uint8)):
        _wait(dist.isend(tensor, rank, group=group), patience)


def _receive(rank: int, group: Any, patience: timedelta) -> Any:
    size = torch.zeros(1, dtype=torch.int64)
    _wait(dist.irecv(size, rank, group=group), patience)
    raw = torch.empty(int(size), dtype=torch.uint8)
    _wait(dist.irecv(raw, rank, group=group), patience)
    return pickle.loads(raw.numpy().data)


def _wait(work: dist.Work | None, patience: timedelta) -> None:
    assert work is not None
    work.wait(patience)


# The followers' end


class _Member:
    """One rank's session, the last record that it made, and what it does on command."""

    def __init__(self, session: TorchSession) -> None:
        self.session = session
        self.record: StepRecord | None = None

    def load(self, state: State) -> None:
        self.session.load(state)

    def step(self, batch: Batch, norms: bool = False) -> StepRecord:
        with self._recorded():
            self.record = self.session.step(batch, norms=norms)
            return self.record

    def write(self, folder: Path) -> WritingTorch:
        return self.session.write(folder)

    def write_beside(self, folder: Path) -> None:
        self.session.write(folder).write_beside()

    def random_state(self) -> dict[str, np.ndarray]:
        return self.session.random_state()

    def set_random_state(self, by_rank: Sequence[Arrays]) -> None:
        self.session.set_random_state(by_rank[dist.get_rank()])

    def gradients(self, batch: Batch) -> Gradients:
        return self.session.gradients(batch)

    def step_and_gradients(self, batch: Batch, norms: bool = False) -> tuple[StepRecord, Gradients | None]:
        with self._recorded():
            self.record, found = self.session.step_and_gradients(batch, norms=norms)
            return self.record, found

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """A step that is left out has a record all the same."""
        try:
            yield
        except NotFinite as found:
            self.record = found.record
            raise

    def costs_of_determinism(self, batch: Batch) -> Sequence[float]:
        return self.session.costs_of_determinism(batch)

    def own_gradients(self, batch: Batch) -> list[Arrays]:
        assert self.session.ranks is not None
        micros = batch.micro_batches(_micro_size(self.session.config, batch))
        # Not as the session shares them, which may be what is wrong.
        mine = Ranks.share(self.session.ranks, micros)
        return [self.session.gradients(micro).grads for micro in mine]

    def report(self) -> RankReport:
        assert self.record is not None
        state = flat(self.session.state())
        digests = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in state.items()}
        return RankReport(self.record, digests)


# The mark of a command that is done: more than any number of buckets.
DONE = 1 << 30
# Words that gloo and nccl have for a wait that was too long.
TIMED_OUT = ("timed out", "timeout")
# What of a follower's result rank 0 wants to hear.
HEARD = ("own_gradients", "report", "random_state")
STEPS = ("step", "step_and_gradients")


def _left_out(made: Any) -> str | None:
    """Of what a step gave, the words that it was left out with, if it was."""
    record = made[0] if isinstance(made, tuple) else made
    return record.left_out if isinstance(record, StepRecord) else None


def _saying(made: Any, words: str) -> Any:
    """What a step gave, left out with other words."""
    return (replace(made[0], left_out=words), *made[1:]) if isinstance(made, tuple) else replace(made, left_out=words)


def _serve(links: _Links) -> int:
    """Do what rank 0 says until it says `end` or is gone; returns the exit code."""
    members: dict[int, _Member] = {}
    while True:
        try:
            command, what, number, arguments, dropped = links.commanded()
        except RuntimeError:  # rank 0 is gone, and has said why
            return 1
        for old in dropped:
            members.pop(old, None)
        try:
            if what == "end":
                return 0
            with _marked(links, command, members.get(number)):
                if what == "open":
                    if not members:
                        torch._dynamo.reset()
                    members[number] = _Member(_opened(links, *arguments))
                    value = None
                else:
                    value = getattr(members[number], what)(*arguments)
            links.answer("done", value if what in HEARD else _left_out(value))
        except NotSupported as reason:
            links.answer("not supported", str(reason))
        except NotFinite as found:
            links.answer("not finite", found.where)
        except Exception as error:
            words = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            if what not in TOGETHER:
                links.answer("raised", words)
                continue
            links.leave_words("link" if _of_link(error) else "own", words)
            return 1  # sockets close with the process: whoever waits for this rank hears of it at once


@contextmanager
def _marked(links: _Links, command: int, member: _Member | None) -> Iterator[None]:
    """Mark that a command is begun, what it has sent so far, and that it is done."""
    ranks = member.session.ranks if member else None
    links.mark(command, 0)
    if ranks is not None:
        sent = count(1)
        ranks.on_sent = lambda: links.mark(command, next(sent))
    yield
    links.mark(command, DONE)


def _opened(links: _Links, pickled: bytes, file: str | None, config: RunConfig) -> TorchSession:
    if file is not None:
        module_from_file(file)
    backend: TorchBackend = pickle.loads(pickled)
    session = backend.open_rank(config)
    session.join_ranks()
    links.be_patient_for(config.parallel.timeout_seconds)
    return session


# The leader's end


class _World:
    """Rank 0's end: the followers of this process, however many sessions they hold."""

    def __init__(self, ranks: int, cuda: bool) -> None:
        self.ranks = ranks
        self.lost: str | None = None
        self.patience = PATIENCE.total_seconds()
        self.dropped: list[int] = []
        self.open: weakref.WeakSet[RankedSession] = weakref.WeakSet()
        self.processes: dict[int, BaseProcess] = {}
        place = launched()
        if place is not None:
            _take_device(int(os.environ.get("LOCAL_RANK", 0)), cuda)
            dist.init_process_group(_backend(torch.device("cuda" if cuda else "cpu")), timeout=PATIENCE)
        else:
            self._spawn(cuda)
        self._links = _Links()
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
                    target=_spawned,
                    args=(rank, self.ranks, store.port, cuda, threads),
                    daemon=True,
                    name=f"lockstep-rank-{rank}",
                )
                process.start()
                self.processes[rank] = process
        _join_group(0, self.ranks, store, _take_device(0, cuda))

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
        member: _Member | None = None,
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
                with _marked(self._links, command, member):
                    mine = own()
            except Exception as error:
                if what in TOGETHER and not isinstance(error, (NotSupported, NotFinite)):
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
        own = _left_out(mine)
        places = {rank: words for rank, words in enumerate((own, *others)) if words is not None}
        if not places:
            return mine
        if len(places) == self.ranks:
            return _saying(mine, of_ranks(places))
        self._ranks_part(places)
        return mine

    def _require_finite(self, raised: Exception | None, answers: Sequence[tuple[str, Any]]) -> None:
        """Raise NotFinite with every rank's words if the step was that, or RankError if only some say so."""
        places = {rank: words for rank, (kind, words) in enumerate(answers, 1) if kind == "not finite"}
        if isinstance(raised, NotFinite):
            places[0] = raised.where
        if not places:
            return
        if len(places) == self.ranks and isinstance(raised, NotFinite):
            raise NotFinite(raised.record, of_ranks(places)) from raised
        self._ranks_part(places)

    def _ranks_part(self, places: Mapping[int, str]) -> NoReturn:
        which = ", ".join(map(str, sorted(places)))
        self.lost = f"rank {which}: loss or gradients not finite after the sum over ranks, and finite on the others"
        raise RankError(self.lost)

    def _give_up(self, error: BaseException, command: int, asked: str) -> None:
        """Find out which rank has failed and raise RankError; return if it was rank 0 itself."""
        linked = isinstance(error, RuntimeError)
        own, of_links = self._failed(linked)
        said = [f"rank {rank}: {words}" for rank, words in own.items()]
        if not said and (_timed_out(error) or any(map(_timed_out, of_links))):
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
        behind = [rank for rank, mark in marks.items() if mark == min(marks.values())]
        if len(behind) == self.ranks:
            return f"{waited} to {asked}, and no rank is behind the others: what lies between them carries nothing"
        begun, sent = marks[behind[0]]
        how_far = (
            "it has not begun"
            if begun < command
            else f"it has begun, and sent {sent or 'none'} of its gradients' parts"
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


_world: _World | None = None
_numbers = count()


def _ranks(ranks: int, cuda: bool) -> _World:
    """The followers of this process, started if there are none."""
    global _world
    if _world is not None and _world.ranks != ranks:
        if len(_world.open):
            raise UserError(f"train.ranks = {ranks}: a session of {_world.ranks} ranks is open in this process")
        _world.end()
    if _world is None:
        _world = _World(ranks, cuda)
    return _world


@atexit.register
def _let_go() -> None:
    if _world is not None:
        _world.end()


def open_ranked(backend: TorchBackend, config: RunConfig) -> RankedSession:
    """A session over `config.train.ranks` ranks, each of which opens `backend`.

    Raises:
        UserError: the backend cannot be opened in another process, or ranks do not fit what torchrun launched.
        RankError: a rank could not open it.
    """
    from torch_backend.session import resolve_device

    place = launched()
    if place is not None:
        require_ranks(config.train.ranks)
        if place[0] > 0:
            raise UserError("torchrun launches lockstep train and parity; other commands start their ranks themselves")
    pickled, file = _portable(backend)
    world = _ranks(config.train.ranks, resolve_device(config).type == "cuda")
    return RankedSession(world, backend, config, pickled, file)


def _portable(backend: TorchBackend) -> tuple[bytes, str | None]:
    """The backend as bytes, and the file that must be imported before they are read, if it was one (FILE.py:NAME)."""
    module = sys.modules.get(type(backend).__module__)
    loaded = getattr(module, "__spec__", None)
    file = loaded.origin if loaded is not None and loaded.name.startswith("lockstep_candidate_") else None
    try:
        return pickle.dumps(backend), file
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(f"{type(backend).__name__} cannot be opened on other ranks: {error}") from error


class RankedSession:
    """A session of core/backend.py over several ranks, held by rank 0.

    A batch whose micro-batches cannot be shared evenly (a check's single one) is computed by rank 0 alone.
    """

    def __init__(
        self, world: _World, backend: TorchBackend, config: RunConfig, pickled: bytes, file: str | None
    ) -> None:
        self.config = config
        self._world, self._number = world, next(_numbers)

        def own() -> _Member:
            session = backend.open_rank(config)
            session.join_ranks()
            return _Member(session)

        self._mine, _ = world.do("open", self._number, (pickled, file, config), own, asked="open the run")
        world.be_patient_for(config.parallel.timeout_seconds)
        world.open.add(self)
        # Whoever lets go of a session without closing it need not keep the other ranks' alive.
        self._closed = weakref.finalize(self, world.dropped.append, self._number)

    @property
    def own(self) -> TorchSession:
        """The session of rank 0."""
        return self._mine.session

    def state(self) -> State:
        """A copy of rank 0's state."""
        return self.own.state()

    def load(self, state: State) -> None:
        """Every rank takes the state over. Raises ValueError if names or shapes are not the model's."""
        self._do("load", state)

    def write(self, folder: Path) -> WritingTorch:
        """Begin to write the state, each rank its share; `wait` is for all of them."""
        own = partial(self._mine.write, folder)
        return self._world.do("write_beside", self._number, (folder,), own)[0]

    def random_state(self) -> dict[str, np.ndarray]:
        """States of torch's random number generators, by `RANK/NAME`."""
        mine, others = self._world.do("random_state", self._number, (), self._mine.random_state)
        return {f"{rank}/{name}": a for rank, found in enumerate((mine, *others)) for name, a in found.items()}

    def set_random_state(self, states: Arrays) -> None:
        """Take over what `random_state` gave. A rank that there was not then keeps its own."""
        by_rank: list[dict[str, np.ndarray]] = [{} for _ in range(self._world.ranks)]
        for key, state in states.items():
            rank, _, name = key.rpartition("/")
            if int(rank or 0) < len(by_rank):
                by_rank[int(rank or 0)][name] = state
        self._do("set_random_state", by_rank)

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        """One optimizer step on every rank. Raises ValueError for a batch that ranks cannot share."""
        self._require_shared(batch)
        record: StepRecord = self._do("step", batch, own=(batch, norms))
        return record

    def gradients(self, batch: Batch) -> Gradients:
        """Per-token NLL, loss and gradients of `batch`, reduced over ranks if they share it."""
        if not self._shared(batch):
            return self.own.gradients(batch)
        found: Gradients = self._do("gradients", batch)
        return found

    def step_and_gradients(self, batch: Batch, *, norms: bool = False) -> tuple[StepRecord, Gradients | None]:
        """`step`, and the gradients that it made before clipping."""
        self._require_shared(batch)
        found: tuple[StepRecord, Gradients | None] = self._do("step_and_gradients", batch, own=(batch, norms))
        return found

    def costs_of_determinism(self, batch: Batch) -> Sequence[float]:
        """Time of forward and backward pass on every rank / time without `deterministic = true`, as rank 0 sees it."""
        self._require_shared(batch)
        found: Sequence[float] = self._do("costs_of_determinism", batch)
        return found

    def rank_gradients(self, batch: Batch) -> list[Arrays]:
        """Gradients of each micro-batch of `batch` by itself, made by the rank whose share it is and not reduced."""
        self._require_shared(batch)
        mine, others = self._world.do("own_gradients", self._number, (batch,), lambda: self._mine.own_gradients(batch))
        return [found for of_rank in (mine, *others) for found in of_rank]

    def rank_reports(self) -> list[RankReport]:
        """What each rank says of the last step, rank 0 first."""
        mine, others = self._world.do("report", self._number, (), self._mine.report)
        return [mine, *others]

    def observe(self, batch: Batch, taps: Sequence[str]) -> Arrays:
        """As rank 0's session."""
        return self.own.observe(batch, taps)

    def sketch(self, batch: Batch) -> dict[str, Observation]:
        """As rank 0's session."""
        return self.own.sketch(batch)

    def run_stage(self, stage: str, inputs: Arrays) -> Arrays:
        """As rank 0's session."""
        return self.own.run_stage(stage, inputs)

    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        """As rank 0's session."""
        return self.own.evaluate(batch, policy)

    def attention_logits(self, batch: Batch) -> np.ndarray:
        """As rank 0's session."""
        return self.own.attention_logits(batch)

    def seconds_of_step(self) -> Mapping[str, float]:
        """As rank 0 spent them."""
        return self.own.seconds_of_step()

    def memory(self) -> Mapping[str, float]:
        """As rank 0 uses it."""
        return self.own.memory()

    def next_token_logits(self, tokens: np.ndarray) -> np.ndarray:
        """As rank 0's session."""
        return self.own.next_token_logits(tokens)

    def close(self) -> None:
        """Close rank 0's session; the others let theirs go with the next command, or with this process."""
        self._closed()
        self._world.open.discard(self)
        self.own.close()

    def _do(self, what: str, *arguments: Any, own: Sequence[Any] | None = None) -> Any:
        """A member's method on every rank; `own`: other arguments for rank 0."""
        mine = getattr(self._mine, what)
        asked = f"{what.replace('_', ' ')} {self.own.steps_done + 1}" if what.startswith("step") else what
        return self._world.do(
            what, self._number, arguments, lambda: mine(*(own or arguments)), self._mine, f"`{asked}`"
        )[0]

    def _shared(self, batch: Batch) -> bool:
        assert self.own.ranks is not None
        return self.own.ranks.shares(batch.micro_batches(_micro_size(self.config, batch)))

    def _require_shared(self, batch: Batch) -> None:
        if not self._shared(batch):
            raise ValueError(
                f"a batch of {len(batch.tokens)} sequences gives no equal number of micro-batches to each of "
                f"{self._world.ranks} ranks"
            )


def _of_link(error: BaseException) -> bool:
    """Whether it is a link to another rank that failed. Of most of gloo's failures only the words tell."""
    said = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(words in said for words in ("gloo/", "pair closure", *TIMED_OUT))
    )


def _timed_out(error: BaseException) -> bool:
    """Whether a collective gave up waiting: gloo and nccl have words for it, and no class."""
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in TIMED_OUT)


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


def _micro_size(config: RunConfig, batch: Batch) -> int:
    return min(config.train.micro_batch_size, len(batch.tokens))
