"""The watcher of a training loop: it reads the steps to check, and reports the verdicts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from lockstep.core.errors import UserError
from lockstep.core.parity.measures.verdict import Finding, Outcome, overall, verdict_json
from lockstep.core.parity.watch.between_steps import BetweenSteps
from lockstep.core.parity.watch.checker import Checker
from lockstep.core.parity.watch.limits import Precision
from lockstep.core.parity.watch.listen import Pending, listen, loss_of
from lockstep.core.parity.watch.memory import require_memory
from lockstep.core.parity.watch.moved import around_the_update, digest
from lockstep.core.parity.watch.observed import Observer
from lockstep.core.parity.watch.settings import Settings
from lockstep.core.parity.watch.snapshot import (
    ShowsStages,
    Snapshot,
    array_of,
    dtype_of,
    gradients_of,
    parameters_of,
    snapshot,
)
from lockstep.core.parity.watch.together import Ranks, Reading, put_together, told_to_all
from lockstep.core.parity.watch.uncovered import Guard, Uncovered, WatchCheck
from lockstep.core.parity.watch.update_rules import ROUNDINGS
from lockstep.core.parity.watch.words import headline, in_words

log = logging.getLogger("lockstep.watch")


class Disagreed(Exception):
    """Raised under `on_alarm="stop"` if a check disagrees. `check` holds the findings."""

    def __init__(self, check: WatchCheck) -> None:
        super().__init__(in_words(check))
        self.check = check


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
        self.steps, self.checks = settings.start, list[WatchCheck]()
        self._model, self._optimizers = model, optimizers
        self._inside = False
        params = parameters_of(model)
        self._dtypes = {name: dtype_of(p) for name, p in params.items()}
        if unknown := sorted(set(self._dtypes.values()) - set(ROUNDINGS)):
            raise UserError(f"parameters of dtype {unknown[0]} cannot be watched; {', '.join(ROUNDINGS)} can")
        if not any(p.requires_grad for p in params.values()):
            raise UserError("every parameter is frozen: there is no gradient to compare")
        self.precision = settings.precision or _precision_of(set(self._dtypes.values()))
        self._guard = Guard()
        self._checker = Checker(optimizers, reference, settings, self._dtypes, self.precision, self._guard)
        self._pending: Pending | None = None
        self._reading = Reading(together)
        self._failed: Failed | None = None
        self._between = BetweenSteps()
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
        return overall([c for c in self.checks if c.verdict != "could_not"]) if self._checker.judged else "could_not"

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
        return headline(self.verdict, self.checks, self._checker.own)

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
        require_memory([p.numel() for p in params.values()], self._together)
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
            states = partial(self._states, params, reading.at("between"))
            pending.between.extend(self._between.compare(self.steps, pending.params, self._dtypes, states))
        if isinstance(self.reference, Observer) and (self._together is None or self._together.rank == 0):
            with self._guard.link(uncovered, "operations"):
                pending.observed = self.reference.observe(pending.params, batch, self.precision, uncovered)
        for i, optimizer in enumerate(self._optimizers):
            listen(pending, i, optimizer, params, self._guard, reading.at)

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
        # Errors that no narrower guard caught are defects of Lockstep, and must not end a user's training.
        if pending is not None:
            with self._guard.link(uncovered, "step"):
                self._complete(pending, parameters_of(self._model))
        with self._guard.link(uncovered, "step"):
            if self._together is not None:
                pending = put_together(self._together, number, pending, uncovered, self._reading)
            if pending is not None:
                cause = self._checker.check(pending, parameters_of(self._model), findings)
        observed = pending.observed if pending is not None else None
        check = WatchCheck(
            number, tuple(findings), uncovered.not_covered, time.perf_counter() - started, cause,
            not_judged=uncovered.not_judged, operations=observed.coverage if observed else None,
        )  # fmt: skip
        if self._together is not None:
            with self._guard.link(Uncovered(), "the other ranks"):
                check, self._checker.judged = told_to_all(self._together, check, self._checker.judged)
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
        self._between.forget()
        if self._is_checked(pending.number + 1) and all(pending.before) and all(pending.after):
            self._between.keep(pending.number, [after for after in pending.after if after is not None], ended)

    def _keep_for_the_next(self) -> None:
        """Keep digests of weights and optimizer state after an unchecked step if the next step is checked."""
        self._between.forget()
        if not self._is_checked(self.steps + 1):
            return
        with self._guard.link(Uncovered(), "weights and moments between steps"):
            params, read = parameters_of(self._model), Reading(self._together).at("end")
            ended: dict[str, bytes] = {}
            if not self.settings.weights_change:
                ended = {name: digest(read("weights", name, p)) for name, p in params.items()}
            self._between.keep(self.steps, self._states(params, read), ended)

    def _states(self, params: Mapping[str, Any], read: Callable[..., Any]) -> list[Snapshot]:
        """Copy the state of each optimizer now, and the weights that it holds."""
        return [snapshot(params, [optimizer], read, gradients=False) for optimizer in self._optimizers]

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
