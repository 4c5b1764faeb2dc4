"""The reference is held to closed forms before it judges; a wrong one is refused by name."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from jax import lax

import lockstep.jax_backend.attention
import lockstep.jax_backend.model
import lockstep.jax_backend.precision
import lockstep.jax_backend.stages
import lockstep.torch_backend.attention
import lockstep.torch_backend.model
import lockstep.torch_backend.optim
import lockstep.torch_backend.precision
import lockstep.torch_backend.stages
from lockstep.core.config.schema import AttentionConfig, LossConfig, OptimConfig, RunConfig
from lockstep.core.errors import UserError
from lockstep.core.model.groups import GroupSettings
from lockstep.core.parity.modes.side_by_side import check_steps
from lockstep.core.parity.reference.self_check import check_reference, require_sound, small, sound_reference
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.kernels.recompute_products import rms_norm
from lockstep.torch_backend.model import Attention, SwiGLU, Transformer

BIASES: dict[str, Any] = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}


@pytest.mark.parametrize("policy", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("model", [{"tied": True}, {"tied": False, "kv_heads": 4} | BIASES, {"kv_heads": 1}])
def test_torch_as_a_reference_is_sound(policy, model):
    check = check_reference(TorchBackend(), tiny_config(policy, **model))
    assert check.wrong == ()
    assert check.not_covered == ()
    assert {f.stage for f in check.findings} >= {"embed", "attn", "nll", "update", "moments"}


def with_z_loss(config, z_loss=1e-3, head="chunked"):
    return config.model_copy(update={"loss": LossConfig(head=head, z_loss=z_loss)})


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(tiny_config("bf16"), id="bf16"),
        pytest.param(with_z_loss(tiny_config("fp32", **BIASES)), id="fp32-z-loss-biases"),
        pytest.param(with_z_loss(tiny_config("bf16", **BIASES)), id="bf16-z-loss-biases"),
    ],
)
def test_the_reference_is_sound(config):
    check = require_sound(JaxBackend(), config)
    assert len(check.findings) > 200
    assert check.not_covered == ()


def of(policy="bf16", **sections):
    """Build a run with other settings than the rest of the tests, by section; `model` is by its keys."""
    config = tiny_config(policy, **sections.pop("model", {}))
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed)


# Each setting that changes what a step computes, away from its default.
SETTINGS = {
    "z-loss": of(loss={"z_loss": 1e-4}),
    "a large z-loss of whole logits": of("fp32", loss={"z_loss": 0.5, "head": "full"}),
    "one chunk a token": of(loss={"chunk": 1}),
    "the head of torch, in chunks": of(loss={"head": "torch", "chunk": 3}),
    "an ε that drowns the mean square": of(model={"norm_eps": 1.0}),
    "an ε that vanishes": of(model={"norm_eps": 1e-12}),
    "a small θ": of(model={"rope_theta": 2.0}),
    "a large θ": of(model={"rope_theta": 1e8}),
    "an odd vocabulary, one query head a KV head": of(model={"vocab_size": 257, "kv_heads": 4, "tied": False}),
    "rates and decays by group": of(
        optim={
            "embedding_weight_decay": 0.3,
            "gains_weight_decay": 0.2,
            "matrices_lr_scale": 0.5,
            "gains_lr_scale": 2.0,
        }
    ),
    "rates by width and batch": of(optim={"base_width": 32, "base_batch": 2}),
    "no memory, no clipping": of(optim={"beta1": 0.0, "beta2": 0.0, "clip_norm": 0.0, "eps": 0.1}),
    "Muon": of(optim={"name": "muon", "ns_steps": 3, "nesterov": False}),
    "8-bit AdamW": of(optim={"name": "adamw8bit"}),
    "FP8 by rows, some layers": of("fp8_rowwise", precision={"fp8_layers": "blocks.0.mlp.*"}),
    "FP16": of("fp16", precision={"loss_scale": 1.0}),
    "ranks that sum in bf16": of(train={"ranks": 2}, parallel={"gradient_dtype": "bf16"}),
    "a curriculum": of(train={"curriculum": "32:0.5, 64:0.5"}),
    "attention written out": of(attention={"kernel": "math"}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_no_setting_makes_a_sound_reference_wrong(name):
    check = check_reference(TorchBackend(), SETTINGS[name])
    assert (check.wrong, check.not_covered) == ((), ())


@pytest.mark.parametrize("wrong", [0.0, 2.0], ids=["left out", "doubled"])
def test_a_reference_that_is_wrong_about_z_loss_is_named(wrong, monkeypatch):
    right = MODEL.negative_log_likelihood
    monkeypatch.setattr(MODEL, "negative_log_likelihood", lambda logits, targets, z: right(logits, targets, wrong * z))
    check = check_reference(TorchBackend(), with_z_loss(tiny_config("fp32"), 1e-4))
    assert {f.stage for f in check.wrong} == {"nll"}


@pytest.mark.parametrize("head", ["full", "liger"])
def test_a_run_with_z_loss_is_checked(head):
    """By its closed form, and by differences of its forward pass; of a library's head, with the products in it."""
    check = check_reference(JaxBackend(), with_z_loss(tiny_config("fp64", layers=1), head=head))
    assert (check.wrong, check.not_covered) == ((), ())


def unscaled(self, q, k, v, policy):
    q, k, v = (x.to(policy.operand).transpose(1, 2) for x in (q, self.expand(k), self.expand(v)))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0).transpose(1, 2).to(policy.stream)


def sees_all(self, q, k, v, policy):
    q, k, v = (x.to(policy.operand).transpose(1, 2) for x in (q, self.expand(k), self.expand(v)))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).to(policy.stream)


def interleaved(self, x, rope):
    cos, sin = rope.cos[..., None, :], rope.sin[..., None, :]
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def counted_from_one(length, head_dim, theta, angles):
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angle = torch.arange(1, length + 1, dtype=torch.float64)[:, None] * theta**-exponent
    return angle.cos(), angle.sin()


def layer_norm(x, weight, eps):
    return F.layer_norm(x, x.shape[-1:], eps=eps) * weight


def eps_outside(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True).sqrt() + eps) * weight


def gain_on_one(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight)


def no_maximum_gradient(logits, targets, z_loss):
    shifted = logits.double() - logits.double().logsumexp(-1, keepdim=True).detach()
    return -shifted.gather(-1, targets[..., None]).squeeze(-1).to(logits.dtype)


def in_single(logits, targets, z_loss):
    rounded = logits.float().logsumexp(-1) - logits.float().gather(-1, targets[..., None]).squeeze(-1)
    return rounded.to(logits.dtype)


def twice_biased(x, weight, bias, policy, float8):
    y = F.linear(x.to(policy.operand), weight.to(policy.operand)).to(policy.stream)
    return y if bias is None else y + 2 * bias


def transposed(x, weight, bias, policy, float8):
    square = weight.shape[0] == weight.shape[1]
    y = F.linear(x.to(policy.operand), (weight.T if square else weight).to(policy.operand)).to(policy.stream)
    return y if bias is None else y + bias


def crossed(forward):
    """Add attention's output to the normed stream; every stage on its own is right."""

    def block(self, x, rope, policy, tap, name):
        normed = tap(f"{name}.attn_norm", self.attn_norm(tap(f"{name}.attn_norm.x", x)))
        out = self.attn(normed, rope, policy, tap, f"{name}.attn")
        x = tap(f"{name}.attn_residual", tap(f"{name}.attn_residual.x", normed) + out)
        normed = tap(f"{name}.mlp_norm", self.mlp_norm(tap(f"{name}.mlp_norm.x", x)))
        out = self.mlp(normed, policy, tap, f"{name}.mlp")
        return tap(f"{name}.mlp_residual", tap(f"{name}.mlp_residual.x", x) + out)

    return block


def everywhere(patch, name, function, *modules):
    for module in modules:
        patch.setattr(module, name, function)


MODEL, STAGES = lockstep.torch_backend.model, lockstep.torch_backend.stages
PLANTED = {
    "softmax without 1/√E": ("attn", lambda p: p.setattr(Attention, "attend", unscaled)),
    "no causal mask": ("attn", lambda p: p.setattr(Attention, "attend", sees_all)),
    "KV heads tiled": (
        "attn",
        lambda p: p.setattr(Attention, "expand", lambda self, x: x.repeat(1, 1, self.heads // self.kv_heads, 1)),
    ),
    "rotary pairs interleaved": ("q_rope", lambda p: p.setattr(Attention, "rotate", interleaved)),
    "positions from one": ("q_rope", lambda p: p.setattr(MODEL, "rope_tables", counted_from_one)),
    "LayerNorm": ("attn_norm", lambda p: everywhere(p, "rms_norm", layer_norm, MODEL, STAGES)),
    "ε outside the root": ("attn_norm", lambda p: everywhere(p, "rms_norm", eps_outside, MODEL, STAGES)),
    "gain on one": ("attn_norm", lambda p: everywhere(p, "rms_norm", gain_on_one, MODEL, STAGES)),
    "GELU": ("act", lambda p: p.setattr(SwiGLU, "activate", lambda self, g, u: F.gelu(g) * u)),
    "gate and up swapped": ("act", lambda p: p.setattr(SwiGLU, "activate", lambda self, g, u: F.silu(u) * g)),
    "nll without the softmax's gradient": (
        "nll",
        lambda p: p.setattr(MODEL, "negative_log_likelihood", no_maximum_gradient),
    ),
    "nll in FP32": ("nll", lambda p: p.setattr(MODEL, "negative_log_likelihood", in_single)),
    "bias added twice": ("q", lambda p: everywhere(p, "linear", twice_biased, MODEL, STAGES)),
    "square weights transposed": ("q", lambda p: everywhere(p, "linear", transposed, MODEL, STAGES)),
    "residual from the normed stream": (
        "attn_residual",
        lambda p: p.setattr(MODEL.Block, "forward", crossed(MODEL.Block.forward)),
    ),
    "gains decay": (
        "update",
        lambda p: p.setattr(
            lockstep.torch_backend.optim,
            "group_settings",
            lambda config, group: GroupSettings(1.0, config.optim.weight_decay),
        ),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_reference_is_named(name, monkeypatch):
    stage, plant = PLANTED[name]
    plant(monkeypatch)
    check = check_reference(TorchBackend(), tiny_config("fp32", **BIASES))
    assert stage in {f.stage for f in check.wrong}
    # Errors of a stage that all three norms share are seen in all three, and nowhere that is right.
    related = {"q": {"q", "k", "v", "o_proj", "gate", "up", "down_proj"}}.get(stage, {stage})
    related |= {"attn_norm", "mlp_norm", "final_norm"} if stage == "attn_norm" else set()
    related |= {"q_rope", "k_rope"} if stage == "q_rope" else set()
    assert {f.stage for f in check.wrong} <= related


DOCUMENTS = {
    "mask": AttentionConfig(document_mask=True),
    "positions": AttentionConfig(reset_positions=True),
    "both": AttentionConfig(document_mask=True, reset_positions=True),
}


def of_documents(settings, policy="fp64"):
    return tiny_config(policy).model_copy(update={"attention": DOCUMENTS[settings]})


@pytest.mark.parametrize("settings", DOCUMENTS)
@pytest.mark.parametrize("backend", [TorchBackend, JaxBackend])
def test_a_reference_of_packed_documents_is_sound(backend, settings):
    check = check_reference(backend(), of_documents(settings, "bf16"))
    assert (check.wrong, check.not_covered) == ((), ())


def shifted(documents):
    """Count the end of text to the next document."""
    return jnp.concatenate((documents[:, 1:], documents[:, -1:]), 1)


def causal_alone(documents):
    return right_mask(jnp.zeros_like(documents))


def both_ways(documents):
    return (documents[:, :, None] == documents[:, None, :])[:, None]


def running_on(documents):
    return jnp.broadcast_to(jnp.arange(documents.shape[1]), documents.shape)


JAX_MODEL, JAX_STAGES = lockstep.jax_backend.model, lockstep.jax_backend.stages
right_mask, right_positions = lockstep.jax_backend.attention.document_mask, lockstep.jax_backend.model.positions
PLANTED_IN_DOCUMENTS = {
    "documents see each other": ("mask", "attn", "document_mask", causal_alone),
    "the mask one token early": ("mask", "attn", "document_mask", lambda documents: right_mask(shifted(documents))),
    "a mask that is not causal": ("mask", "attn", "document_mask", both_ways),
    "positions run on": ("positions", "q_rope", "positions", running_on),
    "positions from one": ("positions", "q_rope", "positions", lambda documents: right_positions(documents) + 1),
    "positions reset one token early": (
        "positions", "q_rope", "positions", lambda documents: right_positions(shifted(documents))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED_IN_DOCUMENTS)
def test_a_reference_that_is_wrong_about_documents_is_named(name, monkeypatch):
    settings, stage, function, wrong = PLANTED_IN_DOCUMENTS[name]
    everywhere(monkeypatch, function, wrong, JAX_MODEL, JAX_STAGES)
    check = check_reference(JaxBackend(), of_documents(settings))
    assert {f.stage for f in check.wrong} == ({"attn"} if stage == "attn" else {"q_rope", "k_rope"})


def torch_running_on(documents):
    return torch.arange(documents.shape[1]).expand_as(documents)


TORCH_ATTENTION = lockstep.torch_backend.attention
torch_mask = TORCH_ATTENTION.document_mask
PLANTED_IN_DOCUMENTS_OF_TORCH = {
    "documents see each other": (
        "mask", {"attn"}, "document_mask", lambda documents: torch_mask(torch.zeros_like(documents)), [TORCH_ATTENTION]
    ),
    "positions run on": ("positions", {"q_rope", "k_rope"}, "positions", torch_running_on, [MODEL, STAGES]),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED_IN_DOCUMENTS_OF_TORCH)
def test_torch_that_is_wrong_about_documents_is_named(name, monkeypatch):
    settings, stages, function, wrong, modules = PLANTED_IN_DOCUMENTS_OF_TORCH[name]
    everywhere(monkeypatch, function, wrong, *modules)
    check = check_reference(TorchBackend(), of_documents(settings))
    assert {f.stage for f in check.wrong} == stages


def test_a_gradient_from_another_document_is_seen_in_the_model_alone(monkeypatch):
    """Stages that are right, and a model that does not use the mask: its gradient goes where it must not."""
    monkeypatch.setattr(JAX_MODEL, "document_mask", causal_alone)
    check = check_reference(JaxBackend(), of_documents("mask"))
    assert "causality by gradient" in {f.tap for f in check.wrong}
    assert {f.stage for f in check.wrong} == {"attn"}


@pytest.mark.parametrize(
    ("change", "stage"),
    [({"weight_decay": 0.2}, "update"), ({"beta1": 0.8}, "moments"), ({"eps": 1e-3}, "update")],
)
def test_another_optimizer_is_named(change, stage, monkeypatch):
    """A reference that runs with other hyperparameters than the run's."""

    class Other(TorchBackend):
        def open(self, config: RunConfig):
            optim = OptimConfig(**(config.optim.model_dump() | change))
            return super().open(config.model_copy(update={"optim": optim}))

    check = check_reference(Other(), tiny_config("fp32"))
    assert {f.stage for f in check.wrong} <= {"update", "moments"}
    assert stage in {f.stage for f in check.wrong}


def in_tf32(x, weight, policy, round_output):
    def tf32(a):
        return a if a.dtype == jnp.float64 else lax.reduce_precision(a, 8, 10)

    return jnp.einsum("...i,oi->...o", tf32(policy.round(x)), tf32(policy.round(weight)))


def test_tf32_in_the_reference_is_refused(monkeypatch):
    """JAX's default on a GPU: products of FP32 arrays with 10 bits of mantissa (scipy #24724)."""
    monkeypatch.setattr(lockstep.jax_backend.precision, "_product", in_tf32)
    with pytest.raises(UserError, match=r"the reference is wrong.*TF32 probe"):
        require_sound(JaxBackend(), tiny_config("fp32"))


def test_a_twin_that_rounds_nothing_is_refused(monkeypatch):
    """Held against it, an honest bf16 trainer would stand accused."""
    plain = dataclasses.replace(lockstep.jax_backend.precision.POLICIES["fp32"], name="bf16")
    monkeypatch.setitem(lockstep.jax_backend.precision.POLICIES, "bf16", plain)
    with pytest.raises(UserError, match=r"the reference is wrong.*bf16.*at least"):
        require_sound(JaxBackend(), tiny_config("bf16"))


def test_a_twin_that_rounds_the_stream_is_refused(monkeypatch):
    def rounded(x, weight, eps):
        y = rms_norm(x, weight, eps)
        return y.bfloat16().to(x.dtype) if x.dtype == torch.float32 else y

    monkeypatch.setattr(STAGES, "rms_norm", rounded)
    check = check_reference(TorchBackend(), tiny_config("bf16"))
    assert {f.stage for f in check.wrong if f.tap == "bf16: output"} == {"attn_norm", "mlp_norm", "final_norm"}


def test_a_wrong_backward_of_attention_is_refused(monkeypatch):
    """The reference's attention has a backward of its own: without Δ, its forward is right and its gradient is not."""

    def without_delta(policy, scores, saved, grad):
        q, k, v, out, *rest = saved
        return lockstep.jax_backend.attention._backward(policy, scores, (q, k, v, jnp.zeros_like(out), *rest), grad)

    monkeypatch.setattr(lockstep.jax_backend.attention._attention, "bwd", without_delta)
    check = check_reference(JaxBackend(), tiny_config("fp64"))
    assert {(f.stage, f.phase) for f in check.wrong} == {("attn", "backward")}


def test_a_wrong_reference_judges_nobody(monkeypatch):
    config = tiny_config("fp32")
    checks = check_steps(JaxBackend(), TorchBackend(), config, [text_batch(config)])
    monkeypatch.setattr(Attention, "attend", unscaled)
    with pytest.raises(UserError, match="the reference is wrong, so it does not judge: attn, forward"):
        next(checks)


def test_a_reference_of_one_model_is_listed_as_not_asked():
    """Somebody's own reference need not know another model than the run's."""
    config = tiny_config("fp32")

    class OneModel(TorchBackend):
        def open(self, given: RunConfig):
            if given.model != config.model:
                raise ValueError("my weights have 64 columns")
            return super().open(given)

    reference = sound_reference(OneModel(), config)
    assert any("ValueError: my weights have 64 columns" in line for line in reference.not_asked)
    (check,) = check_steps(TorchBackend(), OneModel(), config, [text_batch(config)])
    assert check.verdict == "agreed"
    assert set(reference.not_asked) <= set(check.not_covered)


def test_the_small_model_is_of_the_run_s_kind():
    model = small(tiny_config("bf16", kv_heads=4, tied=False, norm_eps=1e-3, **BIASES)).model
    assert (model.kv_heads, model.tied, model.norm_eps, model.mlp_bias) == (model.heads, False, 1e-3, True)
    assert small(tiny_config("bf16", kv_heads=1)).model.kv_heads == 1
    assert isinstance(TorchBackend().open(small(tiny_config("bf16"))).model, Transformer)
