"""Plant known faults in a trainer one by one and judge each as a check judges a step."""

from __future__ import annotations

import difflib
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.core.errors import UserError
from lockstep.core.run.ranks import ONE, Ranks
from lockstep.scripts.shared.backends import REFERENCE, TRAINER, on_its_device, open_named
from lockstep.scripts.shared.failures import in_one_line
from lockstep.scripts.shared.peers import judge_of
from lockstep.scripts.shared.scoreboard import HONEST, Row, said_of

if TYPE_CHECKING:
    from lockstep.core.backend import Backend, Batch, Session
    from lockstep.core.config.schema import RunConfig
    from lockstep.core.parity.evidence.evidence import Evidence
    from lockstep.core.parity.measures.compare import Reference
    from lockstep.core.parity.measures.verdict import Check
    from lockstep.core.run.data import RunData

HONEST_STEPS = 3


class Kept:
    """A backend that opens each configuration once, because compiling a reference's programs is most of its cost.

    Sessions are shared: a caller loads its state into the session first, as every check does.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend, self._sessions = backend, dict[str, "Session"]()
        self.name = backend.name

    def open(self, config: RunConfig) -> Session:
        """Return the session of this configuration; open it the first time."""
        key = config.model_dump_json()
        if key not in self._sessions:
            self._sessions[key] = self._backend.open(config)
        return self._sessions[key]

    def describe(self, config: RunConfig) -> Any:
        """Return the backend's own description."""
        return self._backend.describe(config)


class Data(Protocol):
    """The batches of a run, as `RunData` of core/run/data.py has them."""

    def batch(self, step: int) -> Batch:
        """Return the batch of optimizer step `step`, from 1."""
        ...


@dataclass
class Bench:
    """A bench for faults under a recipe: a configuration, its data, the reference, and the honest trainer's losses."""

    config: RunConfig
    data: Data
    backend: Backend
    honest: Backend
    causes: str = "promised"
    honest_name: str = HONEST
    _reference: Reference | None = None
    _losses: list[float] = field(default_factory=list)

    @property
    def reference(self) -> Reference:
        """Return twin and truth; open them the first time."""
        from lockstep.core.parity.measures.compare import Reference

        if self._reference is None:
            self._reference = Reference.open(self.backend, self.config)
        return self._reference

    def honest_row(self) -> Row:
        """Judge the honest trainer as the faults are judged: every check must agree."""
        row = Row(self.honest_name, self._recipe, "", None, None, 1, HONEST_STEPS, None, None)
        started = time.perf_counter()
        row = self._judged(row, self.honest, lambda batches: batches, HONEST_STEPS, "none")
        return replace(row, seconds=time.perf_counter() - started, commit=self._commit)

    def row(self, fault: Any) -> Row:
        """Plant one fault and judge it; an exception becomes the row's error."""
        origin = fault.origin(self.config.model.layers)
        row = Row(
            fault.name,
            self._recipe,
            fault.mechanism,
            fault.number,
            origin,
            fault.first_step,
            fault.within,
            fault.loss_moves_less_than,
            fault.cause if self.causes != "none" else None,
            "; ".join([*([fault.note] if fault.note else []), *_settings_in_words(fault.settings)]),
        )
        last = fault.first_step + fault.within - 1
        started = time.perf_counter()
        try:
            row = self._judged(row, fault.make(), fault.loader or (lambda batches: batches), last, self.causes)
        except Exception as error:  # a fault may break more than it declares; the others are still tried
            row = replace(row, error=in_one_line(error))
        return replace(row, seconds=time.perf_counter() - started, commit=self._commit)

    @cached_property
    def _commit(self) -> str:
        from lockstep.scripts.shared.startup_banner import git_commit

        return git_commit() or ""

    @property
    def _recipe(self) -> str:
        from lockstep.core.parity.measures import calibrated_bounds

        return calibrated_bounds.recipe_of(self.config)

    def _judged(
        self, row: Row, backend: Backend, loader: Callable[[Any], Callable[[int], Any]], last: int, causes: str
    ) -> Row:
        import torch

        from lockstep.core.parity.diagnose.recheck_rows import recheck_rows
        from lockstep.core.parity.evidence.gather import gather
        from lockstep.core.parity.judge.judge import judge
        from lockstep.core.parity.modes.side_by_side import records_norms

        torch._dynamo.reset()
        # A session and its programs refer to each other: without a collection those of many faults stay in memory.
        gc.collect()
        reference = self.reference.over_a_run() if last > HONEST_STEPS else self.reference
        session = backend.open(self.config)
        handed = loader(self.data.batch)
        for step in range(1, last + 1):
            due = self.data.batch(step).digest()
            norms = records_norms(session, self.config, step)
            evidence = gather(session, self.config, handed(step), norms=norms, due=due, ahead=False)
            evidence, check = recheck_rows(session, self.config, evidence, judge(evidence, reference), reference)
            row = replace(row, checks=step)
            if step == row.first_step and row.expected is not None:
                row = replace(row, loss_moved=self._moved(evidence.record.loss, step))
            if check.verdict == "could_not":
                return replace(row, error=f"step {step}: nothing was compared")
            if check.verdict == "disagreed":
                # The check's own step number comes from the candidate, which may count wrongly.
                row = replace(said_of(check, row), step=step)
                cause = self._cause(backend, session, evidence, check, row, causes)
                return replace(row, cause=cause)
        return row

    def _cause(
        self, backend: Backend, session: Session, evidence: Evidence, check: Check, row: Row, causes: str
    ) -> str:
        """Return the decoder's note or, with `causes`, whether the step repeats and which change removes the fault."""
        from lockstep.core.capabilities import ranks_of
        from lockstep.core.parity.diagnose.cause import find_cause
        from lockstep.core.parity.diagnose.disagreement import repeated

        note = check.origin.note if check.origin else ""
        wanted = causes == "all" or (causes == "promised" and row.promised_cause and row.promised_cause not in note)
        if not wanted:
            return note
        try:
            found = repeated(session, evidence, check, self.config)
            repeat = ranks_of(session).of_first(lambda: found)
            words = [repeat.why]
            if repeat.happened is not False:
                words.append(find_cause(backend, self.backend, self.config, evidence, check).words)
        except Exception as error:  # the verdict stands without a cause
            words = [f"the search for the cause failed: {in_one_line(error)}"]
        return "; ".join(words)

    def _moved(self, loss: float, step: int) -> float | None:
        """Return |loss − honest| / honest of a step, both trained from initial weights; None if it is not finite."""
        if not self._losses:
            session = self.honest.open(self.config)
            for number in range(1, HONEST_STEPS + 1):
                self._losses.append(session.step(self.data.batch(number)).loss)
        right = self._losses[step - 1]
        moved = abs(loss - right) / right
        return moved if math.isfinite(moved) else None


def run(
    config_of: Callable[[str], RunConfig],
    data: Callable[[RunConfig], RunData],
    recipes: Sequence[str],
    names: Sequence[str] = (),
    causes: str = "promised",
    kept: Sequence[Row] = (),
    on_ranks: Callable[[str, Sequence[str], int], Sequence[Row]] | None = None,
    ranks: Ranks = ONE,
) -> Iterator[Row]:
    """Yield the row of each fault under each recipe, the honest trainer first; rows in `kept` are not run again.

    Faults that need settings of their own come after the others, each set of settings with its honest trainer.
    on_ranks: returns the rows, by name, of a recipe's faults that need this many ranks. Without it, this process is one
    of those ranks, and only such faults have rows.
    """
    faults = chosen(names)
    done = {(row.name, row.recipe): row for row in kept if not row.error}
    for recipe in recipes:
        plain = on_its_device(config_of(recipe), open_named(TRAINER))
        of_settings: dict[str, list[Any]] = {HONEST: []}
        for fault in faults:
            if recipe in fault.recipes:
                of_settings.setdefault(honest_name(fault), []).append(fault)
        for name, alike in of_settings.items():
            config = configured(alike[0], plain) if alike else plain
            if config.train.ranks != ranks.count:
                missing = [fault.name for fault in alike if (fault.name, recipe) not in done]
                found = on_ranks(recipe, missing, config.train.ranks) if on_ranks and missing else ()
                done |= {(row.name, row.recipe): row for row in found}
                if on_ranks:
                    rows = [done.get((row, recipe)) for row in (name, *(fault.name for fault in alike))]
                    yield from (row for row in rows if row is not None)
                continue
            bench = Bench(
                config,
                data(config),
                judge_of(lambda: Kept(open_named(REFERENCE)), ranks),
                open_named(TRAINER),
                causes,
                name,
            )
            yield done.get((name, recipe)) or bench.honest_row()
            for fault in alike:
                yield done.get((fault.name, recipe)) or bench.row(fault)


def configured(fault: Any, config: RunConfig) -> RunConfig:
    """Return the run with the settings that a fault needs. Raises UserError if they contradict the run's own."""
    from pydantic import ValidationError

    try:
        return fault.configured(config)
    except ValidationError as error:
        why = "; ".join(one["msg"].removeprefix("Value error, ") for one in error.errors())
        said = ", ".join(_settings_in_words(fault.settings))
        raise UserError(f"{fault.name} is {said}, which the run's settings do not allow: {why}") from error


def honest_name(fault: Any) -> str:
    """Return the name of the honest trainer's row for a fault; faults with the same settings share it."""
    said = ", ".join(f"{key} = {text}" for key, text in fault.settings.items())
    return f"{HONEST}: {said}" if said else HONEST


def _settings_in_words(settings: Mapping[str, str]) -> list[str]:
    return [f"planted with {', '.join(f'{key} = {text}' for key, text in settings.items())}"] if settings else []


def chosen(names: Sequence[str]) -> list[Any]:
    """Return the faults of these names, or all without names. Raises UserError for an unknown name."""
    # pyproject.toml allows this import of tests: the collection is the only part of the tests that is installed.
    from lockstep.parity_tests.faults import FAULTS

    collection = list(FAULTS)
    by_name = {fault.name: fault for fault in collection}
    for name in names:
        if name not in by_name:
            near = difflib.get_close_matches(name, by_name, n=1)
            hint = f"did you mean {near[0]}?" if near else "the collection is lockstep.parity_tests.faults"
            raise UserError(f"command line: {name!r} is not a fault of the collection; {hint}")
    return [by_name[name] for name in names] if names else collection
