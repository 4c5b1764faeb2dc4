"""Checks during training: the reference runs in a separate process, and the trainer only waits for gathering evidence.

Every N steps, and in the first step after a start or a resume, the trainer gathers evidence: a probe micro-batch of the
current data with uneven loss weights, at the current weights, and the update of the current step. A thread writes it
into a folder, one tensor at a time, and sends the path to the worker. The folder is removed after its check is
received. The folder of a check that disagreed remains until the alarm is handled. If more checks wait than
`parity.queue` allows, a check is skipped and counted. If the worker dies or a folder is lost, training continues, and
every lost check is reported. A worker that has work and sends no result within `parity.timeout_seconds` is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing
import os
import shutil
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from queue import SimpleQueue
from tempfile import mkdtemp
from typing import Any, Self

import numpy as np

from lockstep.core.backend import Backend, Batch, Session, StepRecord
from lockstep.core.checkpoint.format import folder_name
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.files.atomic import write_atomically
from lockstep.core.files.npz import read_npz
from lockstep.core.load_backend import load_backend
from lockstep.core.parity.diagnose.fitting import with_fitting
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.lasting import LastingStore
from lockstep.core.parity.evidence.place import return_large_blocks
from lockstep.core.parity.evidence.recorded import probe_of, save_observations
from lockstep.core.parity.evidence.saved import open_evidence, save_evidence
from lockstep.core.parity.evidence.store import FolderStore, NoStore
from lockstep.core.parity.judge.end_to_end import observations_of
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.judge.over_steps import OverSteps
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.parity.modes.coverage import BUSY
from lockstep.core.parity.reference.self_check import sound_reference
from lockstep.core.plan.checks import checks_waiting, require_budget
from lockstep.core.run.ranks import ONE, Ranks, is_sharded
from lockstep.core.train.finite import NotFinite
from lockstep.core.train.validation import Validation

POLL_SECONDS = 0.2
# The worker has a lower priority than the trainer, because both may share two cores.
WORKER_NICENESS = 5
# A worker that must end may be judging a check whose result is no longer needed.
END_SECONDS = 1.0
# The sums over a run's checks (core/parity/judge/bias.py) take some megabytes, so they are written after this many
# checks and at the end.
SUMS, SUMS_EVERY = "bias.npz", 8
# The previous sums. A killed run resumes from a checkpoint that may be older than the last sums.
SUMS_BEFORE = "bias_before.npz"

Result = Check | tuple[int, str]


class Shadow:
    """The trainer's side of checks during training. `reference`: name of a backend, as in core/load_backend.py.

    As a context manager it ends the worker, at once after an exception.
    """

    def __init__(
        self,
        config: RunConfig,
        reference: str,
        observations: Path | None = None,
        ranks: Ranks = ONE,
        folder: Path | None = None,
        first: int = 1,
    ) -> None:
        """Start the worker process of the reference.

        observations: folder for the sketches of each checked step, or None to keep none.
        ranks: the ranks of the session.
        folder: folder for the evidence of pending checks, which `close` removes. Default: a temporary one.
        first: first step of this process, which is checked because a resume may have restored a wrong state.
        Raises UserError if a check exceeds the run's budgets.
        """
        require_budget(config, thorough=False)
        return_large_blocks(config)
        self._most_waiting = checks_waiting(config)
        self._config, self._ranks, self._first = config, ranks, first
        self._waiting: set[int] = set()
        self._folder = Path(mkdtemp(prefix="lockstep-evidence-")) if folder is None else folder.absolute()
        # The thread that writes evidence and sends its path during training.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="lockstep-evidence")
        self._unsent: SimpleQueue[tuple[int, str]] = SimpleQueue()
        self._begun = 0
        self._lost: list[tuple[int, str]] = []
        # Results that arrived while the worker judged separate evidence, and the folders of this evidence.
        self._early: deque[Result] = deque()
        self._apart: list[Path] = []
        # The step whose evidence is kept for its alarm; 0 if there is none.
        self._accused = 0
        # Time of the worker's last result, or of the last moment without pending checks.
        self._heard = time.monotonic()
        self._given_up = False
        # One pipe in each direction. The worker's ends are closed here, so that reading fails at once if the worker
        # dies, and does not block for the rest of a message.
        context = multiprocessing.get_context("spawn")
        self._results, results_out = context.Pipe(duplex=False)
        evidence_in, self._evidence = context.Pipe(duplex=False)
        self._worker: SpawnProcess = context.Process(
            target=_work,
            args=(config, reference, observations, evidence_in, results_out),
            daemon=True,
            name="lockstep-reference",
        )
        # Ctrl-C, the end of a terminal and a scheduler (Slurm) signal every process of a run. The worker inherits that
        # their signals are ignored, and finishes its work. At its end Python sends SIGTERM to a child and waits for it,
        # so a worker that nobody closed is killed before.
        signals = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
        previous = {s: signal.signal(s, signal.SIG_IGN) for s in signals}
        try:
            self._worker.start()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        atexit.register(self._worker.kill)
        evidence_in.close()
        results_out.close()

    @property
    def worker_pid(self) -> int:
        """Process id of the worker."""
        assert self._worker.pid is not None
        return self._worker.pid

    @property
    def pending(self) -> int:
        """Number of checks without a result so far."""
        return len(self._waiting)

    def due(self, step: int) -> bool:
        """Return True every `parity.every` steps, at step 1 and at the first step of this process."""
        return self._config.parity.due(step, self._first)

    def step(
        self,
        session: Session,
        batch: Batch,
        norms: bool,
        due: str | None = None,
        validation: Validation | None = None,
    ) -> StepRecord:
        """Run the step, and send its evidence to the worker if the queue has room.

        due: digest of the batch that the data order gives.
        validation: the validation that is due after the step, and is run here if the step is checked.
        Raises NotFinite after its evidence was sent.
        """
        store = self._opened() if self._ready() else None
        self._ranks.of_first(lambda: None if store is None else str(store.folder or ""))
        if store is None:
            record = _unchecked(session, batch, norms)
            self._lost.append((record.step, self._reason()))
            return record
        probe = probe_of(batch, self._config)
        evidence = gather(session, self._config, batch, probe, norms, due, store=store, validation=validation)
        if not self._waiting:
            self._heard = time.monotonic()
        self._waiting.add(evidence.record.step)
        self._writer.submit(self._send, evidence, store)
        if evidence.not_finite:
            raise NotFinite(evidence.record, evidence.not_finite)
        return evidence.record

    def _opened(self) -> LastingStore:
        return LastingStore(self._begin, self._writer, self._ranks.count)

    def _begin(self) -> FolderStore:
        with contextlib.suppress(OSError):  # without parents: a run that was deleted meanwhile is not recreated
            self._folder.mkdir(exist_ok=True)
        self._begun += 1
        folder = self._folder / f".{os.getpid()}-{self._begun}.tmp"
        if not is_sharded(self._config):
            return FolderStore.create(folder)
        return FolderStore.create(folder, self._ranks.count, self._config.parallel.timeout_seconds)

    def _send(self, evidence: Evidence, store: LastingStore) -> None:
        """Save the evidence and send its path to the worker.

        Runs in the writer thread, after the writes of its tensors.
        """
        step = evidence.record.step
        place = self._place(step)
        try:
            store.finish(partial(save_evidence, evidence), place)
            with contextlib.suppress(OSError):  # the worker has died: `collect` reports the lost checks
                self._evidence.send((step, place))
        except UserError as error:
            self._unsent.put((step, f"its evidence is lost: {error}"))
        except Exception as error:  # a candidate's record may contain values that JSON does not allow
            self._unsent.put((step, f"its evidence is lost: {type(error).__name__}: {error}"))

    def _take_unsent(self) -> None:
        while not self._unsent.empty():
            lost = self._unsent.get()
            self._waiting.discard(lost[0])
            self._lost.append(lost)

    def collect(self) -> Iterator[Result]:
        """Yield the results received so far."""
        self._end_if_overdue()
        alive = self._worker.is_alive()  # read first, so that results sent before the worker died are still received
        while (result := self._receive(0.0)) is not None:
            yield result
        self._take_unsent()
        if self._waiting and not alive:
            self._writer.submit(int).result()  # wait, so that the thread's last writes are removed too
            for step in sorted(self._waiting):
                self._lost.append((step, self._reason()))
                self._remove(step)
            self._waiting.clear()
        lost, self._lost = self._lost, []
        yield from lost

    def drain(self) -> Iterator[Result]:
        """Wait until every pending check is received or lost, for at most `parity.timeout_seconds` each.

        Yields as `collect`.
        """
        while self._waiting:
            self._end_if_overdue()
            alive = self._worker.is_alive()
            if (result := self._receive(POLL_SECONDS)) is not None:
                yield result
            elif not alive:
                break
            self._take_unsent()
        yield from self.collect()

    def close(self, at_once: bool = False) -> None:
        """End the worker and remove the evidence. A second call does nothing."""
        # Join the thread. If it frees a tensor's memory during the interpreter's shutdown, the process aborts.
        self._writer.shutdown(cancel_futures=at_once)
        with contextlib.suppress(OSError):
            self._evidence.send(None)
        if self._worker.is_alive() and not at_once:
            self._worker.join(timeout=END_SECONDS)
        if self._worker.is_alive():
            self._worker.kill()
            self._worker.join()
        atexit.unregister(self._worker.kill)
        left = self._folder.glob(f".{os.getpid()}-*.tmp")
        for place in (*left, *self._apart, *map(self._place, (*self._waiting, self._accused))):
            self._remove_folder(place)
        with contextlib.suppress(OSError):  # no such folder, or it has contents of others
            self._folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(at_once=kind is not None)

    def _ready(self) -> bool:
        return self._worker.is_alive() and len(self._waiting) < self._most_waiting

    def _reason(self) -> str:
        if self._worker.is_alive():
            by_disk = self._most_waiting < self._config.parity.queue
            where = f"; parity.disk_gb = {self._config.parity.disk_gb:g} has no room for more" if by_disk else ""
            return f"{BUSY} {len(self._waiting)} earlier checks{where}"
        how = f"process has died (exit code {self._worker.exitcode})"
        if self._given_up:
            how = f"process gave no answer within {self._config.parity.timeout_seconds} s and was ended"
        return f"the reference's {how}; training goes on unchecked"

    def _end_if_overdue(self) -> None:
        """Kill a worker that is overdue. Only the time distinguishes a reference that hangs from a slow one."""
        waited = time.monotonic() - self._heard
        if not self._waiting or waited <= self._config.parity.timeout_seconds or self._results.poll(0.0):
            return
        if self._worker.is_alive():
            self._given_up = True
            self._worker.kill()
            self._worker.join()

    def _receive(self, seconds: float) -> Result | None:
        """Wait up to `seconds` for a result. Returns None if there is none, at once if the worker has ended."""
        try:
            if not self._early and not self._results.poll(seconds):
                return None
            result: Result = self._early.popleft() if self._early else self._results.recv()
        except (EOFError, OSError):
            self._worker.join(timeout=END_SECONDS)  # the pipe closes just before the process ends
            return None
        step = result.step if isinstance(result, Check) else result[0]
        self._heard = time.monotonic()
        self._waiting.discard(step)
        if self._accused != step:  # a step that is run again already has its own evidence there
            self._remove(self._accused)
        self._accused = step if isinstance(result, Check) and result.verdict == "disagreed" else 0
        if not self._accused:
            self._remove(step)
        return result

    def judge_apart(self, evidence: Evidence) -> tuple[Evidence, Check | None]:
        """Judge separate evidence in the worker, and wait for the check, which is None if the worker sends none.

        Returns the evidence from its folder, which `close` removes, and the check.
        """
        step = evidence.record.step
        place = self._folder / f"{folder_name(step)}-again"
        try:
            self._remove_folder(place)
            # Only rank 0 writes this folder. The other ranks wait for the verdict.
            store = FolderStore.create(self._folder / f".{os.getpid()}-again.tmp")
            evidence = save_evidence(evidence, store)
            store.move(place)
            self._apart.append(place)
            self._writer.submit(self._evidence.send, (step, place)).result()
        except (UserError, OSError):
            return evidence, None
        until = time.monotonic() + self._config.parity.timeout_seconds
        while time.monotonic() < until:
            try:
                if self._results.poll(POLL_SECONDS):
                    result: Result = self._results.recv()
                    if (result.step if isinstance(result, Check) else result[0]) == step:
                        return evidence, result if isinstance(result, Check) else None
                    self._early.append(result)
                elif not self._worker.is_alive():
                    return evidence, None
            except (EOFError, OSError):
                return evidence, None
        return evidence, None

    def evidence_of(self, step: int) -> Evidence:
        """Return the evidence of the check that was received last and disagreed.

        Raises UserError if it is lost.
        """
        return open_evidence(self._place(step))

    def _place(self, step: int) -> Path:
        return self._folder / folder_name(step)

    def _remove(self, step: int) -> None:
        self._remove_folder(self._place(step))

    def _remove_folder(self, place: Path) -> None:
        shutil.rmtree(place, ignore_errors=True)


class ShadowPart:
    """The part of another rank in the checks of rank 0's `Shadow`: to gather evidence and receive the verdicts."""

    pending = 0

    def __init__(self, config: RunConfig, ranks: Ranks, first: int = 1) -> None:
        """Start the writer thread of this rank's evidence. Raises UserError as on rank 0."""
        require_budget(config, thorough=False)
        return_large_blocks(config)
        self._config, self._ranks, self._first = config, ranks, first
        # The thread that writes this rank's part of the evidence during training.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="lockstep-evidence")

    def due(self, step: int) -> bool:
        """Return whether the check of a step is due, as `Shadow.due` on rank 0."""
        return self._config.parity.due(step, self._first)

    def step(
        self,
        session: Session,
        batch: Batch,
        norms: bool,
        due: str | None = None,
        validation: Validation | None = None,
    ) -> StepRecord:
        """Run the step, and gather its evidence if rank 0 has room for the check. Raises NotFinite as on rank 0."""
        told: str | None = self._ranks.of_first(lambda: None)
        if told is None:
            return _unchecked(session, batch, norms)
        store = self._opened(Path(told)) if told and is_sharded(self._config) else NoStore(self._ranks.count)
        probe = probe_of(batch, self._config)
        evidence = gather(session, self._config, batch, probe, norms, due, store=store, validation=validation)
        if isinstance(store, LastingStore):
            self._writer.submit(store.finish_part)
        if evidence.not_finite:
            raise NotFinite(evidence.record, evidence.not_finite)
        return evidence.record

    def _opened(self, folder: Path) -> LastingStore:
        ranks = self._ranks
        return LastingStore(lambda: FolderStore.join(folder, ranks.rank, ranks.count), self._writer, ranks.count)

    def collect(self) -> Iterator[Result]:
        """Yield nothing, because only rank 0 receives results."""
        yield from ()

    def drain(self) -> Iterator[Result]:
        """Yield nothing, as `collect`."""
        yield from ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Wait for the writer thread. A thread that frees memory in the interpreter's shutdown aborts the process."""
        self._writer.shutdown(cancel_futures=kind is not None)


def _unchecked(session: Session, batch: Batch, norms: bool) -> StepRecord:
    started = time.perf_counter()
    record = session.step(batch, norms=norms)
    return replace(record, seconds=time.perf_counter() - started)


def _work(
    config: RunConfig, reference: str, observations: Path | None, evidence_in: Connection, results_out: Connection
) -> None:
    """Run the worker process."""
    os.nice(WORKER_NICENESS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    judge_all(config, reference, observations, evidence_in, results_out)


def judge_all(
    config: RunConfig, reference: str, observations: Path | None, evidence_in: Connection, results_out: Connection
) -> None:
    """Judge evidence as its steps and folders arrive, and send each result, until the trainer has ended."""
    opened: Reference | None = None
    backend: Backend | None = None
    judged, fitted = 0, False
    while (told := _received(evidence_in)) is not None:
        step, folder = told
        result: Result
        try:
            evidence = open_evidence(folder)
            if opened is None or backend is None:
                backend = load_backend(reference)
                opened = sound_reference(backend, config).over_a_run()
                opened = opened if observations is None else _gone_on(opened, observations, step)
            # A recheck after an alarm is not one of the run's checks.
            check = judge(evidence, replace(opened, over_steps=None) if evidence.rechecked else opened)
            if check.verdict == "disagreed" and not fitted and not evidence.rechecked:
                check, fitted = with_fitting(check, evidence, opened, backend), True
            folder_kept = None if evidence.rechecked else observations
            result = check if folder_kept is None else _kept(check, evidence, config, folder_kept)
        except UserError as error:
            result = (step, str(error))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = next(iter(str(error).splitlines()), "")
            reason = f"the reference failed: {type(error).__name__}: {said} ({where.filename}:{where.lineno})"
            result = (step, reason)
        try:
            results_out.send(result)
        except OSError:  # the trainer was killed, and `_end_with_parent` has not detected it yet
            return
        if opened is not None and opened.over_steps is not None and not isinstance(result, tuple):
            opened.over_steps.last_step = step
        judged += 1
        if judged % SUMS_EVERY == 0:
            _keep_sums(opened, observations)
    if judged % SUMS_EVERY:
        _keep_sums(opened, observations)


def _received(pipe: Connection) -> tuple[int, Path] | None:
    """Return the next message; None if the sender is finished, or has ended."""
    try:
        told: tuple[int, Path] | None = pipe.recv()
    except (EOFError, OSError):  # OSError: the pipe ended inside a message
        return None
    return told


def _gone_on(reference: Reference, folder: Path, step: int) -> Reference:
    """Continue the sums over a resumed run's checks before `step`.

    Without such sums, return the reference unchanged.
    """
    if reference.over_steps is None:
        return reference
    for name in (SUMS, SUMS_BEFORE):
        with contextlib.suppress(UserError):  # missing or damaged: the sums start again
            arrays = read_npz(folder / name)
            sums = OverSteps.resumed(reference.recipe, arrays, step)
            if sums is not None:
                return replace(reference, over_steps=sums)
            # The previous sums include the program before it was fixed.
            if arrays["accused"]:
                return reference
    return reference


def _keep_sums(reference: Reference | None, folder: Path | None) -> None:
    """Write the sums over the run's checks next to its observations, for the report and for a resume."""
    if reference is None or reference.over_steps is None or folder is None:
        return
    buffer = io.BytesIO()
    np.savez(buffer, **reference.over_steps.to_arrays())  # type: ignore[arg-type]
    with contextlib.suppress(OSError):  # a full disk: the checks have already reported it
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / SUMS).exists():
            (folder / SUMS).replace(folder / SUMS_BEFORE)
        write_atomically(folder / SUMS, [buffer.getvalue()])


def _kept(check: Check, evidence: Evidence, config: RunConfig, folder: Path) -> Check:
    """Write the sketches of the check's step. An error is added to the check's `not_covered`."""
    try:
        kept = observations_of(evidence, config.model)
        save_observations(folder, evidence.record.step, evidence.batch, evidence.tapped, kept)
    except UserError as error:
        return replace(check, not_covered=(*check.not_covered, f"a later replay of this step: {error}"))
    return check


def _end_with_parent() -> None:
    """End this process as soon as the trainer has ended."""
    parent: Any = multiprocessing.parent_process()
    parent.join()
    os._exit(1)
