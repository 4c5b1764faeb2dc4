"""FSDP2 (`torch.distributed.fsdp.fully_shard`) on a module: it is taken off a copy, and its casts are kept.

`fully_shard` gives a module another class, hooks and a state, and cuts its parameters over ranks. With a
`MixedPrecisionPolicy`, a module computes with weights that were cast to `param_dtype`, from inputs cast alike; each
backward pass leaves gradients in that dtype, which are added over ranks in `reduce_dtype` and kept in the weights' own.
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

# Keys of a module's attributes under which torch's composable functions keep their state, and modules of their hooks.
STATES, LIBRARY = "__composable_api", "torch.distributed"


def is_sharded(module: Any) -> bool:
    """Return whether `fully_shard` was called with this module."""
    return hasattr(type(module), "_get_fsdp_state")


def shards(model: nn.Module) -> bool:
    """Return whether `fully_shard` was called with any part of a model."""
    return any(map(is_sharded, model.modules()))


def _groups(module: Any) -> Sequence[Any]:
    """Return FSDP's groups of parameters of a module; torch 2.11 has one at most."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        found: Sequence[Any] = state._fsdp_param_groups
        return found
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def divisor(model: nn.Module, ranks: int) -> float:
    """Return the divisor of the ranks' summed gradients: their number, unless `set_gradient_divide_factor` was called.

    Several factors in one model have no common loss: their number is returned, and a check names the others' length.
    """
    factors = {group.gradient_divide_factor for module in model.modules() if is_sharded(module)
               for group in _groups(module)}  # fmt: skip
    factor = factors.pop() if len(factors) == 1 else None
    return float(factor or ranks)


def put_empty(modules: Sequence[nn.Module], memo: dict[int, Any]) -> None:
    """Insert an empty module into a `copy.deepcopy`'s memo for each FSDP module, of the class before `fully_shard`.

    `fill` gives them their attributes. In two passes, since modules may know each other in any way.
    """
    for module in modules:
        kind: Any = type(module).__mro__[type(module)._orig_cls_mro_index]  # type: ignore[attr-defined]
        memo[id(module)] = kind.__new__(kind)


def fill(modules: Sequence[nn.Module], memo: dict[int, Any]) -> None:
    """Copy the attributes of FSDP's modules, without FSDP's own, to those that `put_empty` made."""
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

    weights: parameter → the dtype that it computes in. reduced: parameter → the dtype of sums over ranks. kept:
    parameter → its own dtype, and that of its gradient. policies: module → its policy.
    """

    weights: dict[str, torch.dtype] = field(default_factory=dict)
    reduced: dict[str, torch.dtype] = field(default_factory=dict)
    kept: dict[str, torch.dtype] = field(default_factory=dict)
    policies: dict[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(self.kept[name] != dtype for side in (self.weights, self.reduced) for name, dtype in side.items())

    def put_on(self, model: nn.Module) -> None:
        """Cast inputs and outputs of a copy's modules as FSDP does."""
        for name, policy in self.policies.items():
            module = model.get_submodule(name)
            if policy.cast_forward_inputs and policy.param_dtype:
                module.register_forward_pre_hook(_inputs_to(policy.param_dtype), prepend=True, with_kwargs=True)
            if policy.output_dtype:
                module.register_forward_hook(_outputs_to(policy.output_dtype))


NO_CASTS = Casts()


def casts_of(model: nn.Module) -> Casts:
    """Return the casts that FSDP makes in a model; none without a policy."""
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
