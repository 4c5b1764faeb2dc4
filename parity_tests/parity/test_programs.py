"""The compiled program that trains against the tapped one: what only the first does is found, and only that."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.measures.verdict import Check
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults import compiled, optimizer
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

CONFIG = tiny_config("bf16", compiled=True)
FAULTS = (compiled.UntappedRopeTurnsBack, compiled.UntappedGradientsDoubled, compiled.UntappedGradientLong)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference.open(JaxBackend(), CONFIG)


def check_of(backend: TorchBackend, reference: Reference) -> Check:
    torch._dynamo.reset()
    evidence = gather(backend.open(CONFIG), CONFIG, uneven_weights(text_batch(CONFIG), 0))
    return judge(evidence, reference)


@pytest.fixture(scope="module")
def honest(reference: Reference) -> Check:
    return check_of(TorchBackend(), reference)


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run eagerly, although the configuration, which the judge reads, declares them compiled.

    Tracing takes nearly all of a test's time.
    """
    monkeypatch.setattr(torch, "compile", lambda program, **_: program)
    monkeypatch.setattr(compiled, "is_compiling", lambda: True)


def test_an_honest_trainer_agrees(honest: Check) -> None:
    assert honest.verdict == "agreed", honest.origin
    assert any(finding.stage == "compiler" for finding in honest.findings)


def test_an_honest_trainer_agrees_untraced(untraced: None, reference: Reference) -> None:
    check = check_of(TorchBackend(), reference)
    assert check.verdict == "agreed", check.origin
    assert any(finding.stage == "compiler" for finding in check.findings)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_only_the_program_without_taps_does_is_the_compilers(
    fault: type[TorchBackend], reference: Reference
) -> None:
    assert_compilers(check_of(fault(), reference))


@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_the_compilers_untraced(fault: type[TorchBackend], untraced: None, reference: Reference) -> None:
    assert_compilers(check_of(fault(), reference))


def assert_compilers(check: Check) -> None:
    """Assert that the check names the program that trains, in its backward pass."""
    origin = check.origin
    assert origin is not None
    assert (origin.stage, origin.phase) == ("compiler", "backward")


def test_a_gradient_of_an_earlier_batch_is_not_the_compilers(untraced: None, reference: Reference) -> None:
    """The optimizer lacks a parameter, so nothing clears its gradient, but the program that trains is honest."""
    origin = check_of(optimizer.ParameterNotInOptimizer(), reference).origin
    assert origin is not None
    assert (origin.stage, origin.tap) == ("gradients", "blocks.1.attn.o_proj.weight")


def test_a_wrong_length_is_found_within_the_distance_that_is_allowed(honest: Check, reference: Reference) -> None:
    """One and a half times what may lie along the truth is three quarters of the distance, which does not find it."""
    tap = "blocks.1.mlp.up_proj.weight"
    finding = next(f for f in honest.findings if (f.stage, f.tap) == ("compiler", tap))
    (reach,) = (measure.high or 0.0 for measure in finding.measures if measure.name == "gain_difference")
    assert reach

    class TooLong(TorchSession):
        def show_program(self, grads: Mapping[str, Tensor]) -> None:
            super().show_program({**grads, tap: grads[tap] * (1 + 1.5 * reach)})

    class Backend(TorchBackend):
        session_class = TooLong

    check = check_of(Backend(), reference)
    (broken,) = (finding for finding in check.findings if finding.stage == "compiler" and not finding.ok)
    assert broken.tap == tap
    held = {m.name: m.ok for m in broken.measures}
    assert held["twin_distance"] and not held["gain_difference"]
