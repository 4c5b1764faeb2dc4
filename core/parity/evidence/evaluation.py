"""Gather the results of a candidate's `evaluate` on the sequences of a check, under the run's policy and under FP32.

An untrained model predicts no target, so `top1` would be false everywhere. Therefore every second target is replaced by
the likeliest token by the candidate's own logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lockstep.core.backend import Arrays, Batch, NotSupported, Session
from lockstep.core.capabilities import Evaluates, ask, ranks_of
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.measures.stretches import stretches

# The tap of which scores are a function.
LOGITS = "logits"
TARGETS = "targets"
# Suffix of `nll` for sequences without weight, with their own targets.
OTHERS = "_others"
# Number of logits that are read at a time.
AT_ONCE = 1 << 22
# Policies of a run's metrics: its own (None), and FP32 (`fp32/loss`).
POLICIES: tuple[str | None, ...] = (None, "fp32")


def key(what: str, policy: str | None) -> str:
    """Return the name of `nll` or `top1` under a policy."""
    return what if policy is None else f"{what}_{policy}"


class Likeliest:
    """The likeliest token at each position, from a session's logits. `tokens`: int (n, S), or None before `note`."""

    def __init__(self) -> None:
        self.tokens: np.ndarray | None = None

    def note(self, name: str, tap: np.ndarray) -> None:
        """Read a tap of the sequences with weight. Only the likeliest tokens of the logits are kept."""
        if name != LOGITS:
            return
        flat = tap.reshape(-1, tap.shape[-1])
        parts = stretches(len(flat), max(1, AT_ONCE // flat.shape[-1]))
        self.tokens = np.concatenate([flat[part].argmax(axis=-1) for part in parts]).reshape(tap.shape[:-1])


def policies_of(config: RunConfig, thorough: bool) -> tuple[str | None, ...]:
    """Return the policies under which a check evaluates; during training, those of the run's metrics."""
    return POLICIES if thorough or config.log.fp32_loss_every else POLICIES[:1]


def evaluated(
    session: Session, tapped: Batch, likeliest: Likeliest, policies: Sequence[str | None], missing: list[str]
) -> Arrays:
    """Return scores of the sequences of `tapped` with weight, by `key`, and their `targets` (n, S).

    Other sequences have only the NLL of their own targets, under `key` + OTHERS. The whole micro-batch is evaluated,
    because its sequences may share scales of FP8.
    likeliest: the candidate's likeliest tokens in the sequences with weight.
    missing: receives what the session cannot do.
    """
    # All ranks compute if weights are sharded, but only rank 0 has taps.
    if not ranks_of(session).of_first(lambda: likeliest.tokens is not None, "`evaluate`"):
        missing.append("evaluation: the session shows no logits, from which the check chooses targets")
        return {}
    rows = np.flatnonzero(tapped.weights.any(axis=1))
    targets = tapped.targets.copy()
    if likeliest.tokens is not None:
        targets[rows, 1::2] = likeliest.tokens[:, 1::2]
    # Held-out batches have these weights.
    asked = replace(tapped, targets=targets, weights=np.ones_like(tapped.weights))
    found: dict[str, np.ndarray] = {TARGETS: asked.targets[rows]}
    for policy in policies:
        try:
            scores = ask(session, Evaluates).evaluate(asked, policy)
        except NotSupported as reason:
            missing.append(f"evaluation{f' under {policy}' if policy else ''}: {reason}")
            continue
        nll, top1 = np.asarray(scores["nll"]), np.asarray(scores["top1"])
        found[key("nll", policy)] = nll[rows] if len(nll) == len(tapped.tokens) else nll
        if len(nll) == len(tapped.tokens) > len(rows):
            found[key("nll", policy) + OTHERS] = np.delete(nll, rows, axis=0)
        found[key("top1", policy)] = (top1[rows] if len(top1) == len(tapped.tokens) else top1).astype(np.int32)
    return found if len(found) > 1 else {}
