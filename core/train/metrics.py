"""Metrics of a step: norms by group and of the first and last block, and the names of other metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from lockstep.core.model.graph import GROUPS
from lockstep.core.model.names import layer_of

# Number of unexpected compilations by torch.compile in this step; the metric is absent if it is 0.
RECOMPILED = "compile/recompiled"
# Tokens per sequence in this step, if the run has several lengths.
SEQUENCE_LENGTH = "train/sequence_length"
# Prefixes in a record's `host`: seconds since the last record by part (core/train/time_accounting.py),
# `seconds/compute`, …; and bytes of memory: `memory/allocated`, `memory/reserved` and `memory/peak` of the device,
# `memory/resident` of the process.
SECONDS = "seconds/"
MEMORY = "memory/"
# Largest attention logit in the slice, over all layers and by block: `attention_logit/max`, `attention_logit/blocks.0`.
ATTENTION_LOGIT = "attention_logit/"
# √Σ‖Δw‖² / √Σ‖w‖² of a group.
UPDATE_RATIO = "update_ratio/"
# (Loss − expected loss) / sigma, at steps with a spike (core/train/spikes.py).
SPIKE = "spike/sigmas"


def group_norms(norms: Mapping[str, float], groups: Mapping[str, str]) -> dict[str, float]:
    """Return the L2 norm of each parameter group, and of the first and the last block (`blocks.0`, `blocks.11`).

    Each is the square root of the sum of its parameters' squared norms. A block's parameters also belong to a group.
    norms: parameter → L2 norm. groups: parameter → group (core/model/names.py, `groups_of`).
    """
    squares: dict[str, float] = {}
    blocks = outer_blocks(norms)
    for name, norm in norms.items():
        for part in (groups[name], f"blocks.{layer_of(name)}"):
            squares[part] = squares.get(part, 0.0) + norm * norm
    return {part: math.sqrt(squares[part]) for part in (*GROUPS, *blocks) if part in squares}


def outer_blocks(names: Iterable[str]) -> list[str]:
    """Return the first and the last block of parameters with these names; one name if there is one block."""
    layers = sorted({layer for name in names if (layer := layer_of(name)) is not None})
    return [f"blocks.{layer}" for layer in dict.fromkeys((*layers[:1], *layers[-1:]))]


def has_norms(metrics: Mapping[str, float]) -> bool:
    """Return whether a step's metrics contain norms by group."""
    return any(name.startswith("grad_norm/") for name in metrics)


def norms_by_group(
    groups: Mapping[str, str],
    gradient: Mapping[str, float],
    parameter: Mapping[str, float],
    update: Mapping[str, float],
) -> dict[str, float]:
    """Return the metrics of each group: pre-clip gradient norm, parameter norm, and update-to-weight ratio.

    groups: parameter → group. gradient, parameter, update: parameter → L2 norm of the accumulated gradient before
    clipping, of the weight before the update, and of the update. A group whose weights are all 0 (initial biases) has
    no ratio.
    """
    gradients, parameters, updates = (group_norms(norms, groups) for norms in (gradient, parameter, update))
    metrics = {f"grad_norm/{group}": norm for group, norm in gradients.items()}
    metrics |= {f"param_norm/{group}": norm for group, norm in parameters.items()}
    return metrics | {f"{UPDATE_RATIO}{group}": updates[group] / norm for group, norm in parameters.items() if norm}


def attention_logits(by_layer: Iterable[float]) -> dict[str, float]:
    """Return the record's metrics from the largest attention logit of each layer."""
    found = {f"{ATTENTION_LOGIT}blocks.{layer}": float(value) for layer, value in enumerate(by_layer)}
    return {f"{ATTENTION_LOGIT}max": max(found.values()), **found} if found else {}
