"""Compute a large truth block by block: only one block at a time has FP64 weights and activations in memory.

A block is a member of a ModuleList or a ModuleDict. Its weights stay in FP32. They are widened while the block runs, in
the forward pass and in the backward pass, in which `torch.utils.checkpoint` runs the block again. Gradients are FP64
and are summed in FP64, so the results are those of a whole copy in FP64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.core.parity.watch.snapshot import plain_name

# A truth is computed block by block if the FP64 weights of its blocks take at least this many bytes.
LARGE = 2**27

Sink = dict[str, Tensor]


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost members of lists and dictionaries of modules, by name."""
    found: dict[str, nn.Module | None] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{block}.") for block in found)
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not inside and name not in found:
            # `named_children` would omit the second occurrence of a block.
            found |= {f"{name}.{key}" if name else key: child for key, child in module._modules.items()}
    return {name: one for name, one in found.items() if one is not None and next(one.parameters(), None) is not None}


def kept_narrow(model: nn.Module) -> frozenset[str]:
    """Return the names of parameters to widen block by block; empty if that saves little memory.

    A parameter that is also used outside of blocks, such as a tied head's, is kept in FP64.
    """
    blocks = blocks_of(model)
    places: dict[int, set[bool]] = {}
    names: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(p), set()).add(any(name.startswith(f"{block}.") for block in blocks))
        names.setdefault(id(p), plain_name(name))
    params = {id(p): p for p in model.parameters()}
    found = [key for key, where in places.items() if where == {True} and params[key].is_floating_point()]
    large = 8 * sum(params[key].numel() for key in found) >= LARGE
    return frozenset(names[key] for key in found) if large else frozenset()


class _Widen(torch.autograd.Function):
    """The cast of a parameter to FP64; its FP64 gradient is added to `sink`."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, name: str, sink: Sink) -> Tensor:
        ctx.name, ctx.sink = name, sink
        return p.to(torch.float64)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        held = ctx.sink.get(ctx.name)
        ctx.sink[ctx.name] = grad.clone() if held is None else held + grad
        return None, None, None


def by_blocks(model: nn.Module, narrow: frozenset[str]) -> Sink:
    """Make a copy's blocks widen their own weights. Returns a dict that will receive the gradients, by name."""
    sink: Sink = {}
    names = {id(p): plain_name(name) for name, p in model.named_parameters()}
    for block in {id(block): block for block in blocks_of(model).values()}.values():
        slots = [
            (module, key, p)
            for module in block.modules()
            for key, p in module._parameters.items()
            if p is not None and names[id(p)] in narrow
        ]
        if slots:
            block.forward = _in_checkpoint(block.forward, slots, names, sink)
    return sink


def _in_checkpoint(
    forward: Callable[..., Any], slots: list[tuple[nn.Module, str, nn.Parameter]], names: dict[int, str], sink: Sink
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _widened(slots, names, sink):
            return forward(*map(_fresh, args), **{key: _fresh(value) for key, value in kwargs.items()})

    return lambda *args, **kwargs: checkpoint(run, *args, use_reentrant=False, **kwargs)


def _fresh(given: Any) -> Any:
    """Copy a key-value cache of transformers, because a block may write to it each time it runs."""
    if not type(given).__name__.endswith("Cache"):
        return given
    found = copy.copy(given)
    for name, value in vars(given).items():
        if isinstance(value, list):
            setattr(found, name, [copy.copy(one) for one in value])
    return found


@contextmanager
def _widened(slots: list[tuple[nn.Module, str, nn.Parameter]], names: dict[int, str], sink: Sink) -> Iterator[None]:
    """Replace each parameter by an FP64 attribute of its module while the context is active.

    An instance's attribute has precedence over `_parameters`.
    """
    wide = {id(p): p for _, _, p in slots}
    wide_of = {key: _Widen.apply(p, names[key], sink) for key, p in wide.items()}
    try:
        for module, key, p in slots:
            module.__dict__[key] = wide_of[id(p)]
        yield
    finally:
        for module, key, _ in slots:
            module.__dict__.pop(key, None)
