"""A trainer that rounds by another declaration gets that one named; one that is wrong is not excused by any."""

from __future__ import annotations

import pytest

from lockstep.core.backend import Backend
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.diagnose import fitting
from lockstep.core.parity.diagnose.fitting import with_fitting
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.sinks.phrases import check_line, fitting_in_words
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults.attention import Bf16RopeAttention
from lockstep.parity_tests.faults.casts import ActivationRoundedOnce
from lockstep.parity_tests.faults.forward import GeluForSilu
from lockstep.parity_tests.faults.planting import swapped
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.model import Attention

pytestmark = pytest.mark.usefixtures("in_one_process")


def config_of(casts: str, **attention: str) -> RunConfig:
    config = tiny_config("bf16")
    precision = config.precision.model_copy(update={"casts": casts})
    changes = {"precision": precision, "attention": config.attention.model_copy(update=attention)}
    return config.model_copy(update=changes)


def explained(backend: TorchBackend, made: RunConfig, declared: RunConfig) -> Check:
    """Check a trainer under one configuration that is declared to run under another."""
    evidence = gather(backend.open(made), declared, text_batch(declared))
    reference = Reference.open(JaxBackend(), declared)
    return with_fitting(judge(evidence, reference), evidence, reference, JaxBackend())


def test_casts_that_are_not_declared_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    with_twin_of = Reference.with_twin_of

    def noted(self: Reference, backend: Backend, config: RunConfig) -> Reference:
        opened.append(config.precision.casts)
        return with_twin_of(self, backend, config)

    monkeypatch.setattr(Reference, "with_twin_of", noted)
    check = explained(TorchBackend(), config_of("residual=bf16"), config_of("lockstep"))
    assert check.verdict == "disagreed"
    assert check.fitting is not None and check.fitting.agrees
    assert check.fitting.settings == {"precision.casts": "residual=bf16"}
    assert "disagreed (agrees under precision.casts = 'residual=bf16')" in check_line(check)
    assert "every comparison agrees under precision.casts = 'residual=bf16'" in fitting_in_words(check.fitting)
    assert check.to_json()["fitting"]["agrees"] is True
    # The declared twin is open already: another one would trace its stages anew.
    assert "residual=bf16" in opened and "lockstep" not in opened


def test_autocast_and_another_attention_kernel_are_found_together() -> None:
    made = config_of("autocast", kernel="flash", grouped="kernel")
    check = explained(TorchBackend(), made, config_of("lockstep"))
    assert check.fitting is not None and check.fitting.agrees
    found = dict(check.fitting.settings)
    # On some processors both ways to group give the same bits here.
    assert found.pop("attention.grouped", "kernel") == "kernel"
    assert found == {"precision.casts": "autocast", "attention.kernel": "flash"}


def test_casts_that_are_declared_and_not_made_are_found() -> None:
    check = explained(TorchBackend(), config_of("lockstep"), config_of("residual=bf16"))
    assert check.fitting is not None and check.fitting.agrees
    assert check.fitting.settings == {"precision.casts": "lockstep"}


def test_a_mistake_is_not_excused() -> None:
    check = explained(GeluForSilu(), config_of("lockstep"), config_of("lockstep"))
    assert check.verdict == "disagreed" and check.fitting is None


def test_a_mistake_under_other_casts_is_what_is_left() -> None:
    check = explained(GeluForSilu(), config_of("autocast"), config_of("lockstep"))
    assert check.fitting is not None and not check.fitting.agrees
    assert check.fitting.left is not None and check.fitting.left.stage == "act"
    assert "the origin under these is act" in fitting_in_words(check.fitting)


def test_one_rounding_less_than_autocast_makes_is_a_plan_of_its_own() -> None:
    check = explained(ActivationRoundedOnce(), config_of("autocast"), config_of("autocast"))
    assert check.fitting is not None and check.fitting.agrees
    assert "act=after product" in check.fitting.settings["precision.casts"]


def test_a_rounding_of_one_layer_alone_fits_no_plan_and_the_step_is_not_judged_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To judge the whole step of a large model takes as long as the check did."""

    class RopeInBf16InBlock1(TorchBackend):
        session_class = swapped(Attention, Bf16RopeAttention, "blocks.1.attn")

    monkeypatch.setattr(fitting, "judge", lambda *given: pytest.fail("the whole step was judged again"))
    check = explained(RopeInBf16InBlock1(), config_of("lockstep"), config_of("lockstep"))
    assert check.origin is not None and (check.origin.stage, check.origin.layer) == ("q_rope", 1)
    assert check.fitting is None


def test_a_step_that_agrees_is_not_looked_at() -> None:
    check = explained(TorchBackend(), config_of("lockstep"), config_of("lockstep"))
    assert check.verdict == "agreed" and check.fitting is None
