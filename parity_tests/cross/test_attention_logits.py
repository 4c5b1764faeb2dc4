"""The largest attention logits: both backends agree with each other and with softmax's input written out."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.core.backend import Batch
from lockstep.core.config.schema import AttentionConfig
from lockstep.jax_backend.backend import JaxBackend
from lockstep.jax_backend.tools import attention_logits as in_jax
from lockstep.parity_tests.cross.variants import same_bits
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.tools import attention_logits as in_torch

VARIANTS = {
    "causal": AttentionConfig(),
    "documents": AttentionConfig(document_mask=True),
    "documents and positions": AttentionConfig(document_mask=True, reset_positions=True),
    "positions alone": AttentionConfig(reset_positions=True),
}


def config_of(attention: AttentionConfig, policy: str = "fp64", **model):
    config = tiny_config(policy, train={"sequence_length": 48}, **model)
    return config.model_copy(update={"attention": attention})


def written_out(session, config, batch) -> list[float]:
    """From the taps, with all of S×S at once."""
    names = [f"blocks.{i}.attn.{x}_rope" for i in range(config.model.layers) for x in "qk"]
    taps = session.observe(batch, names)
    rows, length = batch.tokens.shape
    seen = np.tril(np.ones((length, length), bool))[None].repeat(rows, 0)
    if config.attention.document_mask:
        seen &= batch.documents[:, :, None] == batch.documents[:, None, :]
    found = []
    for i in range(config.model.layers):
        q, k = taps[f"blocks.{i}.attn.q_rope"], taps[f"blocks.{i}.attn.k_rope"]
        k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
        logits = np.einsum("bshe,bthe->bhst", q, k) / np.sqrt(q.shape[-1])
        found.append(np.where(seen[:, None], logits, -np.inf).max())
    return found


@pytest.mark.parametrize("attention", VARIANTS.values(), ids=VARIANTS)
def test_both_backends_agree_with_the_formula(attention: AttentionConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    # Chunks that do not divide the sequence.
    monkeypatch.setattr(in_torch, "QUERIES", 20)
    monkeypatch.setattr(in_jax, "QUERIES", 20)
    config = config_of(attention)
    batch = text_batch(config)
    ours, theirs = TorchBackend().open(config), JaxBackend().open(config)
    theirs.load(ours.state())
    one, other = ours.attention_logits(batch), theirs.attention_logits(batch)  # type: ignore[attr-defined]
    assert one.shape == other.shape == (config.model.layers,) and one.dtype == other.dtype == np.float64
    np.testing.assert_allclose(one, written_out(ours, config, batch), rtol=1e-12, atol=0)
    np.testing.assert_allclose(one, other, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["causal", "documents"])
def test_a_token_does_not_see_what_it_may_not(name: str) -> None:
    """In sequences of two tokens one or two of four pairs are not seen: in some, the product is the largest there."""
    config = config_of(VARIANTS[name])
    ours, theirs = TorchBackend().open(config), JaxBackend().open(config)
    unlike = 0
    for seed in range(8):
        batch = text_batch(config, seed)
        batch = Batch.of({key: array[:, :2].copy() for key, array in batch.arrays.items()})
        if batch.documents is not None:
            batch.documents[:] = [0, 1]
        due = np.array(written_out(ours, config, batch))
        for session in (ours, theirs):
            np.testing.assert_allclose(session.attention_logits(batch), due, rtol=1e-12)  # type: ignore[attr-defined]
        taps = ours.observe(batch, ["blocks.0.attn.q_rope", "blocks.0.attn.k_rope"])
        q, k = taps["blocks.0.attn.q_rope"], np.repeat(taps["blocks.0.attn.k_rope"], 2, axis=2)
        products = np.einsum("bshe,bthe->bhst", q, k) / np.sqrt(q.shape[-1])
        hidden = products[..., 0, 1] if name == "causal" else products[..., 1, 0]
        unlike += hidden.max() > due[0] * (1 + 1e-9)
    assert unlike, "no case would show a mask that is left out"


def test_what_comes_after_or_is_of_another_document_does_not_count() -> None:
    """Keys that a query may not see have larger products here; a mask left out would show."""
    config = config_of(AttentionConfig(document_mask=True))
    batch = text_batch(config)
    masked = TorchBackend().open(config).attention_logits(batch)  # type: ignore[attr-defined]
    causal = TorchBackend().open(config_of(AttentionConfig())).attention_logits(batch)  # type: ignore[attr-defined]
    assert (masked < causal).any() and (masked <= causal).all()


@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_looking_changes_nothing(scope: str) -> None:
    config = tiny_config("bf16", compiled=True, train={"sequence_length": 32})
    config = config.model_copy(update={"compile": config.compile.model_copy(update={"scope": scope})})
    looked, alone = TorchBackend().open(config), TorchBackend().open(config)
    for step in range(3):
        batch = text_batch(config, step)
        first, second = looked.step(batch), alone.step(batch)
        assert first == second and "compile/recompiled" not in first.metrics
        before = looked.state()
        values = looked.attention_logits(batch.rows(slice(1)))  # type: ignore[attr-defined]
        assert np.isfinite(values).all() and same_bits(looked.state(), before)
    assert same_bits(looked.state(), alone.state())
