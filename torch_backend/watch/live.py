"""Run the user's own module again on its own device, and restore its state afterwards.

Kernels, autocast, patched functions and hooks are those of the training. `torch.autograd.grad` computes the gradients:
it does not accumulate into `.grad`, and hooks after accumulation (DistributedDataParallel's, an optimizer's in the
backward pass) do not run. Random states, buffers, parameters and attributes of modules are restored.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.core.backend import Arrays
from lockstep.core.parity.watch.limits import Precision
from lockstep.core.parity.watch.snapshot import plain_name


@contextmanager
def borrowed(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Run the context eagerly, with gradients, and under autocast for bf16; restore the module's state afterwards."""
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
    """Restore buffers and tensor attributes that were written, and attributes of modules that were replaced."""
    attributes = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    tensors = [(x, x.detach().clone()) for x in _written_often(model)]
    try:
        yield
    finally:
        for x, kept in tensors:
            _restore(x, kept)
        for module, before, buffers in attributes:
            _replace(vars(module), before)
            _replace(module._buffers, buffers)


def _replace(mine: dict[str, Any], before: dict[str, Any]) -> None:
    """Restore a mapping's entries, if they have changed."""
    if mine.keys() != before.keys() or any(mine[key] is not before[key] for key in before):
        mine.clear()
        mine.update(before)


def _written_often(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        yield from (x for x in module._buffers.values() if x is not None)
        yield from (x for x in vars(module).values() if isinstance(x, Tensor) and not isinstance(x, nn.Parameter))


def restore_parameters(model: nn.Module, params: Arrays) -> None:
    """Restore parameters that a forward pass changed. params: plain name → value before."""
    for name, p in model.named_parameters():
        _restore(p, torch.from_numpy(params[plain_name(name)]).to(p.dtype))


def _restore(x: Tensor, kept: Tensor) -> None:
    """Restore a tensor if its values have changed. Its version counter is no sign: batch_norm does not update it."""
    if not torch.equal(x.detach(), kept.to(x.device)):
        x.data.copy_(kept)


def gradients(loss: Any, model: nn.Module) -> None:
    """Run the backward pass of a loss, and discard the gradients."""
    leaves = [p for p in model.parameters() if p.requires_grad]
    torch.autograd.grad(loss, leaves, allow_unused=True)
