"""Record observations during training, without a reference. The cost allows every hundredth step of a long run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Self

from lockstep.core.backend import Batch, NotSupported, Session, StepRecord
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.observations import Observation
from lockstep.core.parity.evidence.recorded import observe, observed_step, probe_of, save_observations
from lockstep.core.parity.modes.shadow import Result, Shadow, ShadowPart
from lockstep.core.train.validation import Validation


class Recorder:
    """A recorder of some steps' observations, together with checks if there are any.

    Every `parity.record_every` steps it records the step's own gradients, which need no extra pass. Every
    `parity.record_taps_every` steps it records a micro-batch's taps and gradients, from an extra forward and backward
    pass. The check of a checked step keeps its observations. A `with` block ends when the last file is written.
    """

    def __init__(self, config: RunConfig, folder: Path | None, shadow: Shadow | ShadowPart | None) -> None:
        """Record into `folder`, which is None on ranks that only take part in observing."""
        self._config, self._folder, self._shadow = config, folder, shadow
        self._lost: list[tuple[int, str]] = []
        self._asked = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lockstep-observations")
        # The file that is written while the next step runs, and its step.
        self._writing: tuple[int, Future[Path]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()

    @property
    def pending(self) -> int:
        """Number of unfinished checks."""
        return self._shadow.pending if self._shadow else 0

    def due(self, step: int) -> bool:
        """Return whether the step is checked or recorded. The next call of `step` is for this step."""
        self._asked = step
        checked = self._shadow is not None and self._shadow.due(step)
        return checked or self._taps_are_due(step) or _is_due(self._config.parity.record_every, step)

    def _taps_are_due(self, step: int) -> bool:
        return _is_due(self._config.parity.record_taps_every, step)

    def step(
        self,
        session: Session,
        batch: Batch,
        norms: bool,
        due: str | None = None,
        validation: Validation | None = None,
    ) -> StepRecord:
        """Check the step, or run it and record what is due."""
        if self._shadow and self._shadow.due(self._asked):
            return self._shadow.step(session, batch, norms, due, validation)
        of = probe_of(batch, self._config) if self._taps_are_due(self._asked) else batch
        found: Mapping[str, Observation] = {}
        said = ""
        started = time.perf_counter()
        try:
            if of is batch:
                record, found = observed_step(session, self._config, batch, norms)
            else:
                found = observe(session, self._config, of)
        except NotSupported as reason:
            said = str(reason)
        if of is not batch or said:
            started = time.perf_counter()
            record = session.step(batch, norms=norms)
        record = replace(record, seconds=time.perf_counter() - started)
        if found and self._folder:
            self._wait_for_file()
            written = self._thread.submit(save_observations, self._folder, record.step, batch, of, found)
            self._writing = record.step, written
        if said:
            self._lose(record.step, said)
        return record

    def _wait_for_file(self) -> None:
        if self._writing is not None:
            (step, written), self._writing = self._writing, None
            try:
                written.result()
            except UserError as error:
                self._lose(step, str(error))

    def _lose(self, step: int, said: str) -> None:
        self._lost.append((step, f"its observations were not kept: {said}"))

    def collect(self) -> Iterator[Result]:
        """Yield the finished checks, and the observations that were lost."""
        if self._writing is not None and self._writing[1].done():
            self._wait_for_file()
        lost, self._lost = self._lost, []
        yield from lost
        if self._shadow:
            yield from self._shadow.collect()

    def drain(self) -> Iterator[Result]:
        """Wait for all unfinished checks and for the last file. Yields as `collect`."""
        self._wait_for_file()
        if self._shadow:
            yield from self._shadow.drain()
        yield from self.collect()


def _is_due(every: int, step: int) -> bool:
    return every > 0 and (step % every == 0 or step == 1)
