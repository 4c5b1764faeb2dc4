"""Run a run's candidate to any of its steps from the nearest stored state, and compare its records with the run's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.backend import Backend, Batch, Session, State, StepRecord
from lockstep.core.checkpoint.format import checkpoint_step, load_checkpoint, reader_of
from lockstep.core.checkpoint.taken_over import require_taken_over
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.model.groups import moment_names
from lockstep.core.model.init import init_parameters
from lockstep.core.parity.diagnose.recheck_rows import recheck_rows
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.measures.scalar_bounds import same
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.run.directory import RunDir
from lockstep.core.train.skipped_steps import as_its_own, first_scalars

# Fields of a record that the step's arithmetic sets, and which have equal bits if the step repeats.
COMPARED = ("digest", "loss", "loss_weight", "lr", "grad_norm", "clip_coefficient")


class StoredStates:
    """A run's stored states: its checkpoints, and the initial weights if these follow from the seed."""

    def __init__(self, run: RunDir) -> None:
        self._config = run.config_at(1)
        self._paths = {_step(path): path for path in run.checkpoints()}

    @property
    def steps(self) -> list[int]:
        """Steps done in each stored state, sorted. For an imported run, step 0 is a checkpoint that is always kept."""
        return sorted({0, *self._paths} if self._config.initial == "seed" else self._paths)

    def nearest(self, done: int) -> int:
        """Return the largest of `steps` up to `done`. Raises UserError if there is none."""
        found = [step for step in self.steps if step <= done]
        if not found:
            raise UserError(
                f"no state is stored from which step {done + 1} can be reached: the imported weights, the checkpoint "
                "of step 0, are gone"
            )
        return found[-1]

    def load(self, done: int, session: Session | None = None) -> State:
        """Return the state after `done` steps, one of `steps`. Raises UserError if its checkpoint is damaged.

        session: reads checkpoints in a format of its own.
        """
        if done in self._paths:
            return load_checkpoint(self._paths[done], reader_of(session))[0]
        return initial_state(self._config)


def initial_state(config: RunConfig) -> State:
    """Return the state before step 1, with weights from the seed."""
    params = init_parameters(config.model, config.seed)
    dtype = np.float64 if config.precision.exact else np.float32
    params = {name: array.astype(dtype) for name, array in params.items()}
    kinds = moment_names(config)
    moments = {kind: {n: np.zeros_like(params[n]) for n in names} for kind, names in kinds.items()}
    return State(0, params, moments, first_scalars(config))


class Rerun:
    """A second run of a candidate along a run. Each step uses the settings that were in force then.

    differences: step → (field, recorded, now) for each record that differs from the run's.
    steps_run: number of steps that were run again.
    loaded: steps done in the stored state that was loaded last.
    unseen: reasons why the candidate could not be compared with a state that it loaded, in words.
    """

    def __init__(
        self, run: RunDir, backend: Backend, config: Callable[[int], RunConfig], batch: Callable[[int], Batch]
    ) -> None:
        """Open a session at the run's first step. Raises the errors of opening.

        config: returns the run's settings at a step, with the candidate's changes.
        """
        self._states, self._batch, self._config_of, self._backend = StoredStates(run), batch, config, backend
        self._recorded = {line["step"]: line for line in run.records()}
        self._config = config(1)
        self._session: Session = backend.open(self._config)
        self._done: int | None = None
        self.loaded = 0
        self.differences: dict[int, list[tuple[str, Any, Any]]] = {}
        self.steps_run = 0
        self.unseen: set[str] = set()

    def to(self, done: int) -> None:
        """Run the session to the state after `done` steps."""
        nearest = self._states.nearest(done)
        if self._done is None or not nearest <= self._done <= done:
            self._load(self._states.load(nearest, self._session), nearest + 1)
            self._done = self.loaded = nearest
        for step in range(self._done + 1, done + 1):
            self._into(step)
            self._compare(self._session.step(self._batch(step)))
            self._done = step
        self._into(done + 1)

    def state(self, done: int) -> State:
        """Run from the nearest stored state. Returns the state after `done` steps."""
        self.to(done)
        return self._session.state()

    def step_on(self, step: int, batch: Batch) -> StepRecord:
        """Make step `step` on the given batch, after the steps before it on the run's batches."""
        self.to(step - 1)
        self._done = None
        return self._session.step(batch)

    def check(self, step: int, reference: Reference) -> tuple[Check, Evidence]:
        """Check step `step` thoroughly, from the run's state before it."""
        self.to(step - 1)
        batch = self._batch(step)
        evidence = gather(self._session, self._config, batch, due=batch.digest(), ahead=False)
        self._compare(evidence.record)
        self._done = step if evidence.after.step == step else None
        evidence, check = recheck_rows(self._session, self._config, evidence, judged(evidence, reference), reference)
        return check, evidence

    def first_difference(self, after: int = 0) -> int | None:
        """Return the first step after `after` whose record differs from the run's; None if there is none."""
        return min((step for step in self.differences if step > after), default=None)

    def close(self) -> None:
        """Close the session."""
        self._session.close()

    def _into(self, step: int) -> None:
        """Open a session with the state of the last one if a branch of the run begins at this step."""
        if self._config_of(step) != self._config:
            self._load(self._session.state(), step)

    def _load(self, state: State, step: int) -> None:
        """Load a state to make this step from it."""
        config = self._config_of(step)
        if config != self._config:
            self._session.close()
            self._session, self._config = self._backend.open(config), config
        try:
            self._session.load(as_its_own(config, state))
        except (ValueError, KeyError) as error:
            raise UserError(f"the candidate does not take the run's state: {error}") from error
        unseen = require_taken_over(self._session, config, state, f"the run's state after step {state.step}")
        if unseen:
            self.unseen.add(unseen)

    def _compare(self, record: StepRecord) -> None:
        self.steps_run += 1
        if found := differing_fields(self._recorded.get(record.step), asdict(record)):
            self.differences[record.step] = found


def differing_fields(then: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (field, then, now) where two records of a step differ; empty without a record to compare."""
    if then is None:
        return []
    return [(key, then.get(key), now[key]) for key in COMPARED if not same(then.get(key), now[key])]


def judged(evidence: Evidence, reference: Reference) -> Check:
    """Call `judge`. Raises UserError if the reference does not load the state, because the user can correct this."""
    try:
        return judge(evidence, reference)
    except UserError:
        raise
    except (ValueError, KeyError) as error:
        raise UserError(f"the reference does not take this state: {error}") from error


def _step(path: Path) -> int:
    step = checkpoint_step(path)
    assert step is not None
    return step
