"""A scalar that is wrong in a well-known way is called by that way, and one that is wrong otherwise by none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from torch import Tensor

from lockstep.core.backend import Batch
from lockstep.core.config.schema import OptimConfig
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge import scalar_words
from lockstep.core.parity.judge.update import step_scalars
from lockstep.core.parity.measures import scalar_bounds
from lockstep.core.parity.measures.compare import Reference
from lockstep.core.parity.measures.verdict import Measure
from lockstep.core.train.schedule import learning_rate
from lockstep.jax_backend.session import JaxSession
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.session import TorchSession

rng = np.random.default_rng(0)
NLL = rng.uniform(1, 9, (8, 64)).astype(np.float32)
TOKENS = np.zeros((8, 64), np.int32)
BATCH = uneven_weights(Batch(TOKENS, TOKENS, np.ones((8, 64), np.float32)), 3)
FP32 = np.dtype(np.float32)
RIGHT = float((NLL.astype(np.float64) * BATCH.weights).sum() / BATCH.weights.sum(dtype=np.float64))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (RIGHT, ""),
        (RIGHT * 1.01, ""),
        (float("nan"), ""),
        (float(NLL.mean(dtype=np.float64)), "it is the mean over all tokens, whatever their weights"),
        (RIGHT * float(BATCH.weights.sum(dtype=np.float64)), "it is the sum, divided by nothing"),
        (RIGHT / np.log(2), "it is in bits, not in nats"),
        (
            RIGHT * float(BATCH.weights.sum(dtype=np.float64)) / NLL.size,
            "it is divided by the number of tokens, not by their weight",
        ),
        (
            float(np.mean([(n * w).sum() / w.sum() for n, w in zip(NLL, BATCH.weights.astype(float), strict=True)])),
            "it is the mean of the sequences' means",
        ),
    ],
)
def test_loss(value: float, said: str) -> None:
    held = scalar_bounds.loss(value, NLL, BATCH)
    assert scalar_words.of_loss(value, NLL, BATCH, 4, held) == said


@pytest.mark.parametrize("known", [True, False])
def test_a_loss_without_the_end_of_text(known: bool) -> None:
    targets = TOKENS.copy()
    targets[3, :5] = 7
    batch = replace(BATCH, targets=targets, end_of_text=7 if known else None)
    sums, weights = NLL.astype(np.float64) * batch.weights, batch.weights.astype(np.float64)
    left = float(sums[targets != 7].sum())
    for value, said in (
        (left / float(weights[targets != 7].sum()), "it is the mean without the targets that end a document"),
        (left / float(weights.sum()), "it is without the losses of the targets that end a document"),
    ):
        held = scalar_bounds.loss(value, NLL, batch)
        assert not held.ok
        assert scalar_words.of_loss(value, NLL, batch, 4, held) == (said if known else "")


def test_a_loss_without_any_weight_has_no_name() -> None:
    without = Batch(TOKENS, TOKENS, np.zeros((8, 64), np.float32))
    held = Measure("ulp", float("nan"), None, 1.0, "0 / 0")
    assert scalar_words.of_loss(0.0, NLL, without, 4, held) == ""


@pytest.mark.parametrize(
    ("value", "norm", "said"),
    [
        (0.5 / (2.0 + 1e-6), 2.0, ""),
        (0.5 / 2.0, 2.0, "it is clip_norm / norm, without the 1e-6 in its divisor"),
        (0.5 / (0.2 + 1e-6), 0.2, "it is clip_norm / (norm + 1e-6), also where that is above 1"),
        (1.0, 2.0, "it is 1: nothing is clipped"),
        (0.5, 2.0, "it is clip_norm itself"),
        (1 / (2.0 + 1e-6), 2.0, "it is 1 / (norm + 1e-6), as with a clip_norm of 1"),
        (0.3, 2.0, ""),
    ],
)
def test_clip_coefficient(value: float, norm: float, said: str) -> None:
    optim = OptimConfig(clip_norm=0.5)
    held = scalar_bounds.clip_coefficient(value, norm, optim, FP32)
    assert scalar_words.of_clip_coefficient(value, norm, optim, FP32, held).startswith(said)
    assert bool(said) == (not held.ok and value != 0.3)


CONFIG = tiny_config("fp32", train={"steps": 20})


@pytest.mark.parametrize(
    ("changed", "number", "said"),
    [
        ({}, 10, ""),
        ({"schedule": "linear"}, 10, "it is that of optim.schedule = 'linear'"),
        ({"min_lr_ratio": 1.0}, 10, "it is the peak rate or that of optim.schedule = 'wsd'"),
        ({"min_lr_ratio": 0.0}, 10, "it is that of optim.min_lr_ratio = 0.0"),
        ({"warmup_steps": 0}, 2, "it is that of optim.warmup_steps = 0"),
        ({"peak_lr": 1.0}, 10, ""),
    ],
)
def test_learning_rate_of_other_settings(changed: dict[str, object], number: int, said: str) -> None:
    value = learning_rate(CONFIG.optim.model_copy(update=changed), number, 20)
    held = scalar_bounds.learning_rate(value, learning_rate(CONFIG.optim, number, 20))
    assert scalar_words.of_learning_rate(value, CONFIG, number, held) == said


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (9, "it is that of the step before"),
        (11, "it is that of the step after"),
        (20, "it is that of the step that its micro-batches' number would be"),
    ],
)
def test_learning_rate_of_another_step(of: int, said: str) -> None:
    value = learning_rate(CONFIG.optim, of, 20)
    held = scalar_bounds.learning_rate(value, learning_rate(CONFIG.optim, 10, 20))
    assert scalar_words.of_learning_rate(value, CONFIG, 10, held) == said


class _ClipsAtOne(TorchSession):
    def clip_coefficient(self, norm: Tensor) -> Tensor:
        return (1.0 / (norm + 1e-6)).clamp(max=1.0)


def test_a_check_says_it() -> None:
    session, reference = _ClipsAtOne(CONFIG), JaxSession(CONFIG)
    found = step_scalars(gather(session, CONFIG, text_batch(CONFIG)), Reference(CONFIG, reference, reference))
    wrong = {one.tap: one.note for one in found if not one.ok}
    words = "it is 1 / (norm + 1e-6), as with a clip_norm of 1"
    assert wrong == {"clip_coefficient": words, "clip_coefficient/13": f"made again as step 13 of the run; {words}"}
