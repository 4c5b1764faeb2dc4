"""Faults that act under one condition of a run alone: a step that records norms, a state that was loaded."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.core.backend import Batch, State, StepRecord
from lockstep.core.parity.diagnose.disagreement import repeated
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.measures.compare import Reference
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.parity.modes.side_by_side import check_steps
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

pytestmark = pytest.mark.usefixtures("in_one_process")
CONFIG = tiny_config("bf16")


class _NormsSession(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        self._recording = norms
        return super().step(batch, norms=norms)

    def _norms(self, tensors: Any) -> dict[str, float]:
        for name, tensor in tensors.items():
            if tensor is self.parameters[name].grad and tensor is not None:
                tensor *= 1.5
        return super()._norms(tensors)


class NormsChangeGradients(TorchBackend):
    """Recording norms makes gradients longer, in place."""

    session_class = _NormsSession


class _ForgetfulSession(TorchSession):
    def load(self, state: State) -> None:
        super().load(state)
        for p in self.parameters.values():
            if p in self.optimizer.state:
                self.optimizer.state[p]["step"].zero_()


class CountsLostAtLoading(TorchBackend):
    """A state that is loaded begins with an optimizer that has counted no update."""

    session_class = _ForgetfulSession


def checks(candidate: TorchBackend, steps: int) -> list[Check]:
    return list(check_steps(candidate, JaxBackend(), CONFIG, (text_batch(CONFIG, step) for step in range(steps))))


def test_it_is_told_when_a_step_is_judged_and_how_long_its_passes_took() -> None:
    told: list[tuple[int, float]] = []
    batches = (text_batch(CONFIG, step) for step in range(2))
    for check in check_steps(
        TorchBackend(), JaxBackend(), CONFIG, batches, gathered=lambda step, seconds: told.append((step, seconds))
    ):
        assert [step for step, _ in told] == list(range(1, check.step + 1))
    assert all(seconds > 0 for _, seconds in told)


def test_every_second_step_records_norms() -> None:
    first, second = checks(NormsChangeGradients(), 2)
    assert first.verdict == "agreed"
    assert second.origin is not None and second.origin.stage == "moments"


def test_a_step_is_run_again_as_it_was() -> None:
    """Without norms the same step would be another one, and called a race."""
    with_norms = NormsChangeGradients().open(CONFIG)
    evidence = gather(with_norms, CONFIG, text_batch(CONFIG), norms=True)
    assert evidence.given_norms
    check = judge(evidence, Reference.open(JaxBackend(), CONFIG))
    again = repeated(with_norms, evidence, check, CONFIG)
    assert again.happened and again.why == "the same step, run again, gives the same bits"


def test_updates_that_are_not_counted_after_loading_are_the_checkpoint_s() -> None:
    (check,) = checks(CountsLostAtLoading(), 1)
    assert check.origin is not None and check.origin.stage == "checkpoint"
    assert "the updates of" in check.origin.note
