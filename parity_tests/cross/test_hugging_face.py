"""A third opinion: both models against Hugging Face Transformers' own, with the same weights, by `--reference hf`.

One misreading of the architecture written twice agrees with itself; it does not agree with this. Sizes are odd: no two
axes are equally long, so that none passes for another.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import lockstep.jax_backend.model as jax_model
import lockstep.torch_backend.attention as torch_attention
import lockstep.torch_backend.model as torch_model
from lockstep.core.backend import State
from lockstep.core.config.schema import AttentionConfig, LossConfig
from lockstep.core.errors import UserError
from lockstep.core.hub.families import HUB
from lockstep.core.model import families
from lockstep.core.model.names import cancelled
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.jax_backend.attention import window_mask
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.cross.variants import ALL_BIASES, relative, shaken_state
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.tools.hugging_face import HuggingFaceBackend

ODD = {"vocab_size": 301, "hidden": 60, "layers": 2, "heads": 6, "kv_heads": 3, "ffn_hidden": 87}
VARIANTS = {
    "tied, 2 KV heads": {"kv_heads": 2},
    "untied, 4 KV heads, biases, theta 10^4": {
        **{"tied": False, "heads": 4, "hidden": 56, "kv_heads": 4, "rope_theta": 1e4, **ALL_BIASES},
    },
    "untied, 1 KV head, eps 10^-3": {"tied": False, "kv_heads": 1, "norm_eps": 1e-3},
}
FAMILIES = {
    "llama 3.1": {"rope_factor": 8.0, "rope_original": 24, "rope_high": 3.0},
    "gpt2": {"family": "gpt2", "kv_heads": 6, "positions": 31},
    "gpt2, untied": {"family": "gpt2", "kv_heads": 6, "positions": 29, "tied": False, "norm_eps": 1e-3},
    "qwen2": {"family": "qwen2", "rope_theta": 1e4},
    "qwen3": {"family": "qwen3", "head_width": 14, "tied": False},
    "mistral": {"family": "mistral", "window": 9, "head_width": 14},
    "mistral, no window": {"family": "mistral"},
    "gemma2": {
        **{"family": "gemma2", "window": 9, "head_width": 14, "attention_scale": 20**-0.5},
        **{"attention_cap": 0.5, "logits_cap": 0.4, "layers": 3},
    },
    "gemma2, no caps": {"family": "gemma2", "window": 29},
}
# As torch and JAX agree (docs/results/agreement.md): FP64 is the same function, FP32 the same but for rounding.
FP64, FP32 = 1e-12, 1e-5
BACKENDS = {"torch": TorchBackend, "jax": JaxBackend, "hf": HuggingFaceBackend}


def config_of(policy: str = "fp64", **model):
    train = {"batch_size": 3, "micro_batch_size": 3, "sequence_length": 29}
    return tiny_config(policy, train=train, **(ODD | model))


def opinions(config, state, batch, backends=tuple(BACKENDS)):
    """Return, by backend and name, logits, NLL, loss, and the gradient of every parameter."""
    found = {}
    for name in backends:
        session = BACKENDS[name]().open(config)
        session.load(state)
        gradients = session.gradients(batch)
        # A gradient that is 0 in exact arithmetic has no digits to compare.
        grads = {f"grad {n}": g for n, g in gradients.grads.items() if n not in cancelled(config.model)}
        logits = session.observe(batch, ["logits"])["logits"]
        found[name] = {"logits": logits, "nll": gradients.nll, "loss": np.asarray(gradients.loss), **grads}
        session.close()
    return found


def apart(one, other):
    """Return the relative distance of each."""
    assert one.keys() == other.keys() and len(one) >= 20
    return {name: relative(one[name], other[name]) for name in one}


def too_far(distances, limit):
    return {name: d for name, d in distances.items() if not d <= limit}


@pytest.fixture(scope="module", params=VARIANTS)
def ours(request):
    """Return configuration, weights, batch, and the results of our two models in FP64."""
    config = config_of(**VARIANTS[request.param])
    batch, state = uneven_weights(text_batch(config), 0), shaken_state(config.model)
    return config, state, batch, opinions(config, state, batch, ("torch", "jax"))


def test_ours_is_their_function(ours):
    """Measured 2.4e-15 at most."""
    config, state, batch, found = ours
    theirs = opinions(config, state, batch, ("hf",))["hf"]
    assert theirs["nll"].dtype == theirs["logits"].dtype == np.float64
    assert not too_far(apart(found["torch"], theirs), FP64)
    assert not too_far(apart(found["jax"], theirs), FP64)


@pytest.mark.parametrize("attention", [{}, {"document_mask": True, "reset_positions": True}], ids=["", "documents"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_their_function(name, attention):
    """FP64 to 1e-12 and FP32 to 1e-5: logits, NLL, loss and every gradient.

    Measured 1.9e-14 at most, and 2.3e-6; of GPT-2 9.6e-6, in gradients of queries and keys, which cancel most.
    """
    config = config_of(**FAMILIES[name]).model_copy(update={"attention": AttentionConfig(**attention)})
    batch, state = uneven_weights(text_batch(config), 0), shaken_state(config.model)
    found = opinions(config, state, batch)
    assert not too_far(apart(found["torch"], found["hf"]), FP64)
    assert not too_far(apart(found["jax"], found["hf"]), FP64)
    narrow = config.model_copy(update={"precision": tiny_config("fp32").precision})
    found = opinions(narrow, in_fp32(state), batch)
    assert not too_far(apart(found["torch"], found["hf"]), FP32)
    assert not too_far(apart(found["jax"], found["hf"]), FP32)


def test_every_family_has_an_opinion():
    tried = {one.get("family", "llama") for one in FAMILIES.values()}
    assert tried == families.FAMILIES.keys() == HUB.keys()


def in_fp32(state):
    params = {name: p.astype(np.float32) for name, p in state.params.items()}
    zeros = {name: np.zeros_like(p) for name, p in params.items()}
    return State(0, params, {"exp_avg": zeros, "exp_avg_sq": zeros})


def test_theirs_as_it_comes_differs_by_fp32_alone(ours):
    """Transformers' code without any change, in FP32, and both of ours in FP32. Measured 1.5e-6 at most."""
    config, state, batch, _ = ours
    narrow = config.model_copy(update={"precision": tiny_config("fp32").precision})
    found = opinions(narrow, in_fp32(state), batch)
    assert found["hf"]["nll"].dtype == np.float32
    assert not too_far(apart(found["torch"], found["hf"]), FP32)
    assert not too_far(apart(found["jax"], found["hf"]), FP32)
    # They are not the same bits: the limit is one that something comes near to.
    assert max(apart(found["torch"], found["hf"]).values()) > 1e-8


@pytest.mark.parametrize("other", [{"norm_eps": 2e-3}, {"rope_theta": 2e4}])
def test_another_setting_is_seen(ours, other):
    config, state, batch, found = ours
    changed = config.model_copy(update={"model": config.model.model_copy(update=other)})
    theirs = opinions(changed, state, batch, ("hf",))["hf"]
    assert all(relative(by_name["logits"], theirs["logits"]) > 1e-6 for by_name in found.values())


def test_two_heads_exchanged_are_seen(ours):
    config, state, batch, found = ours
    name, size = "blocks.1.attn.q_proj.weight", config.model.head_dim
    heads = state.params[name].reshape(-1, size, config.model.hidden)
    wrong = {**state.params, name: heads[[1, 0, *range(2, len(heads))]].reshape(state.params[name].shape)}
    theirs = opinions(config, State(0, wrong, state.optimizer), batch, ("hf",))["hf"]
    assert all(relative(by_name["logits"], theirs["logits"]) > 1e-4 for by_name in found.values())


# The same mistake in both of our models


def pairs_of_neighbours(patch):
    """RoPE rotates dimensions 2i and 2i + 1, as the paper writes it, and not i and i + E/2."""

    def in_torch(self, x, rope):
        cos, sin = rope.cos[..., None, :], rope.sin[..., None, :]
        left, right = x[..., ::2], x[..., 1::2]
        return torch.stack((left * cos - right * sin, right * cos + left * sin), -1).flatten(-2)

    def in_jax(self, x, rope):
        cos, sin = rope.cos[..., None, :], rope.sin[..., None, :]
        left, right = x[..., ::2], x[..., 1::2]
        return jnp.stack((left * cos - right * sin, right * cos + left * sin), -1).reshape(x.shape)

    patch.setattr(torch_model.Attention, "rotate", in_torch)
    patch.setattr(jax_model.Attention, "rotate", in_jax)


def heads_in_turns(patch):
    """Key-value heads lie 0 1 2 0 1 2 and not 0 0 1 1 2 2."""
    patch.setattr(torch_model.Attention, "expand", lambda self, x: x.repeat(1, 1, self.heads // self.kv_heads, 1))
    patch.setattr(jax_model.Attention, "expand", lambda self, x: jnp.tile(x, (1, 1, self.heads // self.kv_heads, 1)))


def twice_epsilon(patch):
    for model in (torch_model, jax_model):
        norm = model.rms_norm
        patch.setattr(model, "rms_norm", lambda x, gain, eps, norm=norm: norm(x, gain, 2 * eps))


def epsilon_outside_the_root(patch):
    """Divide by √mean(x²) + ε."""
    patch.setattr(
        torch_model, "rms_norm", lambda x, gain, eps: x / (x.square().mean(-1, keepdim=True).sqrt() + eps) * gain
    )
    patch.setattr(
        jax_model, "rms_norm", lambda x, gain, eps: x / (jnp.sqrt(jnp.square(x).mean(-1, keepdims=True)) + eps) * gain
    )


def tanh_for_the_logistic(patch):
    """Compute the gate x · σ(x) by tanh with an inexact constant, as GELU's tanh replaces erf."""
    patch.setattr(
        torch_model.SwiGLU, "activate", lambda self, gate, up: gate * 0.5 * (1 + torch.tanh(0.4999 * gate)) * up
    )
    patch.setattr(jax_model.SwiGLU, "activate", lambda self, gate, up: gate * 0.5 * (1 + jnp.tanh(0.4999 * gate)) * up)


def erf_for_tanh(patch):
    patch.setattr(torch_model.MLP, "activate", lambda self, up: F.gelu(up))
    patch.setattr(jax_model, "gelu", lambda x: jax.nn.gelu(x, approximate=False))


def a_window_of_one_token_more(patch):
    patch.setattr(
        torch_attention.Kernel, "window", lambda self, d, window, *more: right_window(self, d, window + 1, *more)
    )
    patch.setattr(jax_model, "window_mask", lambda d, window, length: window_mask(d, window + 1, length))


def a_cap_without_its_factor(patch):
    patch.setattr(torch_model.Transformer, "cap", lambda self, logits: torch.tanh(logits / self.logits_cap))
    patch.setattr(jax_model.Transformer, "cap", lambda self, logits: jnp.tanh(logits / self.logits_cap))


def frequencies_divided_whole(patch):
    def in_either(config):
        return (lambda frequencies: frequencies / config.rope_factor,)

    patch.setattr(torch_model, "stretch_of", in_either)
    patch.setattr(jax_model, "stretch_of", in_either)


right_window = torch_attention.Kernel.window
MISTAKES = (pairs_of_neighbours, heads_in_turns, twice_epsilon, epsilon_outside_the_root, tanh_for_the_logistic)
OF_FAMILIES = {
    erf_for_tanh: "gpt2",
    a_window_of_one_token_more: "mistral",
    a_cap_without_its_factor: "gemma2",
    frequencies_divided_whole: "llama 3.1",
}


@pytest.mark.parametrize("plant", OF_FAMILIES, ids=[plant.__name__ for plant in OF_FAMILIES])
def test_a_mistake_about_a_family_in_both_of_ours_is_seen_by_it_alone(plant, monkeypatch):
    config = config_of(**FAMILIES[OF_FAMILIES[plant]])
    if plant is a_cap_without_its_factor:
        config = config.model_copy(update={"loss": LossConfig(head="full")})
    batch, state = uneven_weights(text_batch(config), 0), shaken_state(config.model)
    plant(monkeypatch)
    found = opinions(config, state, batch)
    assert not too_far(apart(found["torch"], found["jax"]), FP64)
    for name in ("torch", "jax"):
        distances = apart(found[name], found["hf"])
        assert {"logits", "nll", "loss"} <= too_far(distances, FP64).keys() and distances["logits"] > 1e-6


@pytest.mark.parametrize("plant", MISTAKES, ids=[plant.__name__ for plant in MISTAKES])
def test_a_mistake_in_both_of_ours_is_seen_by_it_alone(plant, monkeypatch):
    config = config_of()
    batch, state = uneven_weights(text_batch(config), 0), shaken_state(config.model)
    plant(monkeypatch)
    found = opinions(config, state, batch)
    # Torch and JAX agree as if nothing were wrong.
    assert not too_far(apart(found["torch"], found["jax"]), FP64)
    for name in ("torch", "jax"):
        distances = apart(found[name], found["hf"])
        wrong = too_far(distances, FP64)
        assert {"logits", "nll", "loss"} <= wrong.keys() and distances["logits"] > 1e-6
        assert len(wrong) == len(distances), sorted(distances.keys() - wrong.keys())


# Documents, what the loss has besides, and what it does not do


@pytest.mark.parametrize("attention", [{"document_mask": True}, {"reset_positions": True}, {
    "document_mask": True, "reset_positions": True}], ids=["mask", "positions", "both"])  # fmt: skip
def test_documents_are_theirs_too(attention):
    config = config_of().model_copy(update={"attention": AttentionConfig(**attention)})
    batch, state = uneven_weights(text_batch(config), 0), shaken_state(config.model)
    assert len(np.unique(batch.documents)) > 1
    found = opinions(config, state, batch, ("torch", "hf"))
    assert not too_far(apart(found["torch"], found["hf"]), FP64)
    plain = opinions(config_of(), state, batch, ("hf",))["hf"]
    assert relative(plain["logits"], found["hf"]["logits"]) > 1e-4


def test_the_z_loss_and_micro_batches_are_in_its_loss():
    config = config_of().model_copy(update={"loss": LossConfig(z_loss=1e-2, head="full")})
    config = config.model_copy(update={"train": config.train.model_copy(update={"micro_batch_size": 1})})
    batch, state = uneven_weights(text_batch(config), 0), shaken_state(config.model)
    found = opinions(config, state, batch, ("torch", "hf"))
    assert not too_far(apart(found["torch"], found["hf"]), FP64)


def test_it_gives_back_the_weights_that_it_was_given():
    config = config_of(**ALL_BIASES)
    state = shaken_state(config.model)
    session = HuggingFaceBackend().open(config)
    session.load(state)
    shown = session.state()
    assert shown.params.keys() == state.params.keys() and shown.optimizer is state.optimizer
    assert all(np.array_equal(shown.params[name], p) for name, p in state.params.items())
    with pytest.raises(ValueError, match="has shape"):
        session.load(State(0, {**state.params, "final_norm.weight": np.ones(3)}, {}))


def test_what_it_does_not_compute_is_refused():
    with pytest.raises(UserError, match=r"precision\.policy = 'bf16': hf computes in fp32 and fp64"):
        HuggingFaceBackend().open(config_of("bf16"))
    with pytest.raises(UserError, match=r"model\.qkv_bias and model\.o_bias differ: LlamaForCausalLM has one"):
        HuggingFaceBackend().open(config_of(qkv_bias=True))
    one = config_of()
    with pytest.raises(UserError, match=r"model\.family = 'other': hf computes llama"):
        HuggingFaceBackend().open(one.model_copy(update={"model": one.model.model_copy(update={"family": "other"})}))


def test_the_change_of_their_code_ends_with_the_call():
    """FP64 means FP32 inside their module only while a session computes."""
    from transformers.models.llama import modeling_llama

    session = HuggingFaceBackend().open(config_of())
    session.gradients(text_batch(config_of()))
    assert modeling_llama.torch is torch and modeling_llama.torch.float32 is torch.float32
