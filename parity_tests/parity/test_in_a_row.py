"""Two steps with nothing between them: what every check puts right, training does not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from lockstep.core.backend import Backend, Batch, StepRecord
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.evidence import in_a_row, recorded
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.judge import judge as judging
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.parity.reference.self_check import sound_reference
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults import outside
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

AT_ONCE, AGAIN = "the step after, at once", "the step again, not shown"
FRESH = "scores after a step, not loaded"
WRITTEN = "the step after, while a checkpoint is written"
FOUND = {
    outside.CopiesMadeByLoadAlone: ("loss", AT_ONCE),
    outside.OldGradientsMixedIn: ("moments", AT_ONCE),
    outside.StepsClearNoGradients: ("gradients", AT_ONCE),
    outside.FartherWhenNotShown: ("update", AGAIN),
    outside.LoadSkipsWeights: ("checkpoint", "state"),
    outside.MomentsRoundedOnceWritten: ("weights", "after a checkpoint was begun"),
    outside.PeakRateOnceWritten: ("update", WRITTEN),
    outside.WeightsCastOnceWritten: ("loss", WRITTEN),
    outside.ReplaysHalfGradients: ("gradients", "the third step, at once"),
    outside.OneBatchLate: ("loss", AT_ONCE),
    outside.EvaluatesFirstWeights: ("evaluation", FRESH),
    outside.ScoresKeptByBatch: ("evaluation", FRESH),
    outside.InferenceStays: ("gradients", AGAIN),
    outside.SamplesFirstWeights: ("sampling", "samples after a step, not loaded"),
    outside.FartherAtEverySeventhCall: ("update", "the third step, at once"),
    outside.RestoreResetsBetas: ("moments", "the step after, from a checkpoint that was restored"),
}


def with_optimizer(name: str, eight_bit: str = "torchao") -> RunConfig:
    config = tiny_config()
    return config.model_copy(update={"optim": config.optim.model_copy(update={"name": name, "eight_bit": eight_bit})})


def check(backend: Backend, config: RunConfig, batch: Batch | None = None) -> Check:
    evidence = gather(backend.open(config), config, text_batch(config) if batch is None else batch)
    return judge(evidence, sound_reference(JaxBackend(), config))


@pytest.mark.parametrize("fault", FOUND, ids=lambda fault: fault.__name__)
def test_what_lies_outside_the_state_is_found_in_the_first_step(fault: type[TorchBackend]) -> None:
    origin = check(fault(), tiny_config()).origin
    assert origin is not None
    assert (origin.stage, origin.tap) == FOUND[fault]


def test_a_check_during_training_names_the_steps_that_it_does_not_make() -> None:
    config = tiny_config()
    batch = text_batch(config)
    evidence = gather(outside.FartherWhenNotShown().open(config), config, batch, recorded.probe_of(batch, config))
    during_training = judge(evidence, sound_reference(JaxBackend(), config))
    assert during_training.verdict == "agreed"
    assert any("gradients are not shown" in reason for reason in during_training.not_covered)


def test_parameters_that_are_left_frozen_are_named() -> None:
    origin = check(outside.FrozenMlp(), tiny_config()).origin
    assert origin is not None and (origin.stage, origin.phase, origin.layer) == ("down_proj", "backward", 0)
    assert "no gradient came back" in origin.note


def test_steps_that_were_left_out_and_counted_are_named() -> None:
    config = tiny_config("fp16")
    precision = config.precision.model_copy(update={"loss_scale": 2.0**20})
    config = config.model_copy(update={"precision": precision})
    batch = text_batch(config, seed=1)
    origin = check(outside.StepsLeftOutCount(), config, batch).origin
    assert origin is not None and (origin.stage, origin.tap) == ("step_count", "updates")
    assert check(TorchBackend(), config, batch).verdict == "agreed"


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        (TorchBackend(), tiny_config(compiled=True)),
        (JaxBackend(), tiny_config("fp32")),
        (TorchBackend(), tiny_config("fp8_delayed")),
        # Before its first step an optimizer of 8-bit moments has none, and after a load it has codes.
        (TorchBackend(), with_optimizer("adamw8bit")),
        (TorchBackend(), with_optimizer("adamw8bit", "bitsandbytes")),
        (TorchBackend(), with_optimizer("muon")),
    ],
    ids=["compiled", "jax", "fp8_delayed", "torchao", "bitsandbytes", "muon"],
)
def test_an_honest_session_is_covered_and_agrees(backend: Backend, config: RunConfig) -> None:
    found = check(backend, config)
    assert found.verdict == "agreed"
    assert {AT_ONCE, AGAIN} <= {one.tap for one in found.findings}
    assert not any("two steps in a row" in words for words in found.not_covered)


class _Uneven(TorchSession):
    """The loss is off by a rounding, another one in every step that is made."""

    made = itertools.count()

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        with torch.no_grad():
            self.parameters["embed.weight"][0, 0] += 1e-6 * next(self.made)
        return super().step(batch, norms=norms)


class _UnevenBackend(TorchBackend):
    session_class = _Uneven


def test_a_session_that_does_not_repeat_its_bits_is_not_accused_of_that() -> None:
    found = check(_UnevenBackend(), tiny_config())
    assert AT_ONCE not in {one.tap for one in found.findings}
    assert "two steps in a row: the session's steps do not repeat their bits" in found.not_covered


class _Noisy(TorchSession):
    """From the second step that is made on, each number of a gradient is off by some percent, at random."""

    made = 0

    def _update(self, grads: list[torch.Tensor], *others: Any) -> None:
        self.made += 1
        if self.made > 1:
            for grad in grads:
                grad.mul_(1 + 0.03 * torch.randn_like(grad))
        super()._update(grads, *others)


def test_random_roundings_are_no_pattern_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The later steps, which are held to their gradients, are left out: these roundings are larger than any."""
    monkeypatch.setattr(judging, "later_updates", lambda *_: iter(()))
    monkeypatch.setattr(TorchBackend, "session_class", _Noisy)
    found = check(TorchBackend(), tiny_config())
    assert found.verdict == "agreed", found.origin
    assert "two steps in a row: the session's steps do not repeat their bits" in found.not_covered


class _Growing(TorchSession):
    """From the sixth step that is made on, gradients grow from step to step."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.made, self.stepping = 0, False

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        self.made, self.stepping = self.made + 1, True
        try:
            return super().step(batch, norms=norms)
        finally:
            self.stepping = False

    def accumulate(self, batch: Batch) -> Any:
        found = super().accumulate(batch)
        if self.stepping and self.made > 5:
            for p in self.parameters.values():
                assert p.grad is not None
                p.grad.mul_(self.made)
        return found


class _GrowingBackend(TorchBackend):
    session_class = _Growing


def test_steps_that_do_not_repeat_by_more_than_rounding_are_accused() -> None:
    origin = check(_GrowingBackend(), tiny_config()).origin
    assert origin is not None and (origin.stage, origin.tap) == ("gradients", AGAIN)


def test_what_memory_does_not_hold_is_not_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_a_row, "available_memory_bytes", lambda: 0)
    found = check(TorchBackend(), tiny_config())
    assert found.verdict == "agreed" and WRITTEN not in {one.tap for one in found.findings}
    for what in ("a step while a checkpoint is written", "a step from a checkpoint that was restored"):
        assert any(words.startswith(f"{what}: it takes") for words in found.not_covered)


class _ShowsNoChecksums(outside.CopyingSession):
    state_checksums = None  # type: ignore[assignment]


class _WithoutChecksums(TorchBackend):
    session_class = _ShowsNoChecksums


def test_records_are_compared_where_a_session_tells_no_checksums() -> None:
    origin = check(_WithoutChecksums(), tiny_config()).origin
    assert origin is not None and (origin.stage, origin.tap) == ("loss", AT_ONCE)


def test_a_run_that_ends_has_no_step_after() -> None:
    config = tiny_config()
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": 1})})
    found = check(TorchBackend(), config)
    assert found.verdict == "agreed"
    assert "two steps in a row: the run ends with this one" in found.not_covered
