"""Replay: judge a step later and elsewhere, from a capsule or from a run directory.

A capsule has the evidence of its check. The evidence is judged again without the candidate. Or the candidate runs the
step again from its state and batch, and everything is judged. A run directory has sketches of some steps and states of
some. If it has both for a step, the step *as the run made it* is judged end to end, without the candidate. If it has
only the state, the candidate runs the step again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from lockstep.core.backend import Backend, Batch, NotSupported, State
from lockstep.core.capabilities import ranks_of
from lockstep.core.checkpoint.taken_over import require_taken_over
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.parity.diagnose.fitting import with_fitting
from lockstep.core.parity.diagnose.recheck_rows import recheck_rows
from lockstep.core.parity.evidence import observations
from lockstep.core.parity.evidence.capsule import Capsule
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.place import of_all_ranks, store_for
from lockstep.core.parity.evidence.recorded import probe_of
from lockstep.core.parity.evidence.saved import open_evidence
from lockstep.core.parity.judge.judge import Reference, judge_observations
from lockstep.core.parity.measures.compare import exact
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.parity.modes.rerun import Rerun, StoredStates, differing_fields, judged
from lockstep.core.parity.reference.self_check import sound_reference
from lockstep.core.run.directory import RunDir
from lockstep.core.train.metrics import has_norms
from lockstep.core.train.skipped_steps import as_its_own

How = Literal["evidence", "sketches", "run again", "not covered"]


@dataclass(frozen=True)
class Replayed:
    """The result for one step.

    how: source of the verdict.
    check: the verdict; None if nothing could be judged.
    notes: what could not be done and why, in words.
    """

    step: int
    how: How
    check: Check | None
    notes: tuple[str, ...] = field(default=())


def judge_capsule(capsule: Capsule, reference: Backend, config: RunConfig | None = None) -> Replayed:
    """Judge the evidence in a capsule again, without the candidate.

    config: replaces the capsule's.
    Raises UserError if there is no evidence, if it is damaged, or if the reference does not load its state.
    """
    config = config or capsule.config
    if capsule.evidence is None:
        raise UserError(f"{capsule.path} holds no evidence: the candidate must run its step again")
    evidence = open_evidence(capsule.evidence)
    try:
        for batch in evidence.batches:
            batch.require_tokens_below(config.model.vocab_size)
    except ValueError as error:
        raise UserError(f"{capsule.evidence} is not valid content of a capsule: {error}") from error
    opened = sound_reference(reference, config)
    try:
        check = with_fitting(judged(evidence, opened), evidence, opened, reference)
    finally:
        opened.close()
    return Replayed(capsule.step, "evidence", check, _not_shown(capsule))


def replay_capsule(
    capsule: Capsule, candidate: Backend, reference: Backend, config: RunConfig | None = None
) -> Replayed:
    """Run the capsule's step again with `candidate` and judge it like the original.

    config: replaces the capsule's, on a machine without its device.
    Raises UserError if candidate or reference does not load its state.
    """
    config = config or capsule.config
    opened = sound_reference(reference, config)
    session = candidate.open(config)
    try:
        try:
            session.load(capsule.state)
        except (ValueError, KeyError, NotSupported) as error:
            raise UserError(f"the candidate does not take the capsule's state: {error}") from error
        unseen = require_taken_over(session, config, capsule.state, "the capsule")
        ranks = ranks_of(session)
        with store_for(config, ranks) as store:
            due = capsule.about.get("due")
            norms = has_norms(capsule.record.metrics)
            evidence = gather(session, config, capsule.batch, capsule.given_probe, norms, due, store=store)
            evidence = of_all_ranks(evidence, store, ranks)
            evidence, check = recheck_rows(session, config, evidence, judged(evidence, opened), opened)
            check = with_fitting(check, evidence, opened, reference)
    finally:
        session.close()
        opened.close()
    notes = [unseen] if unseen else []
    if differ := differing_fields(asdict(capsule.record), asdict(evidence.record)):
        notes.append(f"the step's record differs from the packed one: {in_words(differ)}")
    return Replayed(capsule.step, "run again", check, (*notes, *_not_shown(capsule)))


def _not_shown(capsule: Capsule) -> tuple[str, ...]:
    """Describe faults that a check over steps detected, which a check of the capsule's step alone cannot detect."""
    packed, stages = capsule.verdict.get("origin"), capsule.verdict.get("stages", [])
    if packed and any(line.get("scope") == "over_steps" and not line.get("ok") for line in stages):
        return (f"bias over steps, as at {packed['tap']}: one step does not show it",)
    return ()


def replay_run(
    run: RunDir,
    batch: Callable[[int], Batch],
    candidate: Callable[[], Backend],
    reference: Backend,
    step: int | None = None,
    elsewhere: RunConfig | None = None,
) -> Iterator[Replayed]:
    """Judge every step that the run directory allows, or only `step`.

    batch: the data order, step → batch.
    candidate: opens the candidate; called when a step has to be run again.
    elsewhere: the run's configuration with another device for running steps again; None for the run's own.
    Each step is judged with the settings that were in force then. If `step` has no stored state, the candidate runs to
    it from the nearest earlier one. Raises UserError if there is nothing at `step`, or if it is damaged.
    """
    states, recorded = StoredStates(run), {line["step"]: line for line in run.records()}
    if not recorded:
        raise UserError(f"{run.path} has no recorded step: there is nothing to replay")
    last = max(recorded)
    sketched = [n for n in sorted(run.observations()) if n <= last]
    after_states = [done + 1 for done in states.steps if done + 1 <= last]
    if step is not None and not 1 <= step <= last:
        raise UserError(f"{run.path} has no step {step}: it recorded steps 1 to {last}")
    opened = References(reference, run.config_at)
    again = _Again(run, batch, candidate, opened, config_of_steps(run, elsewhere))
    try:
        for number in sorted({*sketched, *after_states}) if step is None else [step]:
            has_state = number - 1 in states.steps
            if number in sketched and has_state:
                yield _from_sketches(run, number, states.load(number - 1), batch(number), recorded, opened.of(number))
            elif number in sketched and step is None:
                why = f"sketches, but no checkpoint of step {number - 1}: --step {number} runs the candidate up to it"
                yield Replayed(number, "not covered", None, (why,))
            elif number in sketched:
                yield again.sketches(number, recorded)
            else:
                yield again.step(number, "" if has_state else f"no checkpoint of step {number - 1}")
    finally:
        again.close()
        opened.close()


def config_of_steps(run: RunDir, elsewhere: RunConfig | None) -> Callable[[int], RunConfig]:
    """Return the run's configuration by step, on the device of `elsewhere` unless it is None."""
    if elsewhere is None:
        return run.config_at
    return lambda step: run.config_at(step, elsewhere.device)


class References:
    """References for the configurations under which steps are judged. Each is opened at its first use."""

    def __init__(self, backend: Backend, config: Callable[[int], RunConfig]) -> None:
        self._backend, self._config = backend, config
        self._opened: list[Reference] = []

    def of(self, step: int) -> Reference:
        """Return the reference for a step. Raises UserError if the reference fails its self-check."""
        config = self._config(step)
        found = next((opened for opened in self._opened if opened.config == config), None)
        if found is None:
            found = sound_reference(self._backend, config)
            self._opened.append(found)
        return found

    def like(self, config: Callable[[int], RunConfig]) -> References:
        """Return references of the same backend for other configurations."""
        return References(self._backend, config)

    def close(self) -> None:
        """Close the opened references."""
        for opened in self._opened:
            opened.close()


def in_words(differences: list[tuple[str, Any, Any]]) -> str:
    """Describe differences, as `loss 5.1 then, 5.2 now`."""
    return ", ".join(
        f"another {key}" if key == "digest" else f"{key} {then!r} then, {now!r} now" for key, then, now in differences
    )


def other_batch(step: int, size: int, note: str = "") -> Check:
    """Build the verdict on a step that consumed another batch than the data order gives."""
    basis = "equal bits, by SHA-256, with the data order at this step"
    missing = "comparisons that need the batch: the consumed one is unknown"
    return Check(step, (exact("tokens", "order", 1, size, basis, note),), (missing,))


def _from_sketches(
    run: RunDir, step: int, state: State, batch: Batch, recorded: Mapping[int, Mapping[str, Any]], reference: Reference
) -> Replayed:
    """Judge the step as the run made it, from its sketches and the state before it."""
    if step not in recorded:
        return Replayed(step, "not covered", None, ("its record is lost: its sketches may be of another branch",))
    found, about = observations.load(run.observations()[step])
    if about["batch"] != recorded[step]["digest"]:
        return Replayed(step, "not covered", None, ("its sketches are of another branch of the run",))
    if about["batch"] != batch.digest():
        return Replayed(step, "sketches", other_batch(step, batch.tokens.size))
    # Sketches of earlier versions are of sequences without an added end of text.
    choices = [probe_of(one, reference.config) for one in (batch, replace(batch, end_of_text=None))]
    tapped = next((one for one in choices if one.digest() == about["probe"]), choices[0])
    # The record has the step's own gradients, or those of a separate micro-batch.
    probe = batch if about["probe"] == about["batch"] else tapped
    state = as_its_own(reference.config, state)
    if about["probe"] != probe.digest():
        return Replayed(step, "not covered", None, ("its sketches are of sequences that this version does not select",))
    try:
        return Replayed(step, "sketches", judge_observations(found, about, state, probe, tapped, reference))
    except NotSupported as reason:
        return Replayed(step, "not covered", None, (f"its sketches: {reason}",))
    except UserError:
        raise
    except (ValueError, KeyError) as error:
        raise UserError(f"the reference does not take this run's state: {error}") from error


class _Again:
    """The candidate, opened at its first use."""

    def __init__(
        self,
        run: RunDir,
        batch: Callable[[int], Batch],
        candidate: Callable[[], Backend],
        opened: References,
        config: Callable[[int], RunConfig],
    ) -> None:
        self._run, self._batch, self._candidate, self._config = run, batch, candidate, config
        # The twin follows the attention kernel of the candidate's device.
        self._of_run, self._here = opened, opened.like(config)
        self._rerun: Rerun | None = None

    def step(self, step: int, why: str) -> Replayed:
        """Run the step again and judge it."""
        rerun = self._opened()
        same = self._config(step) == self._run.config_at(step)
        check, _ = rerun.check(step, (self._of_run if same else self._here).of(step))
        notes = ["its sketches: none were recorded", *([why] if why else []), *self._said(rerun, step)]
        notes += sorted(rerun.unseen)
        return Replayed(step, "run again", check, tuple(notes))

    def sketches(self, step: int, recorded: Mapping[int, Mapping[str, Any]]) -> Replayed:
        """Run to the step, and judge its sketches if all steps before it have the recorded results.

        Otherwise run it again.
        """
        rerun = self._opened()
        state = rerun.state(step - 1)
        if said := self._said(rerun, step - 1):
            return self.step(step, said[0])
        return _from_sketches(self._run, step, state, self._batch(step), recorded, self._of_run.of(step))

    def close(self) -> None:
        """Close what this object opened."""
        self._here.close()
        if self._rerun is not None:
            self._rerun.close()

    def _opened(self) -> Rerun:
        if self._rerun is None:
            self._rerun = Rerun(self._run, self._candidate(), self._config, self._batch)
        return self._rerun

    def _said(self, rerun: Rerun, step: int) -> list[str]:
        """Describe the first difference between the last stored state and this step."""
        first = rerun.first_difference(rerun.loaded)
        if first is None or first > step:
            return []
        return [f"step {first} differs from its record ({in_words(rerun.differences[first])})"]
