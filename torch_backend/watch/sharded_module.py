"""Copies of modules under FSDP2 (`torch.distributed.fsdp.fully_shard`): without FSDP2, but with its casts.

`fully_shard` gives a module another class, hooks and a state, and shards its parameters over ranks. Under a
`MixedPrecisionPolicy`, weights and inputs are cast to `param_dtype`. Each backward pass computes gradients in that
dtype. They are summed over ranks in `reduce_dtype` and stored in the dtype of the weights.
(torch/distributed/fsdp/_fully_shard/: _fsdp_state.py, _fsdp_param.py, _fsdp_collectives.py, torch 2.13.)
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lockstep.core.parity.watch.snapshot import parameters_of

# Prefix of the attributes in which torch's composable functions keep their state, and the package of their hooks.
STATES, LIBRARY = "__composable_api", "torch.distributed"


def is_sharded(module: Any) -> bool:
    """Return whether `fully_shard` was called with this module."""
    return hasattr(type(module), "_get_fsdp_state")


def shards(model: nn.Module) -> bool:
    """Return whether `fully_shard` was called with any part of a model."""
    return any(map(is_sharded, model.modules()))


def _groups(module: Any) -> Sequence[Any]:
    """Return FSDP's parameter groups of a module; torch 2.11 has at most one."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        found: Sequence[Any] = state._fsdp_param_groups
        return found
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def divisor(model: nn.Module, ranks: int) -> float:
    """Return the divisor of the gradients' sum over ranks: `ranks`, or the factor of `set_gradient_divide_factor`.

    If a model has several factors, return `ranks`; a check then reports gradients of a wrong length.
    """
    factors = {group.gradient_divide_factor for module in model.modules() if is_sharded(module)
               for group in _groups(module)}  # fmt: skip
    factor = factors.pop() if len(factors) == 1 else None
    return float(factor or ranks)


def put_empty(modules: Sequence[nn.Module], memo: dict[int, Any]) -> None:
    """Insert an empty module into the memo of `copy.deepcopy` for each FSDP module, of its class before `fully_shard`.

    `fill` then copies their attributes. This takes two passes, because modules may refer to each other.
    """
    for module in modules:
        kind: Any = type(module).__mro__[type(module)._orig_cls_mro_index]  # type: ignore[attr-defined]
        memo[id(module)] = kind.__new__(kind)


def fill(modules: Sequence[nn.Module], memo: dict[int, Any]) -> None:
    """Copy the attributes of FSDP modules, without those of FSDP, to the modules from `put_empty`."""
    for module in modules:
        memo[id(module)].__dict__.update(copy.deepcopy(dict(_own_attributes(module)), memo))


def _own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name.startswith(STATES):
            continue
        if name.endswith("_hooks") and isinstance(value, dict):
            kept = {key: hook for key, hook in value.items() if not _of_library(hook)}
            yield name, type(value)(kept)
        else:
            yield name, value


def _of_library(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)
    return str(getattr(hook, "__module__", "")).startswith(LIBRARY)


@dataclass(frozen=True)
class Casts:
    """The casts of FSDP's policies in a model, for a copy that computes on one rank.

    weights: parameter → dtype in computations. reduced: parameter → dtype of its gradient's sum over ranks. kept:
    parameter → dtype of the parameter and of its stored gradient. policies: module → FSDP's policy.
    """

    weights: dict[str, torch.dtype] = field(default_factory=dict)
    reduced: dict[str, torch.dtype] = field(default_factory=dict)
    kept: dict[str, torch.dtype] = field(default_factory=dict)
    policies: dict[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(self.kept[name] != dtype for side in (self.weights, self.reduced) for name, dtype in side.items())

    def put_on(self, model: nn.Module) -> None:
        """Register hooks that cast inputs and outputs of a copy's modules as FSDP does."""
        for name, policy in self.policies.items():
            module = model.get_submodule(name)
            if policy.cast_forward_inputs and policy.param_dtype:
                module.register_forward_pre_hook(_inputs_to(policy.param_dtype), prepend=True, with_kwargs=True)
            if policy.output_dtype:
                module.register_forward_hook(_outputs_to(policy.output_dtype))


NO_CASTS = Casts()


def casts_of(model: nn.Module) -> Casts:
    """Return the casts that FSDP makes in a model; `NO_CASTS` without FSDP."""
    found = Casts()
    names = {id(p): name for name, p in parameters_of(model).items()}
    for name, module in model.named_modules():
        if not is_sharded(module):
            continue
        state: Any = module._get_fsdp_state()
        if state._mp_policy.param_dtype or state._mp_policy.output_dtype:
            found.policies[name.replace("_orig_mod.", "").replace("_orig_mod", "")] = state._mp_policy
        for group in _groups(module):
            computes, reduces = group.mp_policy.param_dtype, group.mp_policy.reduce_dtype
            for p in (one.sharded_param for one in group.fsdp_params):
                if (own := names.get(id(p))) and p.is_floating_point():
                    found.kept[own] = p.dtype
                    found.weights[own] = computes or p.dtype
                    found.reduced[own] = reduces or computes or p.dtype
    return found


def _cast(dtype: torch.dtype, nest: Any) -> Any:
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, nest)


def _inputs_to(dtype: torch.dtype) -> Any:
    return lambda module, args, kwargs: (_cast(dtype, args), _cast(dtype, kwargs))


def _outputs_to(dtype: torch.dtype) -> Any:
    return lambda module, args, output: _cast(dtype, output)
