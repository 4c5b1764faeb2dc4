"""Cut into however many micro-batches, a step is the same step: tokens are weighed, not micro-batches."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.parity_tests.cross.variants import relative
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend

TRAIN = {"sequence_length": 32}


def cut(micro):
    return tiny_config("fp64", train={**TRAIN, "micro_batch_size": micro})


@pytest.fixture(scope="module")
def batch():
    return uneven_weights(text_batch(cut(4)), 0)


@pytest.fixture(scope="module")
def found(batch):
    return {micro: TorchBackend().open(cut(micro)).gradients(batch) for micro in (1, 2, 4)}


@pytest.mark.parametrize("micro", [1, 2])
def test_gradients_do_not_depend_on_the_cut(found, micro):
    """Measured 1e-15: FP64, summed in another order."""
    assert relative(found[micro].nll, found[4].nll) < 1e-13
    assert found[micro].loss == pytest.approx(found[4].loss, rel=1e-13)
    for name, grad in found[micro].grads.items():
        assert relative(grad, found[4].grads[name]) < 1e-13, name


def test_the_loss_is_the_weighted_mean(batch, found):
    weights = batch.weights.astype(np.float64)
    for gradients in found.values():
        assert gradients.loss == pytest.approx((weights * gradients.nll).sum() / weights.sum(), rel=1e-14)


def test_a_mean_of_means_would_be_seen(batch, found):
    """The negative twin: micro-batches weigh differently here, so that their mean is another number."""
    session = TorchBackend().open(cut(1))
    parts = [session.gradients(micro) for micro in batch.micro_batches(1)]
    assert abs(np.mean([part.loss for part in parts]) / found[4].loss - 1) > 1e-4
    name = "blocks.1.mlp.down_proj.weight"
    assert relative(np.mean([part.grads[name] for part in parts], axis=0), found[4].grads[name]) > 0.01
