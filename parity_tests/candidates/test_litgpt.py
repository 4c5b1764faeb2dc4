"""litgpt's Llama as a candidate, on the real package: clean, and with faults."""

from __future__ import annotations

import pytest

from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.taps import observed_names
from lockstep.core.parity.modes.side_by_side import check_steps
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.cross.variants import relative
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.candidate.layout import fused
from lockstep.torch_backend.candidate.litgpt import LitGptCandidate

pytest.importorskip("litgpt.model", reason="litgpt is not installed (pip install litgpt)")

MODELS = {
    "tied": {},
    "untied, biases of q, k and v": {"tied": False, "qkv_bias": True},
    "llama 3.1": {"rope_factor": 8.0, "rope_original": 24, "rope_high": 3.0, "rope_theta": 1e4},
    "qwen2": {"family": "qwen2"},
}


@pytest.mark.parametrize("name", MODELS)
def test_every_tap_and_gradient_is_the_trainers(name):
    config = tiny_config("fp32", **MODELS[name])
    micro, names = text_batch(config).micro_batches(2)[0], observed_names(config)
    expected = TorchBackend().open(config).observe(micro, names)
    found = LitGptCandidate().open(config).observe(micro, names)
    missing = {one.rpartition(".")[0] for one in expected.keys() - found.keys() if one.endswith(".x")}
    assert all(one.endswith((".q", ".k", ".v", "_residual", "_norm")) for one in missing)
    assert not [one for one in found if not relative(found[one], expected[one]) <= 1e-5]


def check_of(candidate):
    config = tiny_config("fp32")
    (check,) = check_steps(candidate, JaxBackend(), config, [text_batch(config)])
    return check


def test_a_clean_run_agrees():
    check = check_of(LitGptCandidate())
    assert check.verdict == "agreed"
    judged = {(one.stage, one.phase) for one in check.findings if one.scope == "local"}
    assert {("q_rope", "forward"), ("attn", "backward"), ("act", "forward"), ("nll", "forward")} <= judged


class OtherEpsilon(LitGptCandidate):
    def build(self, config):
        model = super().build(config)
        model.transformer.h[1].norm_2.eps = 1e-3
        return model


class Swapped(LitGptCandidate):
    modules = {
        **LitGptCandidate.modules,
        "transformer.h.{i}.attn.qkv": fused("attn.q_proj", "attn.v_proj", "attn.k_proj"),
    }


class InTurns(LitGptCandidate):
    """The layout that litgpt had before 0.5.4."""

    modules = {
        **LitGptCandidate.modules,
        "transformer.h.{i}.attn.qkv": fused("attn.q_proj", "attn.k_proj", "attn.v_proj", by_group=True),
    }


FAULTS = {
    "an epsilon": (OtherEpsilon, ("mlp_norm", "forward", 1)),
    "keys for values": (Swapped, ("k_rope", "forward", 0)),
    "heads in turns": (InTurns, ("q_rope", "forward", 0)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault):
    kind, place = FAULTS[fault]
    check = check_of(kind())
    assert check.verdict == "disagreed" and check.origin is not None
    assert (check.origin.stage, check.origin.phase, check.origin.layer) == place


@pytest.mark.parametrize("model", [{"family": "gpt2", "kv_heads": 4, "positions": 32}, {"mlp_bias": True}])
def test_a_model_that_it_does_not_compute_is_refused(model):
    with pytest.raises(UserError, match="--candidate litgpt computes Llama"):
        LitGptCandidate().open(tiny_config("fp32", **model))
