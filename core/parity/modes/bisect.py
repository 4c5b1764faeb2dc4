"""Bisection: find the first bad step of a run, its origin and its cause.

A fault is assumed to be persistent: after the first bad step, every step is bad. A step is checked thoroughly, from the
run's state before it. The candidate runs without checks from the nearest earlier checkpoint, or from the initial
weights. Checks that the run recorded narrow the interval without extra work. Every new record is compared with the
run's, bit by bit: a difference does not follow from the run's program and state alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep.core.backend import Backend, Batch
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.parity.diagnose.cause import Cause, find_cause
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.measures.verdict import Check, Finding, Outcome, overall
from lockstep.core.parity.modes.replay import References, config_of_steps, in_words, other_batch
from lockstep.core.parity.modes.rerun import Rerun
from lockstep.core.run.directory import RunDir

DOES_NOT_REPEAT = (
    "something there does not repeat: hardware, a race, another machine, other versions, or something "
    "outside the state that the session shows, which loading resets. Run the same steps again: what recurs at the same "
    "step with the same bits is no hardware"
)


@dataclass(frozen=True)
class Bisection:
    """The result of a bisection.

    first_bad_step: None if there is none.
    check: the verdict on this step; None if only the run's record shows the fault.
    cause: the changed setting under which the origin disappears; None without an origin.
    checks: every check that was made, by step.
    differs_at: the first step with another record than the run's, or None.
    steps_run: number of steps that were run again.
    notes: assumptions and contradictions, in words.
    """

    first_bad_step: int | None
    check: Check | None
    cause: Cause | None
    checks: dict[int, Check]
    differs_at: int | None
    steps_run: int
    notes: tuple[str, ...]

    @property
    def origin(self) -> Finding | None:
        """The first broken link of the first bad step."""
        return self.check.origin if self.check else None

    @property
    def verdict(self) -> Outcome:
        """The verdict: `disagreed` if there is a bad step."""
        return "disagreed" if self.first_bad_step is not None else overall(list(self.checks.values()))


def bisect_run(
    run: RunDir,
    batch: Callable[[int], Batch],
    candidate: Backend,
    reference: Backend,
    progress: Callable[[str], None],
    config: RunConfig | None = None,
    with_cause: bool = True,
) -> Bisection:
    """Find the first bad step of `run` among its recorded steps.

    batch: the data order, step → batch.
    progress: called with one line for each check.
    config: the run's configuration with another device; None for the run's own.
    with_cause: find the cause too.
    Each step is judged with the settings that were in force then. Raises UserError if the run recorded no step, or if
    candidate or reference do not load its states.
    """
    here = config_of_steps(run, config)
    recorded = {line["step"]: line for line in run.records()}
    if not recorded:
        raise UserError(f"{run.path} has no recorded step: there is nothing to bisect")
    rerun = Rerun(run, candidate, here, batch)
    opened = References(reference, here)
    search = _Search(rerun, opened, batch, progress)
    other_data = _first_other_batch(recorded, batch)
    verdicts = _verdicts(run)
    for step in [step for step, line in verdicts.items() if _only_over_steps(line)]:
        search.notes.append(f"step {step}: the run's check detected a bias over steps, which no single step shows")
        del verdicts[step]
    try:
        search.run(max(recorded), verdicts, other_data)
    finally:
        rerun.close()
        opened.close()
    cause = None
    if with_cause and search.evidence is not None and search.bad is not None:
        progress(f"step {search.bad}: searching for the cause")
        cause = find_cause(candidate, reference, here(search.bad), search.evidence, search.checks[search.bad])
    first = rerun.first_difference()
    notes = [*search.notes, *sorted(rerun.unseen)]
    if first is not None and (other_data is None or first < other_data):
        resumed = [line["step"] for line in run.info.get("resumes", []) if first - 2 <= line["step"] < first]
        after = f" (the run was resumed from step {resumed[-1]})" if resumed else ""
        notes.append(f"step {first}{after}: {in_words(rerun.differences[first])}; {DOES_NOT_REPEAT}")
    check = search.checks.get(search.bad) if search.bad is not None else None
    return Bisection(
        search.bad,
        check if check is not None and check.verdict == "disagreed" else None,
        cause,
        search.checks,
        first,
        rerun.steps_run,
        tuple(notes),
    )


@dataclass
class _Search:
    """The search of a bisection. evidence: of the first bad step so far."""

    rerun: Rerun
    references: References
    batch: Callable[[int], Batch]
    progress: Callable[[str], None]
    checks: dict[int, Check] = field(default_factory=dict)
    evidence: Evidence | None = None
    bad: int | None = None
    notes: list[str] = field(default_factory=list)

    def run(self, last: int, recorded: dict[int, dict[str, Any]], other_data: int | None) -> None:
        """Find the first bad step among 1 … last.

        recorded: the run's own checks by step.
        other_data: the first step with another batch than the data order gives, or None.
        """
        accused = sorted(step for step, line in recorded.items() if line["verdict"] == "disagreed" and step <= last)
        agreed = sorted(step for step, line in recorded.items() if line["verdict"] == "agreed" and step <= last)
        if other_data is not None:
            # Known from the records alone. The steps before it still have to be searched.
            self.checks[other_data] = other_batch(other_data, self.batch(other_data).tokens.size)
            self.bad = other_data
            self.progress(f"step {other_data}: the run consumed another batch than the data order prescribes")
        ends = [step for step in (*accused[:1], last) if self.bad is None or step < self.bad]
        if self.bad is not None and self.bad > 1:
            ends.append(self.bad - 1)
        high = next((step for step in dict.fromkeys(ends) if self._is_bad(step)), None)
        if high is None:
            self._nothing_bad(accused, last, other_data)
            return
        self._search(max([step for step in agreed if step < high], default=0), high)
        self._scan_if_it_comes_and_goes(agreed, recorded)

    def _search(self, low: int, high: int) -> None:
        """Halve (low, high]. If `low` comes from the run's own checks, it is checked at the end."""
        while True:
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if self._is_bad(middle) else (middle, high)
            if low == 0 or low in self.checks or not self._is_bad(low):
                return
            self.notes.append(f"step {low}: a check of the run agreed; a thorough one does not")
            low, high = 0, low

    def _is_bad(self, step: int) -> bool:
        if step not in self.checks:
            check, evidence = self.rerun.check(step, self.references.of(step))
            self.checks[step] = check
            origin = check.origin
            where = f", origin {origin.stage} ({origin.phase}) at {origin.tap}" if origin else ""
            self.progress(f"step {step}: {check.verdict.replace('_', ' ')}{where}")
            if check.verdict == "disagreed" and (self.bad is None or step < self.bad):
                self.bad, self.evidence = step, evidence
        return self.checks[step].verdict == "disagreed"

    def _nothing_bad(self, accused: list[int], last: int, other_data: int | None) -> None:
        if other_data is not None:
            return
        if accused:
            self.bad = accused[0]
            self.notes.append(
                f"step {accused[0]}: a check of the run disagreed; run again, it agrees: {DOES_NOT_REPEAT}"
            )
        elif last in self.checks:
            self.notes.append(f"step {last}, the last, is clean: a fault that came and went before it is not excluded")

    def _scan_if_it_comes_and_goes(self, agreed: list[int], recorded: dict[int, dict[str, Any]]) -> None:
        """Check every earlier step if a later step is clean, because then a bad step may precede a clean one."""
        assert self.bad is not None
        own = [step for step, check in self.checks.items() if step > self.bad and check.verdict == "agreed"]
        seen = [step for step in agreed if step > self.bad and self._examined(recorded[step])]
        if not own and not seen:
            return
        first_clean = min(own + seen)
        start = max([step for step in agreed if step < self.bad], default=0) + 1
        self.notes.append(
            f"not persistent: step {first_clean} is clean again; every step from {start} to {self.bad} was checked"
        )
        for step in range(start, self.bad):
            if self._is_bad(step):
                return

    def _examined(self, line: dict[str, Any]) -> bool:
        """Return whether a recorded check examined the link that is broken now."""
        origin = self.checks[self.bad].origin if self.bad is not None else None
        return origin is not None and any(
            (found.get("stage"), found.get("phase"), found.get("layer"), found.get("scope"))
            == (origin.stage, origin.phase, origin.layer, origin.scope)
            for found in line.get("stages", [])
        )


def _verdicts(run: RunDir) -> dict[int, dict[str, Any]]:
    """Return the run's own checks by step."""
    return {line["step"]: line for line in run.checks() if line.get("verdict") in ("agreed", "disagreed")}


def _only_over_steps(line: dict[str, Any]) -> bool:
    """Return whether a recorded check shows a fault only over several checks."""
    scopes = {found.get("scope") for found in line.get("stages", []) if not found.get("ok")}
    return scopes == {"over_steps"}


def _first_other_batch(recorded: dict[int, dict[str, Any]], batch: Callable[[int], Batch]) -> int | None:
    """Return the first step whose record has another batch than the data order gives; None if there is none."""
    return next((step for step in sorted(recorded) if recorded[step]["digest"] != batch(step).digest()), None)
