"""Connect the ranks of a run: their process groups, and a store for progress and last messages.

The default process group carries gradients (nccl on CUDA, gloo on the CPU), gloo groups beside it messages of ranks to
each other (torch_backend/ranks/peers.py). A rank that fails writes the reason into the store and ends: sockets close,
and any rank that waits for it gets an error at once. One that hangs writes nothing: every rank reports its progress to
the store, and when the wait is over the one farthest behind is named.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from lockstep.core.errors import UserError

# Default, until a run sets how long ranks wait for each other (`parallel.timeout_seconds`).
PATIENCE = timedelta(minutes=10)
# Timeout while rank 0 works alone: it may judge a check, or write a checkpoint.
IDLE = timedelta(days=7)
# Timeout at a place where rank 0 may have ended.
KNOCK = timedelta(seconds=2)
WHERE, WORD = "lockstep/where rank 0 is", "lockstep/word"
# Parts of gloo's and nccl's messages for a timeout.
TIMED_OUT = ("timed out", "timeout")


class RankError(UserError):
    """A rank failed, hangs, or is gone: which one, and its last words."""


def take_device(local: int, cuda: bool) -> torch.device:
    """Return the device of a local rank, made the current one. Raises UserError if there is none."""
    if not cuda:
        return torch.device("cpu")
    if torch.cuda.device_count() <= local:
        raise UserError(f"local rank {local} has no GPU: torch sees {torch.cuda.device_count()}")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def group_backend(device: torch.device) -> str:
    """Return the process group's backends: one for tensors of the CPU, one for those of the device."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def meet() -> tuple[int, int, Store]:
    """Return (rank, ranks, store) of torchrun's ranks, with a store that no earlier start of them has written to.

    torchrun's own store lives as long as torchrun, and entries of ranks that have ended would be read as current
    (pytorch#135712). The count of restarts cannot separate them, as each agent has its own count. So rank 0 opens
    another store and writes its address to torchrun's. A rank that reads an earlier rank 0's address finds no server,
    and reads again.
    """
    shared, rank, ranks = next(rendezvous("env://", timeout=PATIENCE))
    if rank == 0:
        word = secrets.token_hex(8)
        store = TCPStore(os.environ["MASTER_ADDR"], 0, ranks, True, wait_for_workers=False, timeout=PATIENCE)
        store.set(WORD, word)
        shared.set(WHERE, f"{store.port} {word}")
        return rank, ranks, store
    until = time.monotonic() + PATIENCE.total_seconds()
    while True:
        port, word = shared.get(WHERE).decode().split()
        try:
            # torch itself would print many lines about a port that nothing opens.
            socket.create_connection((os.environ["MASTER_ADDR"], int(port)), KNOCK.total_seconds()).close()
            store = TCPStore(os.environ["MASTER_ADDR"], int(port), ranks, False, timeout=KNOCK)
            if store.get(WORD).decode() == word:
                store.set_timeout(PATIENCE)
                return rank, ranks, store
        except (RuntimeError, OSError):
            if time.monotonic() > until:
                raise
        time.sleep(0.2)


def join_group(rank: int, ranks: int, store: Store, device: torch.device) -> None:
    """Make the default process group over a store."""
    dist.init_process_group(group_backend(device), store=store, rank=rank, world_size=ranks, timeout=PATIENCE)


# The phase of a command that is done: more than any number of buckets.
DONE = 1 << 30


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set the timeout of a group's operations, by default of the default group's."""
    # Public since torch 2.14, which warns of the private name.
    theirs = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    theirs(timeout, group)


class Progress(NamedTuple):
    """The progress of a rank (`RankProgress.report`)."""

    command: int
    phase: int
    what: str


class RankProgress:
    """The progress of each rank in the store, and the last words of those that fail."""

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.store = dist.distributed_c10d._get_default_store()

    def report(self, command: int, phase: int, what: str = "") -> None:
        """Store how far this rank is: in which command, and in it 0 begun, n when it sends its n-th part, or DONE.

        what: the name of that part, where it has one.
        """
        self.store.set(f"lockstep/progress/{self.rank}", f"{command} {phase} {what}")

    def by_rank(self) -> dict[int, Progress]:
        """Return the progress of each rank; zeros for a rank that has reported none."""
        found = {}
        for rank in range(self.count):
            said = self._said(f"lockstep/progress/{rank}")
            command, phase, what = (said or "0 0 ").split(" ", 2)
            found[rank] = Progress(int(command), int(phase), what)
        return found

    def leave_words(self, kind: str, words: str) -> None:
        """Store the last words of this rank. kind: `own` trouble, or that of a `link` to another rank."""
        self.store.set(f"lockstep/last words/{self.rank}", f"{kind} {words}")

    def last_words(self, rank: int) -> tuple[str, str] | None:
        """Return a rank's last words as (kind, words); None if there are none."""
        said = self._said(f"lockstep/last words/{rank}")
        return None if said is None else (said.partition(" ")[0], said.partition(" ")[2])

    def _said(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None


def silence(rank: int, group: Any) -> str:
    """Explain why nothing can be sent to a rank; nothing if it is there, though it may be busy."""
    try:
        work = dist.isend(torch.zeros(1), rank, group=group)
        if work is not None:
            work.wait(timedelta(seconds=1))
    except RuntimeError as error:
        return "" if timed_out(error) else str(error).splitlines()[0]
    return ""


def of_link(error: BaseException) -> bool:
    """Return whether an error is a failed connection to another rank; gloo mostly states that in the message alone."""
    said = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(words in said for words in ("gloo/", "pair closure", *TIMED_OUT))
    )


def timed_out(error: BaseException) -> bool:
    """Return whether an error is the timeout of a collective; gloo and nccl have a message for it, and no class."""
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in TIMED_OUT)
