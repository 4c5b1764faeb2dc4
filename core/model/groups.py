"""The optimizer settings of parameters: learning rate and weight decay by group, update rule, optimizer state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from lockstep.core.arrays import shape_of
from lockstep.core.backend import State
from lockstep.core.components.optimizers import OPTIMIZERS, UpdateRule
from lockstep.core.config.schema import ModelConfig, OptimConfig, RunConfig
from lockstep.core.model.families import graph_of
from lockstep.core.model.graph import Shape


@dataclass(frozen=True)
class GroupSettings:
    """Optimizer settings of a parameter group.

    lr_factor: the group's learning rate / the scheduled rate lr. weight_decay: λ in p ← p·(1 − lr·lr_factor·λ).
    """

    lr_factor: float
    weight_decay: float


def group_settings(config: RunConfig, group: str) -> GroupSettings:
    """Return the settings of an optimizer group; biases have the gains' scale and no decay.

    Width rule: the rate of matrices · base_width / hidden, as for Adam under μP (Yang et al. 2022, arXiv 2203.03466,
    table 3). Batch rule: every rate · √(batch_size / base_batch) (Malladi et al. 2022, arXiv 2205.10287).
    """
    optim = config.optim
    factor = {
        "embedding": optim.embedding_lr_scale,
        "head": optim.head_lr_scale,
        "matrices": optim.matrices_lr_scale,
    }.get(group, optim.gains_lr_scale)
    decay = {
        "embedding": optim.embedding_weight_decay,
        "head": optim.head_weight_decay,
        "matrices": optim.weight_decay,
        "gains": optim.gains_weight_decay,
    }.get(group, 0.0)
    if optim.base_width and group == "matrices":
        factor *= optim.base_width / config.model.hidden
    if optim.base_batch:
        factor *= math.sqrt(config.train.batch_size / optim.base_batch)
    return GroupSettings(factor, decay)


def update_rules(config: RunConfig) -> Mapping[str, UpdateRule]:
    """Return each parameter's update rule, by canonical name in canonical order."""
    return _rules(config.model, config.optim, config.precision.exact)


@lru_cache(maxsize=32)
def _rules(model: ModelConfig, optim: OptimConfig, exact: bool) -> Mapping[str, UpdateRule]:
    optimizer = OPTIMIZERS[optim.name]
    rule = (exact and optimizer.exact) or optimizer.rule
    return {name: rule(parameter, optim) for name, parameter in graph_of(model).parameters.items()}


def moment_names(config: RunConfig) -> dict[str, list[str]]:
    """Map each kind of optimizer state to the parameters that have it, in canonical order."""
    found: dict[str, list[str]] = {}
    for name, rule in update_rules(config).items():
        for kind in rule.moments:
            found.setdefault(kind, []).append(name)
    return found


def check_state(config: RunConfig, state: State, parts: Mapping[str, Shape] | None = None) -> None:
    """Raise ValueError unless weights and moments have exactly the names and shapes of this run.

    parts: by parameter, the shape of a rank's part, which is also allowed.
    """
    parameters, kinds = graph_of(config.model).parameters, moment_names(config)
    if kinds.keys() != state.optimizer.keys():
        raise ValueError(f"{config.optim.name} keeps {', '.join(kinds)}; the state has {', '.join(state.optimizer)}")
    for kind, names in {"weights": list(parameters), **kinds}.items():
        arrays = state.params if kind == "weights" else state.optimizer[kind]
        missing, extra = sorted(set(names) - set(arrays)), sorted(set(arrays) - set(names))
        if missing or extra:
            raise ValueError(f"{kind}: names differ from the model's: missing {missing}, not the model's {extra}")
        for name in names:
            found, shape = shape_of(arrays, name), parameters[name].shape
            if found != shape and found != (parts or {}).get(name):
                raise ValueError(f"{kind}: {name} has shape {found}, the model's is {shape}")
