"""Run the user's own module once more, where it trains, and leave everything of the user's as it was.

Kernels, autocast, patched functions and hooks are those of the training. `torch.autograd.grad` makes the gradients:
nothing is accumulated into `.grad`, and hooks behind accumulation (DistributedDataParallel's, an optimizer's in the
backward pass) do not run. Random states, buffers, parameters and attributes of modules are put back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.core.parity.watch.limits import Precision


@contextmanager
def borrowed(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Compute eagerly, with gradients, under autocast where it is declared; then all is as before."""
    devices = {p.device.type for p in model.parameters()}
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    narrow = precision == "bf16" and dtypes == {torch.float32}
    python, numpy = random.getstate(), np.random.get_state()
    on_cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with ExitStack() as stack:
        stack.callback(np.random.set_state, numpy)
        stack.callback(random.setstate, python)
        stack.enter_context(torch.random.fork_rng(devices=on_cuda))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for device in devices:
            stack.enter_context(torch.autocast(device, torch.bfloat16, enabled=narrow))
        stack.enter_context(_put_back(model))
        yield


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Restore parameters and buffers that were written, and attributes of modules that were replaced."""
    attributes = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    # A parameter that a forward writes is rare, and as large as all others: its version tells.
    tensors = [(x, x._version, x.detach().clone()) for x in _written_often(model)]
    try:
        yield
    finally:
        for x, version, kept in tensors:
            if x._version != version:
                x.data.copy_(kept)
        for module, before, buffers in attributes:
            for mine, kept in ((vars(module), before), (module._buffers, buffers)):
                if mine.keys() != kept.keys() or any(mine[key] is not kept[key] for key in kept):
                    mine.clear()
                    mine.update(kept)


def _written_often(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        yield from (x for x in module._buffers.values() if x is not None)
        yield from (x for x in vars(module).values() if isinstance(x, Tensor) and not isinstance(x, nn.Parameter))


def written(model: nn.Module, versions: dict[str, int]) -> list[str]:
    """Return the parameters that were written since `versions_of`."""
    return [name for name, version in versions_of(model).items() if versions.get(name) != version]


def versions_of(model: nn.Module) -> dict[str, int]:
    """Return how often each parameter was written."""
    return {name: p._version for name, p in model.named_parameters()}


def gradients(loss: Any, model: nn.Module) -> None:
    """Run the backward pass of a loss, and drop the gradients."""
    leaves = [p for p in model.parameters() if p.requires_grad]
    torch.autograd.grad(loss, leaves, allow_unused=True)
