"""Any module as a candidate: transformers' models of every family, somebody's own models, faults planted in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lockstep import fused
from lockstep.core.backend import NotSupported
from lockstep.core.config.schema import AttentionConfig, CompileConfig, LossConfig, RunConfig
from lockstep.core.errors import UserError
from lockstep.core.hub.families import HUB
from lockstep.core.model.names import cancelled
from lockstep.core.parity.evidence.taps import observed_names
from lockstep.core.parity.modes.side_by_side import check_steps
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.candidates.ten_lines import MyGpt, MyLlama
from lockstep.parity_tests.cross.variants import relative
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.candidate.hugging_face import HuggingFaceCandidate
from lockstep.torch_backend.candidate.module import ModuleCandidate

GPT2: dict[str, Any] = {"family": "gpt2", "kv_heads": 4, "positions": 32, "ffn_hidden": 256}
FAMILIES = {
    "llama": {},
    "gpt2": GPT2,
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "head_width": 24, "tied": False},
    "mistral": {"family": "mistral", "window": 9},
    "gemma2": {"family": "gemma2", "window": 9, "attention_cap": 30.0, "logits_cap": 20.0},
}
MODELS = {
    **{name: (HuggingFaceCandidate, model) for name, model in FAMILIES.items()},
    "a GPT of ten lines": (MyGpt, GPT2),
    "a Llama of ten lines": (MyLlama, {"tied": False}),
}
# Hooks do not show the share of a sum in the residual stream, nor those of one module that several of ours are.
NO_EDGE = ("residual.x", "norm.x", "logits.weight")
FP32 = 1e-5


def check_of(candidate, config, steps=1):
    batches = [text_batch(config, seed) for seed in range(steps)]
    return list(check_steps(candidate, JaxBackend(), config, batches))[-1]


def test_every_family_is_tried():
    assert FAMILIES.keys() == HUB.keys()


@pytest.mark.parametrize("name", MODELS)
def test_taps_state_and_scores_are_those_of_the_trainer(name):
    """In FP32 to 1e-5: every tap, its gradient, and what a step leaves; bits with and without hooks are the same."""
    kind, model = MODELS[name]
    config = tiny_config("fp32", **model)
    micro, names = text_batch(config).micro_batches(2)[0], observed_names(config)
    ours, theirs = TorchBackend().open(config), kind().open(config)
    expected, found = ours.observe(micro, names), theirs.observe(micro, names)
    fused = "of ten lines" in name or name == "gpt2"
    left = {one for one in set(names) - found.keys() if not one.endswith(NO_EDGE)}
    assert all(fused and one.endswith((".q.x", ".k.x", ".v.x", ".gate.x", ".up.x")) for one in left)
    assert theirs.hidden_taps() == {}
    zero = cancelled(config.model)
    far = {one: d for one in found if not (d := relative(found[one], expected[one])) <= FP32}
    assert not [one for one in far if one.removeprefix("grad/") not in zero]
    grads = theirs.gradients(micro).grads
    assert all(np.array_equal(grads[one], found[f"grad/{one}"]) for one in grads)
    batch = text_batch(config)
    one, other = ours.step(batch), theirs.step(batch)
    assert (one.step, one.lr, one.digest, one.tokens) == (other.step, other.lr, other.digest, other.tokens)
    assert other.loss == pytest.approx(one.loss, rel=1e-6) and other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    state = ours.state()
    theirs.load(state)
    again = theirs.state()
    assert again.step == 1 and set(theirs.update_counts().values()) == {1}
    assert again.params.keys() == state.params.keys() == theirs.update_counts().keys()
    assert all(np.array_equal(again.params[one], state.params[one]) for one in state.params)
    moments = [(kind, one) for kind in state.optimizer for one in state.optimizer[kind]]
    assert all(np.array_equal(again.optimizer[kind][one], state.optimizer[kind][one]) for kind, one in moments)
    scores, due = theirs.evaluate(micro), ours.evaluate(micro)
    assert relative(scores["nll"], due["nll"]) <= FP32 and np.array_equal(scores["top1"], due["top1"])
    assert relative(theirs.next_token_logits(batch.tokens[0]), ours.next_token_logits(batch.tokens[0])) <= FP32


@pytest.mark.parametrize("name", MODELS)
def test_a_clean_candidate_agrees(name):
    kind, model = MODELS[name]
    check = check_of(kind(), tiny_config("fp32", **model), steps=2)
    assert check.verdict == "agreed"
    seen = {(one.stage, one.phase) for one in check.findings if one.scope == "local"}
    stages = {
        "llama": {"q_rope", "attn", "act", "o_proj"},
        "gpt2": {"position", "attn", "gelu_act"},
        "mistral": {"window_attn"},
    }
    for stage in stages.get(name, {"attn", "down_proj", "nll"}):
        assert {(stage, "forward"), (stage, "backward")} <= seen
    assert {"checkpoint", "evaluation", "accumulation", "moments", "update"} <= {one.stage for one in check.findings}
    assert not [line for line in check.not_covered if "local checks of" in line and "sequences" not in line]


class Plain(HuggingFaceCandidate):
    """transformers' model, in which something is changed."""

    def build(self, config):
        model = super().build(config)
        self.change(model)
        return model


class OtherEpsilon(Plain):
    def change(self, model):
        for layer in model.model.layers:
            layer.post_attention_layernorm.variance_epsilon = 1e-3


class OtherBase(Plain):
    def change(self, model):
        rope = model.model.rotary_emb
        rope.inv_freq = 1e4 ** -(torch.arange(0, 16, 2) / 16)


class MeanOfMeans(HuggingFaceCandidate):
    def share(self, nll, weights, total, count):
        return (nll * weights).sum() / weights.sum() / count


class Longer(HuggingFaceCandidate):
    def clip(self, config, parameters):
        norm, coefficient = super().clip(config, parameters)
        for p in parameters:
            p.grad *= 1.01
        return norm, coefficient


class ErfGelu(Plain):
    def change(self, model):
        for block in model.transformer.h:
            block.mlp.act = torch.nn.GELU()


class Swapped(MyGpt):
    """Keys and values change places."""

    modules = {**MyGpt.modules, "blocks.{i}.qkv": fused("attn.q_proj", "attn.v_proj", "attn.k_proj")}


class Paired(MyLlama):
    """Weights laid out for a rotation of halves, in a model that turns neighbours."""

    modules = {
        **MyLlama.modules,
        "blocks.{i}.qkv": fused("attn.q_proj", "attn.k_proj", "attn.v_proj", by_group=True),
    }


FAULTS = {
    "an epsilon": (OtherEpsilon, {}, ("mlp_norm", "forward", 0)),
    "a base of RoPE": (OtherBase, {}, ("q_rope", "forward", 0)),
    "a mean of micro-batches' means": (MeanOfMeans, {}, ("loss", "forward", None)),
    "gradients longer than they are clipped to": (Longer, {}, ("moments", "update", None)),
    "keys for values": (Swapped, GPT2, ("attn", "forward", 0)),
    "the other pairing of RoPE": (Paired, {"tied": False}, ("q_rope", "forward", 0)),
    "GELU by erf": (ErfGelu, GPT2, ("gelu_act", "forward", 0)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault):
    kind, model, place = FAULTS[fault]
    check = check_of(kind(), tiny_config("fp32", **model))
    assert check.verdict == "disagreed" and check.origin is not None
    assert (check.origin.stage, check.origin.phase, check.origin.layer) == place


class Hidden(MyLlama):
    """A candidate that does not name the place of its rotation."""

    calls = {}


def test_a_tap_that_nothing_names_is_not_covered_and_the_rest_is_judged():
    config = tiny_config("fp32", tied=False)
    check = check_of(Hidden(), config)
    assert check.verdict == "agreed"
    lines = [line for line in check.not_covered if "does not show" in line]
    assert lines == [
        "local checks of q_rope: the candidate does not show attn.q_rope",
        "local checks of k_rope: the candidate does not show attn.k_rope",
        "local checks of attn: the candidate does not show attn.q_rope, attn.k_rope",
    ]
    judged = {one.stage for one in check.findings if one.scope == "local"}
    assert {"q", "k", "v", "o_proj", "act"} <= judged and not {"q_rope", "k_rope", "attn"} & judged


class TiedHere(MyLlama):
    def build(self, config):
        model = super().build(config)
        model.out.weight = model.wte.weight
        return model


class MoreWeights(MyLlama):
    def build(self, config):
        model = super().build(config)
        model.blocks[1].scale = torch.nn.Parameter(torch.ones(3))
        return model


class NoModel(ModuleCandidate):
    pass


class ASum(MyLlama):
    def losses(self, model, tokens, targets):
        return super().losses(model, tokens, targets).sum()


def changed(kind, **attributes):
    return type("Changed", (kind,), attributes)


def with_modules(modules, without=""):
    left = {path: ours for path, ours in MyLlama.modules.items() if path != without}
    return changed(MyLlama, modules=left | modules)


BAD = {
    "no such parameter": (
        with_modules({"nrom": "final_norm"}, without="norm"),
        "the model has no parameter nrom.weight; did you mean norm.weight?",
    ),
    "another shape": (
        with_modules({"blocks.{i}.down": fused("mlp.down_proj", transposed=True)}),
        "modules: blocks.0.down.weight has shape (64, 128); of blocks.0.mlp.down_proj.weight it would have (128, 64)",
    ),
    "one of theirs left over": (MoreWeights, "modules: the model's parameter blocks.1.scale is not mapped"),
    "tied there alone": (TiedHere, "modules: two names belong to one parameter of the model: its weights are tied"),
    "no module for a tap": (
        changed(MyLlama, taps={"attn.out": "blocks.{i}.prj"}),
        "taps: blocks.0.attn.out: the model has no module blocks.0.prj; did you mean blocks.0.proj?",
    ),
    "no such tap": (
        changed(MyLlama, taps={"attn.outt": "blocks.{i}.proj:input"}),
        "taps: a llama model has no tap blocks.0.attn.outt; did you mean blocks.0.attn.out?",
    ),
    "no such side": (
        changed(MyLlama, taps={"attn.out": "blocks.{i}.proj:in"}),
        "taps: attn.out: 'in' is not an input or output of a ",
    ),
    "no model": (NoModel, "NoModel builds no model: write build(self, config)"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_candidate_that_does_not_fit_is_refused_in_a_line(case):
    kind, said = BAD[case]
    with pytest.raises(UserError) as error:
        kind().open(tiny_config("fp32", tied=False))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_losses_and_taps_of_other_shapes_are_refused():
    config = tiny_config("fp32", tied=False)
    batch = text_batch(config).micro_batches(2)[0]
    with pytest.raises(UserError, match="losses gave \\(\\), not one loss for each of \\(2, 32\\) tokens"):
        ASum().open(config).gradients(batch)
    wrong = changed(MyLlama, taps={"attn.out": "blocks.{i}.gate_up"})
    with pytest.raises(UserError, match=r"taps: blocks.0.attn.out has shape .* there; ours is"):
        wrong().open(config).observe(batch, ["blocks.0.attn.out"])
    with pytest.raises(NotSupported, match=r"no such tap: blocks.7.attn.q"):
        MyLlama().open(config).observe(batch, ["blocks.7.attn.q"])


NOT_IN_FORCE = {
    "optim.name = 'muon' updates parts of a matrix together, and transformer.h.0.attn.c_attn.weight has another": {
        "optim": {"name": "muon", "warmup_steps": 3},
        "model": tiny_config(**GPT2).model,
    },
    "precision.policy = 'bf16': transformers' gpt2 rounds under torch.autocast where no precision.casts can": {
        "precision": {"policy": "bf16"},
        "model": tiny_config(**GPT2).model,
    },
    "precision.policy = 'fp16'": {"precision": {"policy": "fp16"}},
    "compile.enabled = true": {"compile": CompileConfig(enabled=True, backend="aot_eager")},
    "attention.document_mask": {"attention": AttentionConfig(document_mask=True)},
    "loss.head and loss.z_loss": {"loss": LossConfig(z_loss=1e-4)},
}


@pytest.mark.parametrize("case", NOT_IN_FORCE)
def test_settings_that_would_not_be_in_force_are_refused(case):
    config = RunConfig.model_validate(tiny_config("fp32").model_dump() | NOT_IN_FORCE[case])
    with pytest.raises(UserError) as error:
        HuggingFaceCandidate().open(config)
    assert case in str(error.value)
