"""What an optimizer does by parameter group: learning rate, weight decay, and the state that it keeps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.core.backend import State
from lockstep.core.config.schema import OptimConfig, RunConfig
from lockstep.core.model.names import Shape, group_of, parameter_shapes

# 8-bit moments are kept in blocks of so many numbers with a scale each (Dettmers et al. 2022, arXiv 2110.02861), and
# small tensors are not.
BLOCK, LEAST_IN_EIGHT_BITS = 256, 4096


@dataclass(frozen=True)
class GroupSettings:
    """lr_factor: the group's learning rate / the schedule's. weight_decay: λ of p ← p·(1 − lr·lr_factor·λ)."""

    lr_factor: float
    weight_decay: float


def group_settings(config: RunConfig, group: str) -> GroupSettings:
    """Learning rate and decay of a group of core/model/names.py; biases share the gains' scale and do not decay.

    Width rule: a matrix's rate × base_width / hidden, as Adam's under μP (Yang et al. 2022, arXiv 2203.03466, table 3).
    Batch rule: every rate × √(batch_size / base_batch) (Malladi et al. 2022, arXiv 2205.10287: Adam's noise).
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


def by_muon(optim: OptimConfig, name: str) -> bool:
    """Whether Muon updates this parameter; AdamW updates what is not a matrix between activations."""
    return optim.name == "muon" and group_of(name) == "matrices"


def in_eight_bits(optim: OptimConfig, shape: Shape) -> bool:
    """Whether a tensor of this shape has 8-bit moments, where the policy rounds anything at all (fp64 does not).

    Torchao leaves out what blocks do not divide (torchao/optim/adam.py, `_new_buffer`); in bitsandbytes the last block
    is a shorter one (bitsandbytes/optim/optimizer.py, `Optimizer2State.init_state`).
    """
    size = math.prod(shape)
    whole = size % BLOCK == 0 or optim.eight_bit == "bitsandbytes"
    return optim.name == "adamw8bit" and size >= LEAST_IN_EIGHT_BITS and whole


def moment_kinds(optim: OptimConfig, name: str) -> tuple[str, ...]:
    """The kinds of state that the optimizer keeps of a parameter, each an array of the parameter's shape."""
    return ("momentum_buffer",) if by_muon(optim, name) else ("exp_avg", "exp_avg_sq")


def moment_names(optim: OptimConfig, names: Iterable[str]) -> dict[str, list[str]]:
    """Kind of state → those of `names` that have it, in their order."""
    found: dict[str, list[str]] = {}
    for name in names:
        for kind in moment_kinds(optim, name):
            found.setdefault(kind, []).append(name)
    return found


def check_state(config: RunConfig, state: State) -> None:
    """Raise ValueError unless weights and moments have exactly the names and shapes of this run's."""
    shapes = parameter_shapes(config.model)
    kinds = moment_names(config.optim, shapes)
    if kinds.keys() != state.optimizer.keys():
        raise ValueError(f"{config.optim.name} keeps {', '.join(kinds)}; the state has {', '.join(state.optimizer)}")
    for kind, names in {"weights": list(shapes), **kinds}.items():
        arrays = state.params if kind == "weights" else state.optimizer[kind]
        missing, extra = sorted(set(names) - set(arrays)), sorted(set(arrays) - set(names))
        if missing or extra:
            raise ValueError(f"{kind}: names differ from the model's: missing {missing}, not the model's {extra}")
        for name in names:
            if tuple(arrays[name].shape) != shapes[name]:
                raise ValueError(f"{kind}: {name} has shape {tuple(arrays[name].shape)}, the model's is {shapes[name]}")
