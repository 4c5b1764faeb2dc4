"""Judge one step of a user's loop from all that was read of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.core.backend import Arrays
from lockstep.core.errors import UserError
from lockstep.core.parity.measures.verdict import Finding
from lockstep.core.parity.watch.cause import cause_of
from lockstep.core.parity.watch.clipping import clipping
from lockstep.core.parity.watch.findings import exact
from lockstep.core.parity.watch.judge import Judge
from lockstep.core.parity.watch.library_rules import RULES, rule_of
from lockstep.core.parity.watch.limits import Limits, Precision
from lockstep.core.parity.watch.listen import Pending
from lockstep.core.parity.watch.settings import Settings
from lockstep.core.parity.watch.snapshot import Answer, ShowsStages, Snapshot, StepReference, batch_as, outside, renamed
from lockstep.core.parity.watch.step import Step
from lockstep.core.parity.watch.together import owner_of
from lockstep.core.parity.watch.uncovered import Guard, Uncovered
from lockstep.core.parity.watch.update import check_declared, hyperparameters, skipped_by_scaler, update
from lockstep.core.parity.watch.update_rules import Rule


class Checker:
    """A judge of whole steps: its comparisons, bounds and reference.

    own: the reference is the model itself.
    judged: whether any check so far judged gradients.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        reference: Any,
        settings: Settings,
        dtypes: Mapping[str, str],
        precision: Precision,
        guard: Guard,
    ) -> None:
        check_declared(settings.declared, optimizers)
        self._renamed = renamed(settings.names, list(dtypes))
        self._optimizers, self._reference, self._settings = optimizers, reference, settings
        self._dtypes, self._precision, self._guard = dtypes, precision, guard
        self.own = isinstance(reference, StepReference) and reference.own
        self.judged = False
        limits = Limits.nearest(precision)
        if settings.bounds:
            limits = limits.given(settings.bounds)
        self._judge = Judge(precision, None if settings.calibrate else limits, own=self.own)
        given = RULES[settings.rule] if isinstance(settings.rule, str) else settings.rule
        self._rules = [given or rule_of(optimizer) for optimizer in optimizers]

    def check(self, pending: Pending, params: Mapping[str, Any], findings: list[Finding]) -> str | None:
        """Append the findings of a step to `findings`. Returns the common cause of what broke, or None.

        params: the model's parameters by name.
        """
        guard, uncovered = self._guard, pending.uncovered
        step = self._finish(pending, params)
        findings += pending.between
        findings += pending.observed.findings if pending.observed else ()
        skipped = skipped_by_scaler(step)
        # The update comes first, so that its tensors are released before the reference allocates memory.
        uncovered_late = Uncovered()
        late = self._update(step, pending, params, skipped, uncovered_late)
        for read in (step.before, step.after, pending.before, pending.after):
            read.clear()
        compared: list[Finding] = []
        truth: Answer | None = None
        calibrating = self._judge.limits is None
        left_out = pending.stale
        if skipped:
            left_out = set(params)
            uncovered.skip("gradients", skipped)
        elif left_out:
            uncovered.skip("gradients", "a closure computed some after another optimizer had changed the weights")
        if "loss and gradients" not in uncovered.skipped:
            with guard.link(uncovered, "loss and gradients"):
                truth, twin = self._answers(step.params, pending.batch, uncovered)
        if isinstance(self._reference, ShowsStages) and not skipped:
            with guard.link(uncovered, "stages"):
                findings += self._reference.stages(step.number, step.params, self._precision, uncovered)
        if truth is not None:
            with guard.link(uncovered, "gradients"):
                clip_norm = self._settings.clip_norm
                compared.extend(self._judge.forward_backward(step, truth, twin, clip_norm, uncovered, left_out))
        findings += compared
        findings += late
        uncovered.extend(uncovered_late)
        if self._settings.every > 1:
            uncovered.append("weights and optimizer state between steps that are not checked (every=1 compares them)")
        if self._settings.weights_change:
            uncovered.append("weights that the loop changes outside optimizer.step() (weights_change=True)")
        judged = any(f.stage == "gradients" and f.tap != "names" for f in compared)
        measured = truth is not None and "gradients" not in uncovered.skipped
        if calibrating and measured and all(f.ok for f in findings):
            findings[:] = self._calibrated(uncovered)
        else:
            self.judged = self.judged or (judged and not calibrating)
        cause = None
        if truth is not None:
            with guard.link(uncovered, "cause"):
                cause = cause_of(step, truth, compared, self._precision)
                broken = [f.tap for f in compared if f.stage == "gradients" and not f.ok and f.tap in step.grads]
                cause = cause or next((f.note for f in findings if f.tap == "ranks" and not f.ok), None)
                if where := owner_of(broken, step.grads, twin.grads, pending.layouts):
                    cause = f"{cause}; {where}" if cause else where
        return cause

    def _finish(self, pending: Pending, params: Mapping[str, Any]) -> Step:
        """Combine all that was read into a `Step`."""
        before, after, fired, rules = list[Snapshot](), list[Snapshot](), list[int](), list[Rule | None]()
        kinds: list[str] = []
        for i, (first, last) in enumerate(zip(pending.before, pending.after, strict=True)):
            if first is None or last is None:
                continue
            before.append(first)
            after.append(last)
            fired.append(pending.fired[i])
            rules.append(self._rules[i])
            kinds.append(type(self._optimizers[i]).__name__)
        frozen = frozenset(name for name, p in params.items() if not p.requires_grad)
        return Step(
            pending.number, pending.loss, pending.outputs, pending.params, pending.grads,
            before, after, fired, frozen, self._dtypes, rules, kinds,
        )  # fmt: skip

    def _update(
        self, step: Step, pending: Pending, params: Mapping[str, Any], skipped: str, uncovered: Uncovered
    ) -> list[Finding]:
        """Return the findings of clipping, hyperparameters and the update."""
        guard, findings = self._guard, list[Finding]()
        with guard.link(uncovered, "update"):
            alone, strangers = outside(params, self._optimizers)
            basis = "every trainable parameter is in an optimizer's group"
            findings.append(exact("update", "names", len(alone), len(params), basis, ", ".join(alone[:5]), "update"))
            if strangers:
                uncovered.append(f"{strangers} tensors that the optimizer holds and the model does not")
        all_read = len(step.before) == len(self._optimizers) and not pending.stale
        if not skipped and all_read and all(count == 1 for count in step.fired):
            with guard.link(uncovered, "clip_coefficient"):
                findings.extend(clipping(step, self._settings.clip_norm))
        with guard.link(uncovered, "hyperparameters"):
            findings.extend(hyperparameters(step, self._settings.declared, uncovered))
        with guard.link(uncovered, "update"):
            findings.extend(update(step, skipped, uncovered))
        return findings

    def _calibrated(self, missing: Uncovered) -> list[Finding]:
        """Count a calibrating check.

        After the last one, set the bounds. Returns no findings, so the check does not agree.
        """
        seen = self._judge.extremes
        seen.checks += 1
        missing.append(
            f"loss and gradients: check {seen.checks} of {self._settings.calibrate} only measures (calibrate=)"
        )
        if seen.checks >= self._settings.calibrate:
            self._judge.limits = seen.limits(self._precision)
        return []

    def _answers(self, params: Arrays, batch: Any, uncovered: Uncovered) -> tuple[Answer, Answer]:
        """Return truth and twin with the model's names; under fp64 both are the truth."""
        if isinstance(self._reference, StepReference):
            return self._reference.answers(params, batch, self._precision, uncovered)
        back = {theirs: name for name, theirs in self._renamed.items()}
        sides: list[Answer] = []
        for ask, dtype in ((self._reference.truth, np.float64), (self._reference.twin, np.float32)):
            given = {self._renamed[name]: p.astype(dtype) for name, p in params.items()}
            if sides and self._precision == "fp64":
                break
            try:
                answer = ask(given, batch_as(batch, dtype))
            except KeyError as error:
                if error.args and error.args[0] not in given:
                    raise UserError(
                        f"the reference reads {error.args[0]!r}, which is neither a parameter of the model nor in "
                        f"its batch; parameters: {', '.join(list(given)[:8])}, … (names= maps the model's names)"
                    ) from error
                raise
            sides.append(Answer(answer.loss, {back.get(n, n): g for n, g in answer.grads.items()}, answer.outputs))
        return sides[0], sides[-1]
