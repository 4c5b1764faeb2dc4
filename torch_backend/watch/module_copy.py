"""A copy of a user's module on the CPU, in FP64 or in its own dtypes, with given weights.

`copy.deepcopy` makes the copy. Its memo first receives parameters, buffers and tensor attributes, each already on the
CPU and in the right dtype. So the copy uses no memory of an accelerator, and tied weights stay tied.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.core.errors import UserError
from lockstep.core.parity.watch.snapshot import parameters_of, plain_name
from lockstep.core.parity.watch.uncovered import reason
from lockstep.torch_backend.watch.sharded_module import fill, is_sharded, put_empty

COMPILED = "OptimizedModule"
REDISTRIBUTES = "torchtitan.protocols.module"
REPLICATED = ("DistributedDataParallel", "DataParallel")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's module inside wrappers of torch.compile and data parallelism. Raises UserError for FSDP1."""
    while True:
        kind = type(model).__name__
        if kind == COMPILED:
            model = model._orig_mod  # type: ignore[assignment]
        elif kind in REPLICATED:
            model = model.module  # type: ignore[assignment]
        elif kind == "FullyShardedDataParallel":
            raise UserError("FullyShardedDataParallel is not copied: fully_shard (FSDP2) is")
        else:
            return model


def ranks_of(model: Any) -> int:
    """Return the number of ranks over which DistributedDataParallel averages gradients; 1 without it."""
    while type(model).__name__ == COMPILED:
        model = model._orig_mod
    group = getattr(model, "process_group", None) if type(model).__name__ == REPLICATED[0] else None
    return int(group.size()) if group is not None else 1


def copied(
    model: nn.Module,
    values: Mapping[str, np.ndarray],
    dtype: torch.dtype | None,
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    as_read: Collection[str] = (),
) -> nn.Module:
    """Copy the user's module to the CPU, with these values of its parameters, by name.

    dtype: the dtype of all floating-point tensors; None keeps their own. dtypes: exceptions for parameters, if `dtype`
    is None. as_read: parameters that use the memory and dtype of `values`. Raises UserError if a part cannot be copied.
    """
    own = unwrapped(model)
    memo: dict[int, Any] = {}
    for name, p in parameters_of(own).items():
        if type(p) is not nn.Parameter and not isinstance(p, nn.Parameter):
            raise UserError(f"{name} is a {type(p).__name__}, of which there is no copy in FP64")
        read = torch.from_numpy(values[name])
        kept = read.dtype if name in as_read else dtype or dtypes.get(name) or p.dtype
        memo[id(p)] = nn.Parameter(read.to(kept), requires_grad=p.requires_grad)
    for module in own.modules():
        tensors = [*module._buffers.values(), *(x for x in vars(module).values() if isinstance(x, Tensor))]
        for x in tensors:
            if x is not None and id(x) not in memo:
                memo[id(x)] = x.detach().to("cpu", dtype if dtype and x.is_floating_point() else x.dtype, copy=True)
    sharded = [module for module in own.modules() if is_sharded(module)]
    try:
        put_empty(sharded, memo)
        for module in own.modules():
            if type(module).__name__ == COMPILED and id(module) not in memo:
                memo[id(module)] = copy.deepcopy(module._orig_mod, memo)
        fill(sharded, memo)
        found: nn.Module = copy.deepcopy(own, memo)
    except Exception as error:
        raise UserError(f"copy.deepcopy of the module failed: {reason(error)}") from error
    for name, module in found.named_modules():
        module._compiled_call_impl = None
        _without_wrapper(name, module)
    return found


def _without_wrapper(name: str, module: nn.Module) -> None:
    """Remove a `forward` that was set on the instance: in the copy it would still run the original module.

    accelerate's is removed, because it only adds autocast. torchtitan's is removed, because it only redistributes
    tensors over ranks. Raises UserError for others.
    """
    forward = module.__dict__.get("forward")
    if forward is None or isinstance(forward, types.MethodType):
        return
    if getattr(forward, "__module__", "") == REDISTRIBUTES:
        del module.__dict__["forward"]
        return
    if "_original_forward" not in module.__dict__:
        raise UserError(
            f"{name or 'the module'}.forward was replaced on the instance, by something that still runs the original"
        )
    del module.__dict__["forward"]


def hooked(model: nn.Module) -> list[str]:
    """Return the names of parameters with hooks on their gradients; copies do not have these hooks."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return [
        plain_name(name) for name, p in unwrapped(model).named_parameters() if any(getattr(p, k, None) for k in kinds)
    ]
