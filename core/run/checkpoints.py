"""Checkpoints of a run while it goes on: training waits for a copy to host memory, another thread does the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from lockstep.core.backend import NotSupported, Session, StepRecord
from lockstep.core.checkpoint.format import Pending, PoisonedState, begin_checkpoint
from lockstep.core.checkpoint.of_ranks import ASKED, begin_on_all, part_of, write_part
from lockstep.core.checkpoint.random_state import random_state
from lockstep.core.errors import UserError
from lockstep.core.run.data import RunData
from lockstep.core.run.directory import RunDir
from lockstep.core.run.ranks import ONE, Ranks

Reason = Literal["interval", "best", "end", "interrupted"]
BEST = "val/loss"
# After a second Ctrl-C, seconds to wait for a checkpoint that is being written.
AT_ONCE_SECONDS = 2.0


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on the disk.

    reason: why it was due. wait_seconds: how long training stood still for it: until the one before was written, and
    its own state copied. write_seconds: from then until it had its name. bytes: of all its files.
    """

    step: int
    reason: Reason
    wait_seconds: float
    write_seconds: float
    bytes: int


class Checkpoints(Protocol):
    """The checkpoints of a run as one rank knows them: `Checkpointer` on rank 0, `CheckpointPart` on the others.

    last: step of the last one that was begun, None if the disk has refused it since.
    """

    last: int | None

    def improved(self, record: StepRecord) -> bool:
        """Return whether this step's validation loss is the lowest so far. Every rank calls it."""
        ...

    def save(self, step: int, reason: Reason, good: int | None = None) -> bool:
        """Start a checkpoint of the session's state; every rank calls it."""
        ...

    def collect(self) -> Iterator[Saved | str]:
        """Return rank 0's messages about checkpoints that were begun."""
        ...

    def finish(self) -> Iterator[Saved | str]:
        """Wait for what is being written, then `collect`."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None: ...


def checkpoints_of(session: Session, data: RunData, run: RunDir | None, ranks: Ranks) -> Checkpoints:
    """Return the checkpoints of a run, on rank 0, which has its directory, or on another."""
    return CheckpointPart(session, ranks) if run is None else Checkpointer(session, data, run, ranks)


class CheckpointPart:
    """A rank's part in the checkpoints that rank 0 begins, names and commits."""

    def __init__(self, session: Session, ranks: Ranks) -> None:
        self._session, self._ranks = session, ranks
        self._thread: threading.Thread | None = None
        self.last: int | None = None

    def improved(self, record: StepRecord) -> bool:
        """Return whether rank 0 finds that this step's validation loss is the lowest so far."""
        return BEST in record.metrics and self._ranks.of_first(bool)

    def save(self, step: int, reason: Reason, good: int | None = None) -> bool:
        """Write this rank's part beside, into the folder that rank 0 has made; False if there is none."""
        self._ranks.of_first(bool, ASKED)
        random_state(self._session)
        writing = part_of(self._session, self._ranks)
        if writing is None:
            return False
        self._join(None)
        self._thread = threading.Thread(target=write_part, args=(writing,), name="lockstep-checkpoint", daemon=True)
        self._thread.start()
        self.last = step
        return True

    def collect(self) -> Iterator[Saved | str]:
        """Do nothing: rank 0 reports."""
        yield from ()

    def finish(self) -> Iterator[Saved | str]:
        """Wait for this rank's part of what is being written."""
        self._join(None)
        yield from ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Leave as `Checkpointer` does."""
        self._join(None if kind is None or issubclass(kind, Exception) else AT_ONCE_SECONDS)

    def _join(self, seconds: float | None) -> None:
        if self._thread is not None:
            self._thread.join(seconds)


class Checkpointer:
    """A writer of a session's checkpoints into a run, one at a time, which deletes those that are not to be kept.

    best: (loss, step) of the lowest validation loss so far. last: step of the last one that was begun, None if the disk
    has refused it since.
    """

    def __init__(self, session: Session, data: RunData, run: RunDir, ranks: Ranks = ONE) -> None:
        self._session, self._data, self._run, self._ranks = session, data, run, ranks
        self._thread: threading.Thread | None = None
        self._failed: tuple[Reason, BaseException] | None = None
        self._told: list[Saved | str] = []
        self.last: int | None = None
        scores = [(line["metrics"][BEST], line["step"]) for line in run.records() if BEST in line.get("metrics", {})]
        self.best: tuple[float, int] | None = min(scores, default=None)

    def improved(self, record: StepRecord) -> bool:
        """Return whether this step's validation loss is the lowest so far."""
        score = record.metrics.get(BEST)
        if score is None:
            return False
        lowest = self.best is None or score < self.best[0]
        if lowest:
            self.best = score, record.step
        return self._ranks.of_first(lambda: lowest)

    def save(self, step: int, reason: Reason, good: int | None = None) -> bool:
        """Start a checkpoint of the session's state; return False if the session has none.

        good: step of the last check that agreed. If an alarm is to roll the run back, the checkpoint that it vouches
        for is not deleted, nor are those that no check has vouched for yet.

        Raises UserError if the disk refuses the last one of a run. `collect` reports others: weights are worth more
        than one of their copies, and the next interval tries again.
        """
        started = time.perf_counter()
        self._ranks.of_first(self._join, ASKED)
        final, extra = self._run.checkpoint_of(step), self._extra(step)
        try:
            random = random_state(self._session)
            pending = begin_on_all(
                self._session, self._ranks, lambda write: begin_checkpoint(final, step, write, extra, random)
            )
        except NotSupported:
            return False
        except UserError as error:
            self._failed = reason, error
            self._settle()
            return False
        waited = time.perf_counter() - started
        parity = self._run.config.parity
        spare = (good or 0) if parity.every and parity.on_alarm == "roll_back" else None
        best = self.best[1] if self.best else None
        self._thread = threading.Thread(
            target=self._write, args=(pending, reason, waited, spare, best), name="lockstep-checkpoint", daemon=True
        )
        self._thread.start()
        self.last = step
        return True

    def collect(self) -> Iterator[Saved | str]:
        """Return those that were finished since the last call, and in words those that the disk refused.

        Raises UserError if that was the last one of a run, and PoisonedState.
        """
        self._settle()
        while self._told:
            yield self._told.pop(0)

    def finish(self) -> Iterator[Saved | str]:
        """Wait for what is being written, then `collect`: whatever it was due for, none comes after it.

        Raises UserError if the disk refused it.
        """
        self._join(last=True)
        yield from self.collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Wait for a write under way: it is of an earlier step, and good. After an interrupt, wait a short time."""
        if self._thread is not None and kind is not None:
            self._thread.join(None if issubclass(kind, Exception) else AT_ONCE_SECONDS)

    def _write(self, pending: Pending, reason: Reason, waited: float, spare: int | None, best: int | None) -> None:
        started = time.perf_counter()
        try:
            self._run.commit_checkpoint(pending, spare, best)
        except BaseException as error:  # reported by the next call
            self._failed = reason, error
            return
        taken = time.perf_counter() - started
        self._told.append(Saved(pending.step, reason, waited, taken, pending.bytes))

    def _join(self, last: bool = False) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._settle(last)

    def _settle(self, last: bool = False) -> None:
        """Raise what went wrong, or keep it to be reported where another one comes after it."""
        if self._failed is None:
            return
        (reason, error), self._failed, self.last = self._failed, None, None
        last = last or reason in ("end", "interrupted")
        if last or isinstance(error, PoisonedState) or not isinstance(error, UserError):
            raise error
        self._told.append(f"{error}; those before it stay, and the next interval tries again")

    def _extra(self, step: int) -> dict[str, object]:
        train, info = self._data.config.train, self._run.info
        return {
            "tokens_seen": step * train.batch_size * train.sequence_length,
            "data_fingerprint": self._data.dataset.fingerprint,
            "config": self._data.config.model_dump(mode="json"),
            "versions": info.get("versions"),
            "wandb_id": info.get("wandb_id"),
        }
