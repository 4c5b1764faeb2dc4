"""Judge weights and optimizer state after later steps of the run (core/parity/evidence/later_steps.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from lockstep.core.arrays import Cut, shape_of
from lockstep.core.backend import Arrays, Gradients, StepRecord
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.graph import Shape
from lockstep.core.model.groups import moment_names
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.later_steps import Moved, as_later_steps, state_before
from lockstep.core.parity.judge.amaxes import STAGE as AMAXES
from lockstep.core.parity.judge.update import Updated
from lockstep.core.parity.measures.compare import Reference, exact
from lockstep.core.parity.measures.drawn_part import parts_of_all
from lockstep.core.parity.measures.verdict import Finding
from lockstep.core.train.fp8_amax import CASTS, PREFIX, key, layers
from lockstep.core.train.skipped_steps import is_made, scalars_after


def later_updates(evidence: Evidence, reference: Reference) -> Iterator[Finding]:
    """Compare moments and update of each later step with those that follow from its gradients, state and coefficient.

    A step with a wrong number or wrong names is skipped here. Its record, or the first step's own gradients, report it.
    """
    config, moved = reference.config, {one.number: one for one in evidence.moved}
    # The sums over a run's checks include only steps of the run itself.
    of_one = replace(reference, over_steps=None)
    for suffix, (number, record) in as_later_steps(evidence.later, config).items():
        of_step, kept = moved.get(number), parts_of_all(config, number - 1)
        if of_step is None or record.step != number or not is_made(config, record.loss, record.grad_norm):
            continue
        if not _is_whole(of_step, kept, moment_names(config)):
            continue
        as_step = _as_step(evidence, of_step, record, config)
        note = f"made again as step {number:,} of the run"
        for name, part in kept.items():
            for found in Updated(as_step, of_one, name, part).findings():
                words = "; ".join(one for one in (note, found.note) if one)
                yield replace(found, tap=f"{found.tap}{suffix}", note=words)


def later_scalars(evidence: Evidence, reference: Reference) -> Iterator[Finding]:
    """Compare loss scale, counts and amax history after each later step with the rule's, from the state before it.

    The newest amaxes are taken from the state after the step.
    """
    config, moved = reference.config, {one.number: one for one in evidence.moved}
    for suffix, (number, record) in as_later_steps(evidence.later, config).items():
        if number not in moved:
            continue
        before = state_before(evidence.after, number, config).scalars
        after, made = moved[number].after.scalars, is_made(config, record.loss, record.grad_norm)
        seen = {name: tuple(after.get(key(name, cast, 0), np.nan) for cast in CASTS) for name in layers(config)}
        due = scalars_after(config, before, made, seen)
        note = f"made again as step {number:,} of the run"
        amaxes = [name for name in due if name.startswith(PREFIX)]
        for stage, tap, names in ((AMAXES, "history", amaxes), ("loss_scale", "loss_scale", due.keys() - amaxes)):
            wrong = sorted(name for name in names if after.get(name) != due[name])
            words = ", ".join([note, *wrong[:5]])
            if names:
                yield exact(stage, f"{tap}{suffix}", len(wrong), len(names), "the rule, from the state before", words)


def _is_whole(moved: Moved, kept: Mapping[str, tuple[slice, Shape]], kinds: Mapping[str, list[str]]) -> bool:
    """Return whether every part is there and has its shape."""

    def has(arrays: Arrays, names: list[str]) -> bool:
        return all(name in arrays and shape_of(arrays, name) == kept[name][1] for name in names if name in kept)

    weights = [moved.grads, moved.after.params]
    moments = {kind: moved.after.optimizer.get(kind, {}) for kind in kinds}
    return all(has(one, list(kept)) for one in weights) and all(has(moments[kind], kinds[kind]) for kind in kinds)


def as_step_of(tap: str, evidence: Evidence, config: RunConfig) -> tuple[str, Evidence, slice, Shape] | None:
    """Return the later step that a finding is about; None if the finding is about the step itself.

    Returns the tap without its suffix, evidence in which the later step is the step, and the judged part of the
    parameter (slice and shape).
    """
    moved = {one.number: one for one in evidence.moved}
    for suffix, (number, record) in as_later_steps(evidence.later, config).items():
        if number in moved and tap.endswith(suffix):
            found = tap.removesuffix(suffix)
            part = parts_of_all(config, number - 1)[found.rpartition("/")[2]]
            return found, _as_step(evidence, moved[number], record, config), *part
    return None


def _as_step(evidence: Evidence, moved: Moved, record: StepRecord, config: RunConfig) -> Evidence:
    """Return evidence in which a later step is the step, for `Updated`, which reads only the update."""
    starts = {name: where.start for name, (where, _) in parts_of_all(config, moved.number - 1).items()}
    optimizer = {kind: Cut(arrays, starts) for kind, arrays in moved.after.optimizer.items()}
    return replace(
        evidence,
        before=state_before(evidence.after, moved.number, config),
        after=replace(moved.after, params=Cut(moved.after.params, starts), optimizer=optimizer),
        stepped=Gradients(np.empty(0), 0.0, Cut(moved.grads, starts)),
        record=record,
    )
