"""Several ranks for a test in one process: pytest is rank 0, and other processes repeat its calls of a session.

Commands run SPMD under torchrun. Here instead, a test reads sessions and plants faults directly, on rank 0. The other
ranks get the name and arguments of each call over pipes. They keep running for later tests, since starting one takes
seconds. After a failure all of them are killed, and the next session starts new ones.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from lockstep.core.checkpoint.of_ranks import write_part
from lockstep.core.config.schema import RunConfig
from lockstep.core.load_backend import module_from_file
from lockstep.torch_backend.ranks import peer_session
from lockstep.torch_backend.ranks.peer_session import PeerSession
from lockstep.torch_backend.ranks.peers import Peers

_numbers = count()
_world: World | None = None


class World:
    """A group of ranks: this process is rank 0, and one process runs per other rank."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.dropped: list[int] = []
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        store = TCPStore("127.0.0.1", 0, ranks, True, wait_for_workers=False)
        # The ranks are forked from a process that has only imported torch, which takes four seconds otherwise. They all
        # have the environment variables with which that process was started.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "lockstep.torch_backend.ranks.peer_session"])
        threads = max(1, torch.get_num_threads() // ranks)
        self.processes: dict[int, BaseProcess] = {}
        self._pipes: list[Connection] = []
        for rank in range(1, ranks):
            theirs, ours = context.Pipe(duplex=False)
            arguments = (rank, ranks, store.port, theirs, threads)
            self.processes[rank] = context.Process(target=_follow, args=arguments, daemon=True)
            self.processes[rank].start()
            theirs.close()
            self._pipes.append(ours)
        self.peers = Peers(False, (0, ranks, store))

    def tell(self, what: str, number: int, *arguments: Any, **named: Any) -> None:
        """Call a method of session `number` on all other ranks, without waiting for it."""
        dropped, self.dropped = self.dropped, []
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a rank that has ended: rank 0 detects it by itself
                pipe.send((what, number, arguments, named, dropped))

    def end(self) -> None:
        """Kill the other ranks and wait for their end."""
        global _world
        if _world is self:
            _world = None
        for process in self.processes.values():
            process.kill()
            process.join()
        self.peers.leave()


def _follow(rank: int, ranks: int, port: int, pipe: Connection, threads: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    peers = Peers(None, (rank, ranks, TCPStore("127.0.0.1", port, ranks, False)))
    sessions: dict[int, PeerSession] = {}
    while peers.lost is None:
        what, number, arguments, named, dropped = pipe.recv()
        for old in dropped:
            sessions.pop(old, None)
        with contextlib.suppress(Exception):  # rank 0 raises the same error, or detects the failure
            if what == "open":
                pickled, file, config = arguments
                if file is not None:
                    module_from_file(file)
                if not sessions:
                    torch._dynamo.reset()
                sessions[number] = PeerSession(peers, pickle.loads(pickled), config)
            elif what == "write":
                writing = sessions[number].write(*arguments)
                threading.Thread(target=write_part, args=(writing,), daemon=True).start()
            else:
                getattr(sessions[number], what)(*arguments, **named)
    os._exit(1)  # which closes the sockets


def _end_with_parent() -> None:
    parent: Any = multiprocessing.parent_process()
    parent.join()
    os._exit(1)


if TYPE_CHECKING:
    Shown = PeerSession
else:
    Shown = object


class RankedSession(Shown):
    """A session of several ranks, as rank 0 uses it."""

    def __init__(self, backend: Any, config: RunConfig) -> None:
        global _world
        if _world is not None and _world.ranks != config.train.ranks:
            _world.end()
        if _world is None:
            _world = World(config.train.ranks)
        self.config, self.world, self._number = config, _world, next(_numbers)
        module: Any = sys.modules[type(backend).__module__]
        spec = module.__spec__
        file = spec.origin if spec is not None and spec.name.startswith("lockstep_candidate_") else None
        self.world.tell("open", self._number, pickle.dumps(backend), file, config)
        with self._ending():
            self.mine = PeerSession(self.world.peers, backend, config)
        self.own = self.mine.own
        self._closed = weakref.finalize(self, self.world.dropped.append, self._number)

    def close(self) -> None:
        """Close this rank's own session; the other ranks close theirs at the next call."""
        self._closed()
        self.mine.close()

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self.world.peers.lost is not None:
                self.world.end()

    def _call(self, what: str, *arguments: Any, **named: Any) -> Any:
        alone = what in ALONE or (what == "gradients" and not self.mine._shared(*arguments))
        if self.own.root is not None or not alone:
            self.world.tell(what, self._number, *arguments, **named)
        with self._ending():
            return getattr(self.mine, what)(*arguments, **named)


# ALONE: calls that rank 0 computes alone if it holds whole weights. TOGETHER: calls that all ranks take part in.
ALONE = ("state", "observe", "sketch", "evaluate", "attention_logits", "next_token_logits")
TOGETHER = (
    "load",
    "restore",
    "require_shared",
    "write",
    "random_state",
    "set_random_state",
    "step",
    "gradients",
    "step_and_gradients",
    "step_and_sketches",
    "costs_of_determinism",
    "keep_inputs",
    "inputs_kept",
    "rank_gradients",
    "rank_reports",
)
OF_RANK_0 = ("run_stage", "seconds_of_step", "memory", "state_checksums", "update_counts")


def _method(what: str, told: bool) -> Callable[..., Any]:
    def call(self: RankedSession, *arguments: Any, **named: Any) -> Any:
        return self._call(what, *arguments, **named) if told else getattr(self.mine, what)(*arguments, **named)

    return call


for _name in (*ALONE, *TOGETHER, *OF_RANK_0):
    setattr(RankedSession, _name, _method(_name, _name not in OF_RANK_0))


def let_go() -> None:
    """Kill the other ranks, if there are any."""
    if _world is not None:
        _world.end()


@contextlib.contextmanager
def in_this_process() -> Iterator[None]:
    """Open sessions of several ranks as `RankedSession` inside a `with` block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_session, "open_among_peers", RankedSession)
        yield
