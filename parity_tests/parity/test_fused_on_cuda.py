"""A check of the trainer with torch's fused AdamW as CUDA has it: hyperparameters in FP32, and that is no fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.parity.reference.self_check import sound_reference
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.fused_on_cuda import fused_on_cuda
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend import session
from lockstep.torch_backend.backend import TorchBackend


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Check]:
    """Check the first step of a tiny run, its β₂ off by a fault."""

    def check(beta2_off: float) -> Check:
        config = tiny_config("fp32")
        config = config.model_copy(update={"optim": config.optim.model_copy(update={"beta2": 0.999})})
        with fused_on_cuda(monkeypatch, beta2_off):
            evidence = gather(TorchBackend().open(config), config, text_batch(config))
        return judge(evidence, sound_reference(JaxBackend(), config))

    return check


def test_hyperparameters_in_fp32_agree(checked: Callable[[float], Check]) -> None:
    check = checked(0.0)
    assert check.verdict == "agreed", check.origin
    assert any(f.stage == "moments" for f in check.findings)


def test_another_beta_is_found(checked: Callable[[float], Check]) -> None:
    origin = checked(1e-6).origin
    assert origin is not None and origin.stage == "moments" and origin.tap.startswith("exp_avg_sq/")


def test_a_session_that_does_not_declare_it_is_held_to_fp64(
    checked: Callable[[float], Check], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "takes_fp32", lambda optimizer: False)
    origin = checked(0.0).origin
    assert origin is not None and origin.stage == "moments" and origin.tap.startswith("exp_avg_sq/")
