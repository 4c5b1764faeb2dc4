"""The ranks above 0: each runs, on a session of its own, the methods that rank 0 tells it to.

A follower that raises in the midst of a step leaves the others waiting for its gradients. So it says why in the store
and ends, and rank 0 raises a RankError with its words (torch_backend/ranks/process_groups.py).
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from lockstep.core.backend import Arrays, Batch, Gradients, NotSupported, RankReport, State, StepRecord
from lockstep.core.config.schema import RunConfig
from lockstep.core.load_backend import module_from_file
from lockstep.core.parity.judge.update import flat
from lockstep.core.run.launch import launched
from lockstep.core.train.finite import NotFinite
from lockstep.torch_backend.checkpoint import WritingTorch
from lockstep.torch_backend.ranks.node_check import Place, look_round
from lockstep.torch_backend.ranks.process_groups import Links, join_group, meet, of_link, take_device
from lockstep.torch_backend.ranks.sharing import Sharing
from lockstep.torch_backend.session import TorchSession

# In these, ranks wait for each other; what is raised in one of them ends the ranks.
TOGETHER = ("open", "step", "gradients", "step_and_gradients", "costs_of_determinism")
# And in these, where none of them has all of the weights.
GATHERING = ("look", "own_gradients", "report")
# What of a follower's result rank 0 wants to hear.
HEARD = ("own_gradients", "report", "random_state", "look_round")
STEPS = ("step", "step_and_gradients")


def left_out(made: Any) -> str | None:
    """Of what a step gave, the words that it was left out with, if it was."""
    record = made[0] if isinstance(made, tuple) else made
    return record.left_out if isinstance(record, StepRecord) else None


def saying(made: Any, words: str) -> Any:
    """What a step gave, left out with other words."""
    return (replace(made[0], left_out=words), *made[1:]) if isinstance(made, tuple) else replace(made, left_out=words)


# The mark of a command that is done: more than any number of buckets.
DONE = 1 << 30


def follow() -> int:
    """A rank above 0 of torchrun: serve rank 0 until it is done. Returns the exit code."""
    place = launched()
    assert place is not None
    rank, ranks = place
    stops = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    for number in stops:
        signal.signal(number, signal.SIG_DFL)
    device = take_device(int(os.environ.get("LOCAL_RANK", rank)), torch.cuda.is_available())
    print(f"rank {rank} of {ranks}: pid {os.getpid()}, device {device}", flush=True)
    join_group(*meet(), device)
    links = Links()
    for number in stops:  # rank 0 finishes its step, and says when it is over
        signal.signal(number, signal.SIG_IGN)
    return serve(links)


def spawned(rank: int, ranks: int, port: int, cuda: bool, threads: int) -> None:
    """A rank that rank 0 has started."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    join_group(rank, ranks, TCPStore("127.0.0.1", port, ranks, False), take_device(rank, cuda))
    sys.exit(serve(Links()))


def _end_with_parent() -> None:
    parent: Any = multiprocessing.parent_process()
    parent.join()
    os._exit(1)


class OpensRanks(Protocol):
    """A backend that opens the session of one rank."""

    def open_rank(self, config: RunConfig) -> TorchSession:
        """Open the session of this rank, before it joins the others."""
        ...


class Member:
    """One rank's session, the last record that it made, and what it does on command."""

    def __init__(self, session: TorchSession) -> None:
        self.session = session
        self.record: StepRecord | None = None

    def load(self, state: State) -> None:
        """Take over a canonical state."""
        self.session.load(state)

    def step(self, batch: Batch, norms: bool = False) -> StepRecord:
        """One optimizer step."""
        with self._recorded():
            self.record = self.session.step(batch, norms=norms)
            return self.record

    def write(self, folder: Path) -> WritingTorch:
        """Begin to write this rank's share of the state."""
        return self.session.write(folder)

    def write_beside(self, folder: Path) -> None:
        """Write it in a thread."""
        self.session.write(folder).write_beside()

    def random_state(self) -> dict[str, np.ndarray]:
        """States of this rank's random number generators."""
        return self.session.random_state()

    def set_random_state(self, by_rank: Sequence[Arrays]) -> None:
        """Take over this rank's part of what every rank gave."""
        self.session.set_random_state(by_rank[dist.get_rank()])

    def gradients(self, batch: Batch) -> Gradients:
        """Loss and gradients, reduced over ranks."""
        return self.session.gradients(batch)

    def step_and_gradients(self, batch: Batch, norms: bool = False) -> tuple[StepRecord, Gradients | None]:
        """`step`, and the gradients that it made before clipping."""
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
        """As the session measures it."""
        return self.session.costs_of_determinism(batch)

    def own_gradients(self, batch: Batch) -> list[Arrays]:
        """Gradients of each micro-batch of this rank's share by itself, not reduced."""
        assert self.session.ranks is not None
        micros = batch.cut(self.session.config.train)
        # Not as the session shares them, which may be what is wrong.
        mine = Sharing.share(self.session.ranks, micros)
        return [self.session.own_gradients(micro) for micro in mine]

    def look_round(self, file: Path) -> Place:
        """Where this rank runs, and whether it sees a file."""
        return look_round(file)

    def look(self, what: str, *arguments: Any) -> Any:
        """A method of the session that changes nothing, on all ranks because it needs all of the weights."""
        return getattr(self.session, what)(*arguments)

    def restore(self, folder: Path, step: int, scalars: Mapping[str, float]) -> None:
        """Take over a checkpoint, of which this rank reads what it holds."""
        self.session.restore(folder, step, scalars)

    def report(self) -> RankReport:
        """The last record, and a digest of each array of the state."""
        assert self.record is not None
        state = flat(self.session.state())
        digests = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in state.items()}
        return RankReport(self.record, digests)


def serve(links: Links) -> int:
    """Do what rank 0 says until it says `end` or is gone; returns the exit code."""
    members: dict[int, Member] = {}
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
            with marked(links, command, members.get(number)):
                if what == "open":
                    if not members:
                        torch._dynamo.reset()
                    members[number] = Member(_opened(links, *arguments))
                    value = None
                else:
                    value = getattr(members[number], what)(*arguments)
            links.answer("done", value if what in HEARD else left_out(value))
        except NotSupported as reason:
            links.answer("not supported", str(reason))
        except NotFinite as found:
            links.answer("not finite", found.where)
        except Exception as error:
            words = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            if not ends_all(what, members.get(number)):
                links.answer("raised", words)
                continue
            links.leave_words("link" if of_link(error) else "own", words)
            return 1  # sockets close with the process: whoever waits for this rank hears of it at once


def ends_all(what: str, member: Member | None) -> bool:
    """Whether other ranks wait for one that raises in this command."""
    sharded = member is not None and member.session.root is not None
    return what in TOGETHER or (sharded and what in GATHERING)


@contextmanager
def marked(links: Links, command: int, member: Member | None) -> Iterator[None]:
    """Mark that a command is begun, what it has sent so far, and that it is done."""
    ranks = member.session.ranks if member else None
    links.mark(command, 0)
    if ranks is not None:
        ranks.on_sent = partial(_mark_next, links, command, count(1))
    yield
    links.mark(command, DONE)


def _mark_next(links: Links, command: int, numbers: Iterator[int], what: str) -> None:
    links.mark(command, next(numbers), what)


def _opened(links: Links, pickled: bytes, file: str | None, config: RunConfig) -> TorchSession:
    if file is not None:
        module_from_file(file)
    backend: OpensRanks = pickle.loads(pickled)
    session = backend.open_rank(config)
    session.join_ranks()
    links.be_patient_for(config.parallel.timeout_seconds)
    return session
