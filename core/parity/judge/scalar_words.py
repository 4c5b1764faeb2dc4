"""Name the well-known mistake that explains a wrong scalar of a step: another mean, another clipping, another step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import get_args

import numpy as np

from lockstep.core.backend import Batch
from lockstep.core.config.schema import OptimConfig, RunConfig
from lockstep.core.parity.measures import scalar_bounds
from lockstep.core.parity.measures.verdict import Measure
from lockstep.core.train.schedule import learning_rate

# At most this many explanations are listed.
MOST = 2


def of_loss(value: float, nll: np.ndarray, batch: Batch, micro: int, held: Measure) -> str:
    """Explain a wrong loss from NLL (B, S). micro: sequences in a micro-batch. held: measure of the loss."""
    if held.ok or not batch.weights.any():
        return ""
    wide, weights = nll.astype(np.float64), batch.weights.astype(np.float64)
    sums = wide * weights

    def mean_of_means(rows: int) -> float:
        cuts = range(rows, len(wide), rows)
        parts = zip(np.split(sums, cuts), np.split(weights, cuts), strict=True)
        return float(np.mean([s.sum() / w.sum() for s, w in parts if w.sum()] or [math.nan]))

    named = {
        "the mean over all tokens, whatever their weights": float(wide.mean()),
        "the mean over the tokens with weight, whatever it is": float(wide[weights > 0].mean()),
        "divided by the number of tokens, not by their weight": float(sums.sum() / wide.size),
        "the sum, divided by nothing": float(sums.sum()),
        "the mean of the micro-batches' means": mean_of_means(micro),
        "the mean of the sequences' means": mean_of_means(1),
        "in bits, not in nats": float(sums.sum() / weights.sum() / math.log(2)),
    }
    goes_on = batch.targets != batch.end_of_text
    if batch.end_of_text is not None and (weights * goes_on).any():
        left = float((sums * goes_on).sum())
        named |= {
            "the mean without the targets that end a document": left / float((weights * goes_on).sum()),
            "without the losses of the targets that end a document": left / float(weights.sum()),
        }
    return _named(value, named, nll.dtype, held)


def of_clip_coefficient(
    value: float, norm: float, optim: OptimConfig, dtype: np.dtype[np.floating], held: Measure
) -> str:
    """Explain a wrong clip coefficient. norm: the candidate's own. held: measure of the coefficient."""
    if held.ok:
        return ""
    limit = optim.clip_norm
    named = {"1: nothing is clipped": 1.0} if limit else {}
    if limit and norm > 0:
        named |= {
            "clip_norm / norm, without the 1e-6 in its divisor": min(1.0, limit / norm),
            "clip_norm / (norm + 1e-6), also where that is above 1": limit / (norm + 1e-6),
            "clip_norm / norm, also where that is above 1": limit / norm,
            "clip_norm itself": limit,
            "1 / (norm + 1e-6), as with a clip_norm of 1": min(1.0, 1.0 / (norm + 1e-6)),
        }
    return _named(value, named, dtype, held)


def of_learning_rate(value: float, config: RunConfig, number: int, held: Measure) -> str:
    """Explain a wrong learning rate of step `number`. held: measure of the rate."""
    if held.ok:
        return ""
    optim, steps, train = config.optim, config.train.steps, config.train
    others = {
        number - 1: "the step before",
        number + 1: "the step after",
        number * train.accumulation: "the step that its micro-batches' number would be",
        number * train.ranks: "the step that its number times the ranks would be",
    }
    named = {words: learning_rate(optim, n, steps) for n, words in others.items() if n not in (0, number)}
    named = {f"that of {words}": rate for words, rate in named.items()}
    named |= {"the peak rate": optim.peak_lr, "0": 0.0}
    settings = [{"schedule": name} for name in get_args(OptimConfig.model_fields["schedule"].annotation)]
    settings += [{"decay_shape": shape} for shape in get_args(OptimConfig.model_fields["decay_shape"].annotation)]
    settings += [{"min_lr_ratio": 0.0}, {"warmup_steps": 0}]
    for changed in settings:
        if any(getattr(optim, name) != of for name, of in changed.items()):
            ((name, of),) = changed.items()
            named[f"that of optim.{name} = {of!r}"] = learning_rate(optim.model_copy(update=changed), number, steps)
    return _named(value, named, np.dtype(np.float32), held)


def _named(value: float, named: Mapping[str, float], dtype: np.dtype[np.floating], held: Measure) -> str:
    """Return in words which of these numbers the value equals, within the bound of the correct number."""
    bound = held.high or 0.0
    found = [words for words, x in named.items() if math.isfinite(x) and scalar_bounds.ulps(value, x, dtype) <= bound]
    # Several explanations may fit. The likeliest come first.
    return f"it is {' or '.join(found[:MOST])}" if found else ""
