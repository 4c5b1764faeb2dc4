"""A run's first check makes a step with NaN, and compares the session's report and its changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.core.backend import Backend, Batch, NotSupported, Session, StepRecord
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.in_a_row import LEFT_OUT
from lockstep.core.parity.evidence.saved import open_evidence, save_evidence
from lockstep.core.parity.evidence.store import FolderStore
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.measures.compare import Reference
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.train.finite import NotFinite
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

ENDS, FP16 = tiny_config("bf16"), tiny_config("fp16")
SKIPS = ENDS.model_copy(update={"train": ENDS.train.model_copy(update={"on_not_finite": "skip"})})
TAP = "a step that is not finite"


def check(session: Session, config: RunConfig) -> tuple[Evidence, Check]:
    evidence = gather(session, config, text_batch(config))
    return evidence, judge(evidence, Reference.open(JaxBackend(), config))


class TakesNaNForZero(TorchSession):
    """Its gradients lose what is not finite, as by `torch.nan_to_num`."""

    def accumulate(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        found = super().accumulate(batch)
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                torch.nan_to_num_(parameter.grad, 0.0, 0.0, 0.0)
        return found


class TellsTheLossBefore(TorchSession):
    """Leaves the step out without reporting it."""

    told = 0.0

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        try:
            record = super().step(batch, norms=norms)
        except NotFinite as error:
            return replace(error.record, loss=self.told, grad_norm=1.0)
        self.told = record.loss
        return record


class MovesAllTheSame(TorchSession):
    """Weights decay, and moments with them, before the loss is tested."""

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        try:
            return super().step(batch, norms=norms)
        except NotFinite:
            with torch.no_grad():
                self.parameters["embed.weight"].mul_(1 - 1e-4)
            raise


class CountsNothing(TorchSession):
    """Leaves the step out, and does not count it: AdamW's bias correction is one update ahead from then on."""

    def scalars_after(self, finite: bool) -> dict[str, float]:
        return super().scalars_after(finite) if finite else dict(self.scalars)


class MakesTheStep(TorchSession):
    """Is asked to leave out steps that are not finite, and makes them."""

    def _update(self, grads: list[Tensor], coefficient: Tensor, lr: float, finite: bool) -> None:
        super()._update(grads, coefficient, lr, True)


@pytest.mark.parametrize(
    "session, config, stage, note",
    [
        (TakesNaNForZero, ENDS, "gradients", "grad_norm"),
        (TakesNaNForZero, SKIPS, "gradients", "grad_norm"),
        (TellsTheLossBefore, ENDS, "loss", "loss, grad_norm"),
        (MovesAllTheSame, ENDS, "update", "params/embed.weight"),
        (CountsNothing, SKIPS, "loss_scale", "skipped_steps, skipped_in_a_row"),
        (CountsNothing, FP16, "loss_scale", "loss_scale, finite_steps, skipped_steps"),
        (MakesTheStep, SKIPS, "moments", "params/embed.weight"),
        (MakesTheStep, FP16, "moments", "params/embed.weight"),
    ],
)
def test_what_is_wrong_of_such_a_step_alone_is_found_in_the_first(
    session: type[TorchSession], config: RunConfig, stage: str, note: str
) -> None:
    _, found = check(session(config), config)
    assert found.origin is not None
    assert (found.origin.stage, found.origin.tap) == (stage, TAP)
    assert found.origin.note.startswith(note)


@pytest.mark.parametrize(
    "backend, config",
    [(backend, config) for backend in (TorchBackend, JaxBackend) for config in (ENDS, SKIPS, FP16)]
    + [(TorchBackend, tiny_config("fp8_delayed"))],
)
def test_an_honest_session_agrees_and_was_looked_at(backend: Callable[[], Backend], config: RunConfig) -> None:
    evidence, found = check(backend().open(config), config)
    assert found.verdict == "agreed"
    assert evidence.in_a_row[LEFT_OUT] == () and TAP in {one.tap for one in found.findings}
    assert not {"leaving a step out", "a change of the loss scale"} & {*found.not_exercised}


def test_the_state_after_it_is_the_one_after_the_step() -> None:
    session = TorchBackend().open(ENDS)
    evidence = gather(session, ENDS, text_batch(ENDS))
    now = session.state()
    assert now.step == 1
    assert all(np.array_equal(now.params[name], evidence.after.params[name]) for name in now.params)


def test_a_capsule_says_the_same(tmp_path: Path) -> None:
    evidence = gather(MovesAllTheSame(ENDS), ENDS, text_batch(ENDS))
    saved = save_evidence(evidence, FolderStore.create(tmp_path / "evidence"))
    opened = open_evidence(tmp_path / "evidence")
    assert saved.in_a_row[LEFT_OUT] == opened.in_a_row[LEFT_OUT] == ("params/embed.weight",)


def test_who_says_that_it_is_not_finite_and_goes_on_is_not_accused_where_nobody_asked() -> None:
    """As a plain loop does, whose loss is NaN for everybody to see; asked to leave it out, it is accused."""

    class GoesOn(TorchSession):
        def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
            try:
                return super().step(batch, norms=norms)
            except NotFinite as error:
                return error.record

    _, found = check(GoesOn(ENDS), ENDS)
    assert found.verdict == "agreed"
    assert any("the session makes it; its record has loss nan" in said for said in found.not_covered)


def test_who_tells_no_checksums_is_held_to_what_the_record_says() -> None:
    class Silent(TakesNaNForZero):
        def state_checksums(self) -> dict[str, float]:
            raise NotSupported("this session tells none")

    evidence = gather(cast(Session, Silent(ENDS)), ENDS, text_batch(ENDS))
    assert evidence.in_a_row[LEFT_OUT] == ("grad_norm",)
    honest = gather(TorchBackend().open(ENDS), ENDS, text_batch(ENDS))
    assert honest.in_a_row[LEFT_OUT] == ()


def test_later_steps_and_checks_that_ask_when_a_fault_began_leave_it_out() -> None:
    session = TorchBackend().open(ENDS)
    assert LEFT_OUT not in gather(session, ENDS, text_batch(ENDS), ahead=False).in_a_row
    assert LEFT_OUT not in gather(session, ENDS, text_batch(ENDS, 1)).in_a_row
