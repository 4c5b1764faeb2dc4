"""Gather what a candidate's `evaluate` gives for the sequences of a check: of the run's policy, and of FP32.

A model that has hardly been trained guesses no target, and then nothing tells right guesses from none. So every second
target is the token that the candidate's own logits find likeliest.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lockstep.core.arrays import part_of, shape_of
from lockstep.core.backend import Arrays, Batch, NotSupported, Session
from lockstep.core.capabilities import Evaluates, ask, ranks_of
from lockstep.core.parity.measures.stretches import stretches

# The tap that scores are made of.
LOGITS = "logits"
TARGETS = "targets"
# Logits that are read at once.
AT_ONCE = 1 << 22
# Policies that a run's metrics ask for: its own, and FP32 (`fp32/loss`).
POLICIES: tuple[str | None, ...] = (None, "fp32")


def key(what: str, policy: str | None) -> str:
    """Return the name of `nll` or `top1` under a policy."""
    return what if policy is None else f"{what}_{policy}"


def evaluated(session: Session, tapped: Batch, taps: Arrays, missing: list[str]) -> Arrays:
    """Return scores of the sequences of `tapped` with weight, by `key`, and the `targets` (n, S) that they are of.

    The whole micro-batch is evaluated, since sequences may share the scales of FP8. taps: the candidate's, of the
    sequences with weight. `missing` gets what the session does not do.
    """
    # All ranks take part in what weights that are cut over them compute; rank 0 alone has taps.
    if not ranks_of(session).of_first(lambda: LOGITS in taps, "`evaluate`"):
        missing.append("evaluation: the session shows no logits, from which the check chooses targets")
        return {}
    rows = np.flatnonzero(tapped.weights.any(axis=1))
    chosen = _with_likely_ones(tapped.targets, rows, taps) if LOGITS in taps else tapped.targets
    asked = replace(tapped, targets=chosen)
    found: dict[str, np.ndarray] = {TARGETS: asked.targets[rows]}
    for policy in POLICIES:
        try:
            scores = ask(session, Evaluates).evaluate(asked, policy)
        except NotSupported as reason:
            missing.append(f"evaluation{f' under {policy}' if policy else ''}: {reason}")
            continue
        nll, top1 = np.asarray(scores["nll"]), np.asarray(scores["top1"])
        found[key("nll", policy)] = nll[rows] if len(nll) == len(tapped.tokens) else nll
        found[key("top1", policy)] = (top1[rows] if len(top1) == len(tapped.tokens) else top1).astype(np.int32)
    return found if len(found) > 1 else {}


def _with_likely_ones(targets: np.ndarray, rows: np.ndarray, taps: Arrays) -> np.ndarray:
    length, vocab = targets.shape[1], shape_of(taps, LOGITS)[-1]
    likeliest = np.concatenate(
        [
            part_of(taps, LOGITS, slice(part.start * vocab, part.stop * vocab)).reshape(-1, vocab).argmax(axis=-1)
            for part in stretches(len(rows) * length, max(1, AT_ONCE // vocab))
        ]
    ).reshape(len(rows), length)
    changed = targets.copy()
    changed[rows, 1::2] = likeliest[:, 1::2]
    return changed
