"""The sweep's study as Optuna keeps it: a journal of JSON lines in the folder, which Optuna's dashboard opens as well.

The journal is data: points are checked against the space, and what came of a trial is read from its run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import require_file
from lockstep.core.sweep.outcome import COMPLETE, PRUNED, Outcome
from lockstep.core.sweep.propose import as_parameters, distributions
from lockstep.core.sweep.space import Point, Varied

if TYPE_CHECKING:
    from optuna.storages import JournalStorage
    from optuna.study import Study

JOURNAL = "study.journal"
# A study's attribute: the identity of its sweep.
_SWEEP = "sweep"
_REMEDY = "put back the one of this sweep, or name another folder (--out)"


class Journal:
    """The studies of a sweep, one a width. The caller holds the folder's lock."""

    def __init__(self, folder: Path, varied: Sequence[Varied], identity: str) -> None:
        """Open the journal of a folder, or make it. Raises UserError if it is not what Optuna wrote.

        identity: the digest of the sweep's plan; a journal with another one is refused.
        """
        self.path, self._varied, self._identity = folder / JOURNAL, varied, identity
        self._studies: dict[str, Study] = {}
        require_file(self.path)
        try:
            _mend(self.path)
            self._storage = _open(self.path)
        except OSError as error:
            raise UserError(f"cannot open {self.path}: {error.strerror or error}") from error
        except Exception as error:  # Optuna raises whatever its reading of a damaged line meets with
            raise UserError(f"{self.path} is damaged: {type(error).__name__}: {error}; {_REMEDY}") from error

    def points(self, name: str) -> list[Point]:
        """Return the points of a study by number. Raises UserError if one does not lie in the space."""
        found: list[Point] = []
        for trial in self._study(name).get_trials(deepcopy=False):
            if not all(one.holds(str(trial.params.get(one.key, ""))) for one in self._varied):
                raise UserError(
                    f"{self.path}: trial {trial.number} of {name} does not lie in the search space; {_REMEDY}"
                )
            found.append({one.key: one.text_of(trial.params[one.key]) for one in self._varied})
        return found

    def add(self, name: str, point: Point) -> None:
        """Store a point as the next trial."""
        from optuna.trial import TrialState, create_trial

        made = create_trial(
            state=TrialState.RUNNING,
            params=as_parameters(self._varied, point),
            distributions=distributions(self._varied),
        )
        self._study(name).add_trial(made)

    def tell(self, name: str, number: int, outcome: Outcome) -> None:
        """Store the outcome of a trial; one that was stored already stays."""
        from optuna.trial import TrialState

        trial = self._study(name).get_trials(deepcopy=False)[number]
        if trial.state.is_finished():
            return
        states = {COMPLETE: TrialState.COMPLETE, PRUNED: TrialState.PRUNED}
        state = states.get(outcome.state, TrialState.FAIL)
        for step, loss in outcome.reports.items():
            self._storage.set_trial_intermediate_value(trial._trial_id, step, loss)
        self._storage.set_trial_user_attr(trial._trial_id, "outcome", outcome.state)
        if outcome.why:
            self._storage.set_trial_user_attr(trial._trial_id, "why", outcome.why)
        values = [outcome.value] if state == TrialState.COMPLETE and outcome.value is not None else None
        self._storage.set_trial_state_values(trial._trial_id, state, values)

    def _study(self, name: str) -> Study:
        if name not in self._studies:
            import optuna

            optuna.logging.set_verbosity(optuna.logging.ERROR)
            try:
                known = {study.study_name for study in self._storage.get_all_studies()}
                opened = optuna.load_study if name in known else optuna.create_study
                study = opened(storage=self._storage, study_name=name)
                if name not in known:
                    study.set_user_attr(_SWEEP, self._identity)
            except Exception as error:  # as above
                raise UserError(f"{self.path} is damaged: {type(error).__name__}: {error}; {_REMEDY}") from error
            # Journals of earlier versions name no sweep.
            if study.user_attrs.get(_SWEEP, self._identity) != self._identity:
                raise UserError(f"{self.path} is the journal of another sweep; {_REMEDY}")
            self._studies[name] = study
        return self._studies[name]


def _open(path: Path) -> JournalStorage:
    import warnings

    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The file backend holds no snapshot, the one thing that Optuna would unpickle.
        backend: Any = JournalFileBackend(str(path))
        return JournalStorage(backend)


def _mend(path: Path) -> None:
    """Remove what a kill left: a lock without a holder, and the beginning of a line, which the next would spoil."""
    for left in path.parent.glob(f"{path.name}.lock*"):
        left.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        raw = file.read()
        whole = raw.rfind(b"\n") + 1
        if raw[whole : whole + 1] not in (b"", b"{"):
            raise ValueError("it does not end like a journal")
        file.truncate(whole)
