"""Metrics of a step: norms by parameter group, from norms by parameter; names of others."""

from __future__ import annotations

import math
from collections.abc import Mapping

from core.names import GROUPS, group_of

# Programs that torch.compile made anew in this step, after a session's first: there is no such metric where none was.
RECOMPILED = "compile/recompiled"
# Tokens a sequence of this step, where they are not the same in every step of the run.
SEQUENCE_LENGTH = "train/sequence_length"


def group_norms(norms: Mapping[str, float]) -> dict[str, float]:
    """L2 norm of each parameter group: the root of the sum of squares of its parameters' norms."""
    squares: dict[str, float] = {}
    for name, norm in norms.items():
        squares[group_of(name)] = squares.get(group_of(name), 0.0) + norm * norm
    return {group: math.sqrt(squares[group]) for group in GROUPS if group in squares}


def norms_by_group(
    gradient: Mapping[str, float], parameter: Mapping[str, float], update: Mapping[str, float]
) -> dict[str, float]:
    """The step record's metrics: pre-clip gradient norm, parameter norm, and update-to-weight ratio of each group.

    Takes L2 norms by canonical parameter name: of the accumulated gradients before clipping, of the weights before
    the update, and of the update. A group whose weights are all 0 (fresh biases) has no ratio.
    """
    gradients, parameters, updates = group_norms(gradient), group_norms(parameter), group_norms(update)
    metrics = {f"grad_norm/{group}": norm for group, norm in gradients.items()}
    metrics |= {f"param_norm/{group}": norm for group, norm in parameters.items()}
    return metrics | {f"update_ratio/{group}": updates[group] / norm for group, norm in parameters.items() if norm}
