"""The connections of a run's ranks: process groups, and a store for progress and last errors.

The default process group carries gradients (nccl on CUDA, gloo on the CPU). Other gloo groups carry messages between
ranks (torch_backend/ranks/peers.py). A rank that fails writes its error into the store and ends; its sockets close, and
every rank that waits for it gets an error at once. A rank that hangs writes nothing. Every rank writes its progress to
the store, and after a timeout the rank with the least progress is named.
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

# Timeout of waits for other ranks until a run sets its own (`parallel.timeout_seconds`).
PATIENCE = timedelta(minutes=10)
# Timeout of waits for rank 0 while it works alone, for example judges a check.
IDLE = timedelta(days=7)
# Timeout of a connection to a rank 0 that may have ended.
KNOCK = timedelta(seconds=2)
WHERE, WORD = "lockstep/where rank 0 is", "lockstep/word"
# Parts of gloo's and nccl's messages for a timeout.
TIMED_OUT = ("timed out", "timeout")


class RankError(UserError):
    """Another rank failed, hangs or has ended. The message names the rank and its error."""


def take_device(local: int, cuda: bool) -> torch.device:
    """Return the device of a local rank, and make it the current device. Raises UserError if there is no such GPU."""
    if not cuda:
        return torch.device("cpu")
    if torch.cuda.device_count() <= local:
        raise UserError(f"local rank {local} has no GPU: torch sees {torch.cuda.device_count()}")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def group_backend(device: torch.device) -> str:
    """Return torch's name for the backends of the process group: gloo for CPU tensors, nccl for CUDA tensors."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def meet() -> tuple[int, int, Store]:
    """Return (rank, ranks, store) of torchrun's ranks, with a store that no earlier start of the ranks has written to.

    torchrun's own store exists as long as torchrun, and would still have the entries of ranks that have ended
    (pytorch#135712). The count of restarts cannot separate them, because each agent has its own count. Therefore rank 0
    opens a new store, and writes its address to torchrun's store. A rank that reads the address of an earlier rank 0
    finds no server there, and reads again.
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
            # Connect with a plain socket first: torch prints many lines if the port is closed.
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
    """Create the default process group with a store."""
    dist.init_process_group(group_backend(device), store=store, rank=rank, world_size=ranks, timeout=PATIENCE)


# The phase of a finished command, greater than any number of sent parts.
DONE = 1 << 30


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set the timeout of the operations of a group; None is the default group."""
    # Public since torch 2.14, which warns of the private name.
    theirs = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    theirs(timeout, group)


class Progress(NamedTuple):
    """The progress of a rank, as `RankProgress.report` writes it."""

    command: int
    phase: int
    what: str


class RankProgress:
    """The progress of each rank in the store, and the last error of each rank that failed."""

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.store = dist.distributed_c10d._get_default_store()

    def report(self, command: int, phase: int, what: str = "") -> None:
        """Store this rank's progress.

        command: number of the call. phase: 0 at its begin, n when the rank sends the n-th part, DONE at its end. what:
        name of that part, if it has one.
        """
        self.store.set(f"lockstep/progress/{self.rank}", f"{command} {phase} {what}")

    def by_rank(self) -> dict[int, Progress]:
        """Return the progress of each rank; zeros for a rank that has not reported."""
        found = {}
        for rank in range(self.count):
            said = self._said(f"lockstep/progress/{rank}")
            command, phase, what = (said or "0 0 ").split(" ", 2)
            found[rank] = Progress(int(command), int(phase), what)
        return found

    def leave_words(self, kind: str, words: str) -> None:
        """Store the last error of this rank. kind: `own` for its own error, `link` for a failed connection."""
        self.store.set(f"lockstep/last words/{self.rank}", f"{kind} {words}")

    def last_words(self, rank: int) -> tuple[str, str] | None:
        """Return a rank's last error as (kind, message); None if there is none."""
        said = self._said(f"lockstep/last words/{rank}")
        return None if said is None else (said.partition(" ")[0], said.partition(" ")[2])

    def _said(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None


def silence(rank: int, group: Any) -> str:
    """Return the error of a message to a rank; "" if the rank is alive, even if it is busy."""
    try:
        work = dist.isend(torch.zeros(1), rank, group=group)
        if work is not None:
            work.wait(timedelta(seconds=1))
    except RuntimeError as error:
        return "" if timed_out(error) else str(error).splitlines()[0]
    return ""


def of_link(error: BaseException) -> bool:
    """Return whether an error is a failed connection to another rank; for gloo, mostly only the message shows it."""
    said = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(words in said for words in ("gloo/", "pair closure", *TIMED_OUT))
    )


def timed_out(error: BaseException) -> bool:
    """Return whether an error is the timeout of a collective; gloo and nccl mark it only in the message."""
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in TIMED_OUT)
