"""`watch`: compare forward, backward and update of a user's training loop with a reference function.

    watcher = watch(model, optimizer, reference=reference(jax_loss), every=100)
    for batch in data:
        loss = train_loss(model, batch)
        loss.backward()
        with watcher.step(batch, loss):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()

Tensors are only read and copied: model, gradients, optimizer state and random numbers do not change. A step without a
check is only counted, and the one before a check leaves digests of weights and optimizer state. User guide:
docs/guide/watch.md.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lockstep.core.backend import Arrays
from lockstep.core.data.memory import available_memory_bytes
from lockstep.core.errors import UserError
from lockstep.core.parity.measures.verdict import Check, Finding, Outcome, overall, verdict_json
from lockstep.core.parity.watch import judge
from lockstep.core.parity.watch.judge import Judge, Step
from lockstep.core.parity.watch.library_rules import RULES, rule_of
from lockstep.core.parity.watch.limits import Limits, Precision
from lockstep.core.parity.watch.listen import Pending, listen, loss_of
from lockstep.core.parity.watch.moved import around_the_update, digest, since_last_step
from lockstep.core.parity.watch.observed import Observer
from lockstep.core.parity.watch.snapshot import (
    Answer,
    FromCallable,
    Names,
    Reference,
    ShowsStages,
    Snapshot,
    StepReference,
    array_of,
    batch_as,
    dtype_of,
    gradients_of,
    outside,
    parameters_of,
    renamed,
    snapshot,
    unwrapped,
)
from lockstep.core.parity.watch.together import Cut, Ranks, Reading, owner_of, put_together, told_to_all
from lockstep.core.parity.watch.uncovered import Guard, Uncovered, WatchCheck
from lockstep.core.parity.watch.update_rules import ROUNDINGS, Rule
from lockstep.core.parity.watch.words import headline, in_words

log = logging.getLogger("lockstep.watch")

# Bytes of memory that a check takes. For each number of the model: weights and gradients after the backward pass,
# clipped gradients, two moments before the update, weights and two moments after it. For each number of the largest
# tensor: the same in FP64, with twin and truth of its update. Loss and gradients are compared after the update's copies
# are released, and take less.
BYTES_A_NUMBER, BYTES_OF_LARGEST = 32, 128
# Bytes that a rank other than rank 0 takes for each number that it holds. Copies of sharded tensors stay until they are
# sent: weights and gradients, both again with two moments before the update, weights and two moments after it.
BYTES_A_NUMBER_ELSEWHERE = 40

OnAlarm = Literal["log", "stop"] | Callable[[Check], None]
Declared = Mapping[str, Any] | Callable[[str, int], Mapping[str, Any]]


class Disagreed(Exception):
    """Raised under `on_alarm="stop"` if a check disagrees. `check` holds the findings."""

    def __init__(self, check: WatchCheck) -> None:
        super().__init__(in_words(check))
        self.check = check


def watch(
    model: Any,
    optimizer: Any,
    *,
    reference: Reference | StepReference | Callable[[dict[str, np.ndarray], Any], tuple[float, Arrays]],
    every: int = 100,
    precision: Precision | None = None,
    names: Names = None,
    clip_norm: float | None = None,
    declared: Declared | None = None,
    rule: str | Rule | None = None,
    bounds: Mapping[str, float] | None = None,
    calibrate: int = 0,
    on_alarm: OnAlarm = "log",
    start: int = 0,
    weights_change: bool = False,
    together: Ranks | None = None,
) -> Watcher:
    """Watch `model` (any torch module) and `optimizer` (one, or a sequence of them); return the watcher.

    Args:
        model: parameters are read from its `named_parameters()`, gradients from their `.grad`.
        optimizer: hyperparameters and state are read right before and right after its step.
        reference: `lockstep.jax_backend.watch.reference(loss)`, any object with `truth` and `twin`, or a numpy callable
        `(params, batch) -> (loss, gradients)` that computes in the dtype of its parameters.
        every: check the first step, and each step whose number is a multiple of this.
        precision: the model's precision: `fp32`, `bf16` (autocast, or bf16 weights) or `fp64`. Default: its weights'
        dtype.
        names: the model's parameter name → the reference's, a mapping or a function. Default: the same names.
        clip_norm: the norm to which gradients are clipped, inside or before the block.
        declared: hyperparameters that the optimizer should have, or `(parameter name, step) -> hyperparameters`.
        rule: `adamw`, `adam`, `sgd`, `muon`, `adafactor`, or a function as in core/parity/watch/update_rules.py, for an
        optimizer that no library defines. All optimizers use this rule.
        bounds: any of `excess`, `distance`, `gain`, `relative_error` (fp64) and `loss`. They replace the derived
        bounds.
        calibrate: number of first checks that only measure loss and gradients. Bounds are their extremes with a margin.
        on_alarm: action after a check that disagrees. `log` logs it, `stop` raises `Disagreed` after the step, and a
        function is called with the check.
        start: number of steps done before the first watched one, for a resumed run.
        weights_change: True if the loop changes weights outside `optimizer.step()`, to normalize or average them. Such
        changes are then not judged. By default they are faults.
        together: the ranks that train the model with this one. Each has a watcher, and one judgement covers all.
        Default: this rank judges alone.

    Raises UserError for invalid settings. During training only `Disagreed` is raised, under `on_alarm="stop"`. All that
    cannot be judged is logged and listed in the verdict.
    """
    made: Any = reference
    if not (hasattr(reference, "truth") or isinstance(reference, StepReference)):
        made = FromCallable(reference) if callable(reference) else None
    if made is None:
        raise UserError(f"reference={reference!r}: it is a function, or an object with `truth` and `twin`")
    return Watcher(
        model,
        [unwrapped(o) for o in (optimizer if isinstance(optimizer, (list, tuple)) else [optimizer])],
        made,
        Settings(
            every, precision, names, clip_norm, declared, rule, bounds, calibrate, on_alarm, start, weights_change
        ),
        together,
    )


@dataclass(frozen=True)
class Settings:
    """Keyword arguments of `watch`. Raises UserError for invalid ones."""

    every: int
    precision: Precision | None
    names: Names
    clip_norm: float | None
    declared: Declared | None
    rule: str | Rule | None
    bounds: Mapping[str, float] | None
    calibrate: int
    on_alarm: OnAlarm
    start: int
    weights_change: bool

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UserError(f"every={self.every}: a number of steps, 1 or more")
        if self.precision not in (None, "fp32", "bf16", "fp64"):
            raise UserError(f"precision={self.precision!r}: it is fp32, bf16 or fp64")
        if isinstance(self.rule, str) and self.rule not in RULES:
            raise UserError(f"rule={self.rule!r}: known are {', '.join(RULES)}, or give a function")
        if not callable(self.on_alarm) and self.on_alarm not in ("log", "stop"):
            raise UserError(f"on_alarm={self.on_alarm!r}: it is 'log', 'stop' or a function of the check")
        if self.calibrate and self.bounds:
            raise UserError("bounds= and calibrate= both set the bounds: give one of them")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"clip_norm={self.clip_norm}: it is positive, or None where nothing is clipped")


@dataclass(frozen=True)
class Failed:
    """A step that could not be read."""

    number: int
    uncovered: Uncovered
    started: float


class Watcher:
    """The watcher of a training loop. Built by `watch`. `checks` holds every check so far, in order."""

    def __init__(
        self, model: Any, optimizers: Sequence[Any], reference: Any, settings: Settings, together: Ranks | None = None
    ) -> None:
        self.settings, self.reference, self._together = settings, reference, together
        self._own = isinstance(reference, StepReference) and reference.own
        self.steps, self.checks = settings.start, list[WatchCheck]()
        self._model, self._optimizers = model, optimizers
        self._inside = False
        params = parameters_of(model)
        self._dtypes = {name: dtype_of(p) for name, p in params.items()}
        if unknown := sorted(set(self._dtypes.values()) - set(ROUNDINGS)):
            raise UserError(f"parameters of dtype {unknown[0]} cannot be watched; {', '.join(ROUNDINGS)} can")
        if not any(p.requires_grad for p in params.values()):
            raise UserError("every parameter is frozen: there is no gradient to compare")
        judge.check_declared(settings.declared, optimizers)
        self._renamed = renamed(settings.names, list(params))
        self.precision = settings.precision or _precision_of(set(self._dtypes.values()))
        limits = Limits.nearest(self.precision)
        if settings.bounds:
            limits = limits.given(settings.bounds)
        self._judge = Judge(self.precision, None if settings.calibrate else limits, own=self._own)
        given = RULES[settings.rule] if isinstance(settings.rule, str) else settings.rule
        self._rules = [given or rule_of(optimizer) for optimizer in optimizers]
        self._pending: Pending | None = None
        self._reading = Reading(together)
        self._failed: Failed | None = None
        self._guard = Guard()
        # Number of the last step, digest of the optimizer state after it, and digest of each weight at its end.
        self._last: tuple[int, str, Mapping[str, bytes]] | None = None
        self._judged = False  # whether any check judged gradients
        if isinstance(reference, ShowsStages):
            reference.attend(self._due)

    def _due(self) -> int | None:
        """Return the number of the current step; None if it is not checked."""
        number = self.steps + 1
        return number if self._is_checked(number) else None

    def _is_checked(self, number: int) -> bool:
        return number == self.settings.start + 1 or number % self.settings.every == 0

    @property
    def verdict(self) -> Outcome:
        """Outcome of all checks: `disagreed` if any did, `could_not` if gradients were never judged, else `agreed`."""
        if any(c.verdict == "disagreed" for c in self.checks):
            return "disagreed"
        # Calibrating checks give no verdict and do not change the one of later checks.
        return overall([c for c in self.checks if c.verdict != "could_not"]) if self._judged else "could_not"

    def to_json(self) -> dict[str, Any]:
        """Return the verdict over all checks as `lockstep parity --json` writes it (docs/guide/watch.md)."""
        return verdict_json(self.checks, mode="watch", precision=self.precision) | {
            "verdict": self.verdict,
            "headline": self.headline,
            "not_judged": sorted({item for check in self.checks for item in check.not_judged}),
        }

    @property
    def headline(self) -> str:
        """The verdict in one line, with all that was not judged: `agreed in 3 checks; update: not judged (…)`."""
        return headline(self.verdict, self.checks, self._own)

    def __str__(self) -> str:
        lines = [in_words(check) for check in self.checks]
        uncovered = sorted({item for check in self.checks for item in check.not_covered})
        return "\n".join([*lines, *(f"not covered: {item}" for item in uncovered), self.headline])

    @contextmanager
    def step(
        self, batch: Any, loss: Any = None, *, outputs: Mapping[str, Any] | None = None, check: bool | None = None
    ) -> Iterator[None]:
        """Enclose clipping and `optimizer.step()`, after `backward` and before `zero_grad`.

        Args:
            batch: the reference's input, with numpy arrays in place of tensors. Under gradient accumulation, all
            micro-batches.
            loss: the loss whose gradients are in `.grad`, a tensor or a float. Under gradient accumulation, the loss of
            the step. With `optimizer.step(closure)`, the closure's result replaces it.
            outputs: other tensors of the forward pass by the reference's names, if the reference returns any.
            check: True checks this step, False does not, and None decides by its number.

        Raises only `Disagreed`, under `on_alarm="stop"`: what cannot be judged is logged and listed. Errors inside the
        block pass through.
        """
        if self._inside:
            self._guard.tell("step", "watcher.step inside watcher.step: one block is one optimizer step")
            yield
            return
        self.before_step(batch, loss, outputs=outputs, check=check)
        self._inside = True
        try:
            yield
        except BaseException:
            self._drop()
            raise
        finally:
            self._inside = False
        self.after_step()

    def before_step(
        self, batch: Any, loss: Any = None, *, outputs: Mapping[str, Any] | None = None, check: bool | None = None
    ) -> None:
        """Run the first half of `step`, for loops in which a `with` block is not possible. Arguments as in `step`."""
        self._drop()
        self.steps += 1
        if check is False or not (check or self._is_checked(self.steps)):
            return
        started, uncovered = time.perf_counter(), Uncovered()
        self._failed, self._reading = Failed(self.steps, uncovered, started), Reading(self._together)
        with self._guard.link(uncovered, "step"):
            self._read(batch, loss, outputs or {}, uncovered, started)
            self._failed = None

    def _read(self, batch: Any, loss: Any, outputs: Mapping[str, Any], uncovered: Uncovered, started: float) -> None:
        """Copy the state at the beginning of the step and register hooks on the optimizers.

        Raises UserError if that fails.
        """
        if self._together is not None and self._together.apart:
            raise UserError(self._together.apart)
        if type(self._model).__name__ == "FullyShardedDataParallel":
            raise UserError("FullyShardedDataParallel cannot be watched: fully_shard (FSDP2) can")
        params = parameters_of(self._model)
        if params.keys() != self._dtypes.keys():
            raise UserError("the model's parameters are not those that watch() saw: build the watcher after the model")
        needed, free = self._needed([p.numel() for p in params.values()]), available_memory_bytes()
        if 0 < free < needed:
            raise UserError(
                f"a check takes {needed / 1e9:.3g} GB of memory for copies, and {free / 1e9:.3g} GB are free"
            )
        count = len(self._optimizers)
        number = None
        with self._guard.link(uncovered, "loss"):
            number = loss_of(loss)
        given = {}
        with self._guard.link(uncovered, "outputs"):
            given = {name: array_of(x) for name, x in outputs.items()}
        reading, read = self._reading, self._reading.at("before")
        self._pending = pending = Pending(
            self.steps,
            batch,
            number,
            given,
            {name: read("weights", name, p) for name, p in params.items()},
            gradients_of(params, reading.at("backward")),
            [None] * count,
            [None] * count,
            [0] * count,
            [],
            started,
            uncovered,
        )
        with self._guard.link(uncovered, "weights and moments between steps"):
            pending.between.extend(self._between(params, pending.params, reading.at("between")))
        if isinstance(self.reference, Observer) and (self._together is None or self._together.rank == 0):
            with self._guard.link(uncovered, "operations"):
                pending.observed = self.reference.observe(pending.params, batch, self.precision, uncovered)
        for i, optimizer in enumerate(self._optimizers):
            listen(pending, i, optimizer, params, self._guard, reading.at)

    def _needed(self, sizes: Sequence[int]) -> int:
        """Return the memory in bytes that a check needs on this rank. sizes: count of numbers in each parameter."""
        if self._together is None or self._together.rank == 0:
            return BYTES_A_NUMBER * sum(sizes) + BYTES_OF_LARGEST * max(sizes)
        return BYTES_A_NUMBER_ELSEWHERE * sum(sizes) // len(self._together.members)

    def in_closure(self, loss: Any = None) -> None:
        """Read gradients inside the closure of `optimizer.step(closure)`, after its backward pass and before it clips.

        Args:
            loss: as in `step`. The closure's own result is the loss of one micro-batch only.
        """
        if self._pending is None:
            return
        with self._guard.link(self._pending.uncovered, "gradients"):
            self._pending.grads = gradients_of(parameters_of(self._model), self._reading.at("backward"))
            self._pending.loss = loss_of(loss)
            self._pending.early = True

    def after_step(self) -> WatchCheck | None:
        """Run the second half of `step`: judge the step if it is checked. Returns the check, or None.

        Raises Disagreed under `on_alarm="stop"`.
        """
        pending, failed = self._pending, self._failed
        self._drop()
        if (of_step := failed or pending) is None:
            self._keep_for_the_next()
            return None
        number, uncovered, started = of_step.number, of_step.uncovered, of_step.started
        pending = pending if failed is None else None
        findings, cause = list[Finding](), None
        # Errors that no narrower guard caught are defects of Lockstep. They must not end a user's training.
        if pending is not None:
            with self._guard.link(uncovered, "step"):
                self._complete(pending, parameters_of(self._model))
        with self._guard.link(uncovered, "step"):
            if self._together is not None:
                pending = put_together(self._together, number, pending, uncovered, self._reading)
            if pending is not None:
                cause = self._check(pending, findings)
        observed = pending.observed if pending is not None else None
        check = WatchCheck(
            number, tuple(findings), uncovered.not_covered, time.perf_counter() - started, cause,
            not_judged=uncovered.not_judged, operations=observed.coverage if observed else None,
        )  # fmt: skip
        if self._together is not None:
            with self._guard.link(Uncovered(), "the other ranks"):
                check, self._judged = told_to_all(self._together, check, self._judged)
        self.checks.append(check)
        self._tell(check)
        return check

    def _complete(self, pending: Pending, params: Mapping[str, Any]) -> None:
        """Read the state of an optimizer that did not step, and keep digests for the next step."""
        unread = "update" in pending.uncovered.skipped
        for i, optimizer in enumerate(self._optimizers):
            hooked = hasattr(optimizer, "register_step_post_hook")
            count = pending.fired[i] if hooked else 1
            if hooked and count and (pending.before[i] is None or pending.after[i] is None):
                if not unread:
                    why = "optimizer.step(closure) did not call its closure"
                    self._guard.tell("update", why)
                    pending.uncovered.skip("update", why)
                pending.before[i] = pending.after[i] = None
                continue
            pending.fired[i] = count
            if pending.before[i] is None or pending.after[i] is None:
                with self._guard.link(pending.uncovered, "update"):
                    now = snapshot(params, [optimizer], self._reading.at("after"))
                    pending.before[i] = pending.before[i] or now
                    pending.after[i] = pending.after[i] or now
        ended: dict[str, bytes] = {}
        if not self.settings.weights_change and all(pending.before) and all(pending.after):
            with self._guard.link(pending.uncovered, "weights around the update"):
                read = self._reading.at("end")
                found, ended = around_the_update(pending, lambda name: read("weights", name, params[name]))
                pending.between.extend(found)
        self._last = None
        if self._is_checked(pending.number + 1) and all(pending.before) and all(pending.after):
            self._last = (pending.number, _digest([after for after in pending.after if after is not None]), ended)

    def _keep_for_the_next(self) -> None:
        """Keep digests of weights and optimizer state after an unchecked step if the next step is checked."""
        self._last = None
        if not self._is_checked(self.steps + 1):
            return
        with self._guard.link(Uncovered(), "weights and moments between steps"):
            params, read = parameters_of(self._model), Reading(self._together).at("end")
            left = [snapshot(params, [optimizer], read, gradients=False) for optimizer in self._optimizers]
            ended: dict[str, bytes] = {}
            if not self.settings.weights_change:
                ended = {name: digest(read("weights", name, p)) for name, p in params.items()}
            self._last = (self.steps, _digest(left), ended)

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

    def _check(self, pending: Pending, findings: list[Finding]) -> str | None:
        """Append the findings of a step to `findings`. Returns the common cause of broken gradients, or None."""
        guard, uncovered = self._guard, pending.uncovered
        params = parameters_of(self._model)
        step = self._finish(pending, params)
        findings += pending.between
        findings += pending.observed.findings if pending.observed else ()
        skipped = judge.skipped_by_scaler(step)
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
        if isinstance(self.reference, ShowsStages) and not skipped:
            with guard.link(uncovered, "stages"):
                findings += self.reference.stages(step.number, step.params, self.precision, uncovered)
        if truth is not None:
            with guard.link(uncovered, "gradients"):
                clip_norm = self.settings.clip_norm
                compared.extend(self._judge.forward_backward(step, truth, twin, clip_norm, uncovered, left_out))
        findings += compared
        findings += late
        uncovered.extend(uncovered_late)
        if self.settings.every > 1:
            uncovered.append("weights and optimizer state between steps that are not checked (every=1 compares them)")
        if self.settings.weights_change:
            uncovered.append("weights that the loop changes outside optimizer.step() (weights_change=True)")
        judged = any(f.stage == "gradients" and f.tap != "names" for f in compared)
        measured = truth is not None and "gradients" not in uncovered.skipped
        if calibrating and measured and all(f.ok for f in findings):
            findings[:] = self._calibrated(uncovered)
        else:
            self._judged = self._judged or (judged and not calibrating)
        cause = None
        if truth is not None:
            with guard.link(uncovered, "cause"):
                cause = judge.cause_of(step, truth, compared, self.precision)
                broken = [f.tap for f in compared if f.stage == "gradients" and not f.ok and f.tap in step.grads]
                cause = cause or next((f.note for f in findings if f.tap == "ranks" and not f.ok), None)
                if where := owner_of(broken, step.grads, twin.grads, pending.layouts):
                    cause = f"{cause}; {where}" if cause else where
        return cause

    def _update(
        self, step: Step, pending: Pending, params: Mapping[str, Any], skipped: str, uncovered: Uncovered
    ) -> list[Finding]:
        """Return the findings of clipping, hyperparameters and the update."""
        guard, findings = self._guard, list[Finding]()
        with guard.link(uncovered, "update"):
            alone, strangers = outside(params, self._optimizers)
            basis = "every trainable parameter is in an optimizer's group"
            findings.append(
                judge.exact("update", "names", len(alone), len(params), basis, ", ".join(alone[:5]), "update")
            )
            if strangers:
                uncovered.append(f"{strangers} tensors that the optimizer holds and the model does not")
        all_read = len(step.before) == len(self._optimizers) and not pending.stale
        if not skipped and all_read and all(count == 1 for count in step.fired):
            with guard.link(uncovered, "clip_coefficient"):
                findings.extend(judge.clipping(step, self.settings.clip_norm))
        with guard.link(uncovered, "hyperparameters"):
            findings.extend(judge.hyperparameters(step, self.settings.declared, uncovered))
        with guard.link(uncovered, "update"):
            findings.extend(judge.update(step, skipped, uncovered))
        return findings

    def _calibrated(self, missing: Uncovered) -> list[Finding]:
        """Count a calibrating check.

        After the last one, set the bounds. Returns no findings, so the check does not agree.
        """
        seen = self._judge.extremes
        seen.checks += 1
        missing.append(
            f"loss and gradients: check {seen.checks} of {self.settings.calibrate} only measures (calibrate=)"
        )
        if seen.checks >= self.settings.calibrate:
            self._judge.limits = seen.limits(self.precision)
        return []

    def _answers(self, params: Arrays, batch: Any, uncovered: Uncovered) -> tuple[Answer, Answer]:
        """Return truth and twin with the model's names; under fp64 both are the truth."""
        if isinstance(self.reference, StepReference):
            return self.reference.answers(params, batch, self.precision, uncovered)
        back = {theirs: name for name, theirs in self._renamed.items()}
        sides: list[Answer] = []
        for ask, dtype in ((self.reference.truth, np.float64), (self.reference.twin, np.float32)):
            given = {self._renamed[name]: p.astype(dtype) for name, p in params.items()}
            if sides and self.precision == "fp64":
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

    def _between(
        self, params: Mapping[str, Any], weights: Arrays, read: Callable[..., np.ndarray]
    ) -> Iterator[Finding]:
        """Compare weights and moments with the digests that the last step left, if there are any."""
        if self._last is not None and self._last[0] == self.steps - 1:
            if self._last[2]:
                yield since_last_step(self._last[2], weights, self._dtypes)
            now = _digest([snapshot(params, [optimizer], read) for optimizer in self._optimizers])
            basis = "equal bits of optimizer state after one step and before the next"
            yield judge.exact("moments", "state", int(now != self._last[1]), 1, basis, phase="state")

    def _tell(self, check: WatchCheck) -> None:
        here = self._together is None or self._together.rank == 0
        if check.verdict != "disagreed":
            log.log(logging.INFO if here else logging.DEBUG, "%s", in_words(check))
        elif callable(self.settings.on_alarm):
            self.settings.on_alarm(check)
        elif self.settings.on_alarm == "stop":
            raise Disagreed(check)
        else:
            log.log(logging.WARNING if here else logging.DEBUG, "%s", in_words(check))

    def _drop(self) -> None:
        """Discard an unfinished step and remove its hooks."""
        self._failed = None
        if self._pending is not None:
            for handle in self._pending.handles:
                handle.remove()
            self._pending = None


def _precision_of(dtypes: set[str]) -> Precision:
    return "fp64" if dtypes == {"float64"} else "fp32" if dtypes == {"float32"} else "bf16"


def _digest(states: Sequence[Snapshot]) -> str:
    digest = hashlib.sha256()
    for state in states:
        for kind, by_name in sorted(state.moments.items()):
            for name, moment in sorted(by_name.items()):
                own = moment.local if isinstance(moment, Cut) else moment
                digest.update(f"{kind}/{name}".encode() + own.tobytes())
        digest.update(repr(sorted(state.steps.items())).encode())
    return digest.hexdigest()
