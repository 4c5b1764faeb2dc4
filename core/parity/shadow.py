"""Checks during training: the reference works in a process of its own, the trainer waits only to hand evidence over.

Every N steps the trainer gathers evidence (a probe micro-batch of the live data with uneven loss weights, at the live
weights, and the live step's update) and puts it into a queue. If more checks wait than `parity.queue` allows, a check
is skipped and counted. If the worker dies, training goes on and every check that is lost says so.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from typing import Any

from core.backend import Batch, Session, StepRecord
from core.config import RunConfig
from core.parity.evidence import gather, uneven_weights
from core.parity.judge import Reference, judge
from core.parity.load import load_backend
from core.parity.verdict import Check

POLL_SECONDS = 0.2
# The worker gives way to the trainer; both may share two cores.
WORKER_NICENESS = 5

Result = Check | tuple[int, str]


class Shadow:
    """The trainer's end. `reference` is a backend's name as core/parity/load.py takes it."""

    def __init__(self, config: RunConfig, reference: str) -> None:
        self._config = config
        self._every = config.parity.every
        self._waiting: set[int] = set()
        self._lost: list[tuple[int, str]] = []
        context = multiprocessing.get_context("spawn")
        self._out: Any = context.Queue()
        self._back: Any = context.Queue()
        self._worker: SpawnProcess = context.Process(
            target=_work,
            args=(config, reference, self._out, self._back, os.getpid()),
            daemon=True,
            name="lockstep-reference",
        )
        # Ctrl-C reaches the whole group of processes: the worker inherits that it is ignored, and finishes what it has.
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._worker.start()
        finally:
            signal.signal(signal.SIGINT, previous)

    def due(self, step: int) -> bool:
        """Every `parity.every` steps, and at step 1."""
        return step % self._every == 0 or step == 1

    def step(self, session: Session, batch: Batch, norms: bool) -> StepRecord:
        """Run the step; hand its evidence over if the worker can take it."""
        if not self._ready():
            started = time.perf_counter()
            record = session.step(batch, norms=norms)
            record = replace(record, seconds=time.perf_counter() - started)
            self._lost.append((record.step, self._reason()))
            return record
        probe = uneven_weights(batch.micro_batches(self._config.train.micro_batch_size)[0], self._config.seed)
        evidence = gather(session, self._config, batch, probe, norms)
        self._waiting.add(evidence.record.step)
        self._out.put(evidence)
        return evidence.record

    def collect(self) -> Iterator[Result]:
        """What has come back so far."""
        while True:
            try:
                result = self._back.get_nowait()
            except queue.Empty:
                break
            yield self._returned(result)
        if self._waiting and not self._worker.is_alive():
            for step in sorted(self._waiting):
                self._lost.append((step, self._reason()))
            self._waiting.clear()
        lost, self._lost = self._lost, []
        yield from lost

    def drain(self) -> Iterator[Result]:
        """Wait until every check that was handed over has come back or is lost."""
        while self._waiting:
            try:
                yield self._returned(self._back.get(timeout=POLL_SECONDS))
            except queue.Empty:
                if not self._worker.is_alive():
                    break
        yield from self.collect()

    def close(self) -> None:
        """End the worker."""
        if self._worker.is_alive():
            self._out.put(None)
            self._worker.join(timeout=5)
        if self._worker.is_alive():
            self._worker.terminate()
        self._out.cancel_join_thread()

    def _ready(self) -> bool:
        return self._worker.is_alive() and len(self._waiting) < self._config.parity.queue

    def _reason(self) -> str:
        if self._worker.is_alive():
            return f"the reference is still busy with {len(self._waiting)} earlier checks"
        return f"the reference's process has died (exit code {self._worker.exitcode}); training goes on unchecked"

    def _returned(self, result: Result) -> Result:
        self._waiting.discard(result.step if isinstance(result, Check) else result[0])
        return result


def _work(config: RunConfig, reference: str, evidence_in: Any, results_out: Any, parent: int) -> None:
    """The worker's end: judge what comes until None comes or the trainer is gone."""
    os.nice(WORKER_NICENESS)
    opened: Reference | None = None
    while True:
        try:
            evidence = evidence_in.get(timeout=1.0)
        except queue.Empty:
            if os.getppid() != parent:
                return
            continue
        if evidence is None:
            return
        try:
            if opened is None:
                opened = Reference.open(load_backend(reference), config)
            results_out.put(judge(evidence, opened))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"the reference failed: {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
            results_out.put((evidence.record.step, reason))
