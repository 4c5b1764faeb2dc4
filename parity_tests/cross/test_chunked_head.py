"""The head by chunks is the whole head: same loss, same gradients, without the logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.jax_backend import loss as in_jax
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.scripts.studies.large_vocabulary import peak
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.kernels import chunked_loss as module
from lockstep.torch_backend.loss import negative_log_likelihood


def gradients(config, **loss):
    session = TorchBackend().open(config.model_copy(update={"loss": config.loss.model_copy(update=loss)}))
    return session.gradients(uneven_weights(text_batch(config), 1))


def apart(one, other):
    wide = {n: g.astype(np.float64) for n, g in other.grads.items()}
    return max(np.linalg.norm(one.grads[n] - g) / np.linalg.norm(g) for n, g in wide.items())


@pytest.mark.parametrize("chunk", [1, 7, 64, 100, 4096])
@pytest.mark.parametrize("policy, most", [("fp64", 1e-12), ("fp32", 2e-6), ("bf16", 5e-4), ("fp16", 5e-4)])
@pytest.mark.parametrize("tied", [True, False])
def test_any_chunk_is_the_whole_head(policy, most, chunk, tied):
    """Orders of sums are all that differs; in narrow formats, what lies at a tie may then be rounded otherwise."""
    config = tiny_config(policy, layers=1, vocab_size=259, tied=tied, train={"sequence_length": 32})
    whole, parts = gradients(config, head="full"), gradients(config, head="chunked", chunk=chunk)
    assert parts.nll == pytest.approx(whole.nll, rel=most if policy in ("fp64", "fp32") else 1e-6)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12 if policy == "fp64" else 1e-7)
    assert apart(parts, whole) < most


def test_bf16_sums_would_show():
    """The negative twin: what is summed over chunks in bf16 is a thousand times farther off."""
    config = tiny_config("bf16", layers=1, train={"sequence_length": 32})

    def in_bf16(left, right, out, onednn):
        return torch.mm(left, right).to(out)

    whole = gradients(config, head="full")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "wide_product", in_bf16)
        assert apart(gradients(config, head="chunked", chunk=7), whole) > 1e-3


@pytest.mark.parametrize("head", ["full", "chunked"])
def test_z_loss_is_the_same_on_both_sides(head):
    config = tiny_config("fp64", layers=1, train={"sequence_length": 32})
    config = config.model_copy(
        update={"loss": config.loss.model_copy(update={"z_loss": 0.1, "head": head, "chunk": 9})}
    )
    from lockstep.jax_backend.backend import JaxBackend

    batch = uneven_weights(text_batch(config), 1)
    ours, theirs = TorchBackend().open(config).gradients(batch), JaxBackend().open(config).gradients(batch)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-13)
    assert apart(ours, theirs) < 1e-12
    plain = TorchBackend().open(config).evaluate(batch)["nll"]
    assert np.all(ours.nll > plain + 0.1)  # ln V squared is above 1


def test_z_loss_against_its_closed_form():
    """Uniform logits: ln V + z · (ln V)², and a gradient of (1 + 2z · ln V) / V − onehot."""
    logits, targets = torch.zeros(1, 1, 10, dtype=torch.float64, requires_grad=True), torch.tensor([[3]])
    losses = negative_log_likelihood(logits, targets, 0.5)
    losses.sum().backward()
    due = np.full(10, (1 + np.log(10)) / 10)
    due[3] -= 1
    assert losses.item() == pytest.approx(np.log(10) + 0.5 * np.log(10) ** 2, rel=1e-15)
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.numpy()[0, 0], due, rtol=1e-14)
    of_jax = jax.jit(jax.grad(lambda x: in_jax.negative_log_likelihood(x, jnp.asarray([[3]]), 0.5).sum()))
    np.testing.assert_allclose(np.asarray(of_jax(jnp.zeros((1, 1, 10))))[0, 0], due, rtol=1e-14)


def test_memory_is_that_of_one_chunk():
    """Four times the tokens, the same peak; four times the chunk, a larger one. 131,072 columns."""
    few, many, wide = (peak("chunked", tokens, chunk)["bytes"] for tokens, chunk in ((128, 32), (512, 32), (512, 128)))
    one = 32 * 131_072 * 4
    assert many - few < one
    assert wide - many > 3 * one
