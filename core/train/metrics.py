"""Metrics of a step: norms by parameter group and of the outer blocks, from norms by parameter; names of others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from lockstep.core.model.graph import GROUPS
from lockstep.core.model.names import layer_of

# Programs that torch.compile compiled again in this step, after a session's first; the metric is absent without any.
RECOMPILED = "compile/recompiled"
# Tokens a sequence in this step, if the run has several lengths.
SEQUENCE_LENGTH = "train/sequence_length"
# In a record's `host`: what the time since the last record went into (core/train/time_accounting.py),
# `seconds/compute`, …, and bytes of memory: `memory/allocated`, `memory/reserved`, `memory/peak` of the device,
# `memory/resident` of the process.
SECONDS = "seconds/"
MEMORY = "memory/"
# Largest attention logit of the slice, over all layers and by block: `attention_logit/max`, `attention_logit/blocks.0`.
ATTENTION_LOGIT = "attention_logit/"
# √Σ‖Δw‖² / √Σ‖w‖² of a group.
UPDATE_RATIO = "update_ratio/"
# Deviations between a loss spike and the expected loss (core/train/spikes.py), at steps with a spike.
SPIKE = "spike/sigmas"


def group_norms(norms: Mapping[str, float], groups: Mapping[str, str]) -> dict[str, float]:
    """Return the L2 norm of each parameter group, and of the first and the last block (`blocks.0`, `blocks.11`).

    Each is the root of the sum of squares of its parameters' norms; a block's parameters are in a group as well.
    groups: parameter → group (core/model/names.py, `groups_of`).
    """
    squares: dict[str, float] = {}
    blocks = outer_blocks(norms)
    for name, norm in norms.items():
        for part in (groups[name], f"blocks.{layer_of(name)}"):
            squares[part] = squares.get(part, 0.0) + norm * norm
    return {part: math.sqrt(squares[part]) for part in (*GROUPS, *blocks) if part in squares}


def outer_blocks(names: Iterable[str]) -> list[str]:
    """Return `blocks.0` and the last block of parameters with these names; one of a model with one."""
    layers = sorted({layer for name in names if (layer := layer_of(name)) is not None})
    return [f"blocks.{layer}" for layer in dict.fromkeys((*layers[:1], *layers[-1:]))]


def has_norms(metrics: Mapping[str, float]) -> bool:
    """Return whether a step's metrics hold norms by group."""
    return any(name.startswith("grad_norm/") for name in metrics)


def norms_by_group(
    groups: Mapping[str, str],
    gradient: Mapping[str, float],
    parameter: Mapping[str, float],
    update: Mapping[str, float],
) -> dict[str, float]:
    """Return the metrics of each group: pre-clip gradient norm, parameter norm, and update-to-weight ratio.

    Takes L2 norms by canonical parameter name: of the accumulated gradients before clipping, of the weights before
    the update, and of the update; and the group of each parameter. A group whose weights are all 0 (fresh biases) has
    no ratio.
    """
    gradients, parameters, updates = (group_norms(norms, groups) for norms in (gradient, parameter, update))
    metrics = {f"grad_norm/{group}": norm for group, norm in gradients.items()}
    metrics |= {f"param_norm/{group}": norm for group, norm in parameters.items()}
    return metrics | {f"{UPDATE_RATIO}{group}": updates[group] / norm for group, norm in parameters.items() if norm}


def attention_logits(by_layer: Iterable[float]) -> dict[str, float]:
    """Return the step record's metrics of the largest attention logit of each layer."""
    found = {f"{ATTENTION_LOGIT}blocks.{layer}": float(value) for layer, value in enumerate(by_layer)}
    return {f"{ATTENTION_LOGIT}max": max(found.values()), **found} if found else {}
