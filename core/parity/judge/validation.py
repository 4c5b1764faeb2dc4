"""Compare validation scores with twin and truth at the weights after the step, and their means with the record."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from lockstep.core.backend import Arrays
from lockstep.core.parity.evidence.evaluation import LOGITS, TARGETS
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.loss_weights import weighted_part, weighted_rows
from lockstep.core.parity.judge.evaluation import STAGE, Scores
from lockstep.core.parity.measures import scalar_bounds
from lockstep.core.parity.measures.compare import Reference, finding
from lockstep.core.parity.measures.verdict import Finding, Measure
from lockstep.core.parity.reference.side_by_side import passes
from lockstep.core.train.validation import LOSS, LOSS_OF, TOP1

# Prefix of the taps `nll` and `top1` of single tokens.
OF_TOKENS = "validation/"
# Metric of a record → the scores of which it is the mean.
MEANS = {LOSS: "nll", TOP1: "top1"}


def validation(evidence: Evidence, reference: Reference, missing: list[str]) -> Iterator[Finding]:
    """Compare the scores of one micro-batch token by token, on its sequences with weight, and the means over all.

    missing: receives the scores that were not judged, with the reason.
    Raises NotSupported if the reference shows no taps.
    """
    held_out = evidence.held_out
    if held_out is None:
        return
    yield from means(evidence.record.metrics, held_out.every)
    part, rows = weighted_part(held_out.batch), weighted_rows(held_out.batch)
    of_rows = {
        name: score[rows] if len(score) == len(held_out.batch.tokens) else score
        for name, score in held_out.scores.items()
    }
    scores = Scores({TARGETS: part.targets, **of_rows}, reference, OF_TOKENS)
    for made in passes(reference, evidence.after, part, [LOGITS]):
        scores.take(made.twin, made.truth)
    yield from scores.findings(missing)


def means(metrics: Mapping[str, float], every: Arrays) -> Iterator[Finding]:
    """Compare each mean in a record with the exact mean of its scores, and for a mixture the mean of each data set.

    A record is wrong if the mean of a data set is missing, or if the record has a mean for no data set. The bound is
    that of a sum in FP64 (scalar_bounds.py), in which the trainer accumulates.
    """
    held = {metric: np.asarray(every[name]) for metric, name in MEANS.items()}
    if "source" in every:
        source, nll = np.asarray(every["source"]), np.asarray(every["nll"])
        names = sorted(metric for metric in metrics if metric.startswith(LOSS_OF))
        for number in range(max(len(names), int(source.max()) + 1)):
            metric = names[number] if number < len(names) else f"{LOSS_OF}(data set {number + 1})"
            held[metric] = nll[source == number]
    for metric, scores in held.items():
        said = metrics.get(metric)
        due = _mean(scores)
        bound, basis = scalar_bounds.sum_bound(scores.size)
        # The mean of non-finite scores is not finite either.
        inherited = not math.isfinite(due) and scalar_bounds.same(said, due)
        apart = 0.0 if inherited else math.inf if said is None else scalar_bounds.ulps(said, due, np.dtype(np.float64))
        measure = Measure("ulp", apart, None, bound, f"the mean over all tokens, in FP64: {basis}")
        yield finding(STAGE, metric, "local", (measure,), scores.size)


def _mean(scores: np.ndarray) -> float:
    if not np.isfinite(scores).all():
        return float(scores.mean(dtype=np.float64))
    return math.fsum(scores.ravel().tolist()) / max(scores.size, 1)
