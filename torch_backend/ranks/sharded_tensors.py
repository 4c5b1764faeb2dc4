"""Sharded weights, gradients and moments (`parallel.strategy = "fsdp"`), by torch's FSDP2.

`fully_shard` splits every parameter along its first axis into equal parts, one per rank; the last parts may be shorter
or empty (Rajbhandari et al. 2020, arXiv 1910.02054, stage 3; Zhao et al. 2023, arXiv 2304.11277). The parameters of a
block are gathered before its forward pass, freed after it, and gathered again for its backward pass. Its gradients are
then summed over ranks, and each rank keeps its part. The other parameters (embedding, final norm, head) stay gathered
during the whole forward and backward pass, because the loss reads the head's weight outside its module.

A parameter is a DTensor. Element-wise operations work on the local parts. This file has the operations that need whole
tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor

from lockstep.core.arrays import rows_of as rows_of_arrays
from lockstep.core.arrays import shape_of
from lockstep.core.backend import Arrays
from lockstep.core.components.optimizers import BLOCK, LEAST_IN_EIGHT_BITS
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.model.graph import Shape
from lockstep.core.model.groups import update_rules
from lockstep.core.model.names import parameter_shapes
from lockstep.core.run.ranks import is_sharded, rows_of_rank

# Per-token losses are returned as a view, and no code changes them in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


class Root(nn.Module):
    """The outermost module: it runs any program with the parameters outside blocks gathered."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, program: Callable[[], Any]) -> Any:
        """Call `program()`. It has no tensor arguments: FSDP would give an unused argument a gradient of zeros."""
        return program()


def cut(model: nn.Module, config: RunConfig, device: torch.device) -> Root:
    """Shard a model over the default process group, and return its root. The model may be on the device `meta`.

    Gradients are summed over ranks, not averaged: the loss is already divided by the weight of all ranks' tokens.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    again = config.parallel.reshard_after_forward
    blocks: Any = getattr(model, "blocks")  # noqa: B009 - a submodule, not an attribute of nn.Module
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=again)
    root = Root(model)
    fully_shard(root, mesh=mesh)
    return root


def parts(module: nn.Module) -> dict[str, FSDPModule]:
    """Return the modules whose parameters are gathered together, by name; the root has the name ""."""
    return {name: found for name, found in module.named_modules() if isinstance(found, FSDPModule)}


class Gather(DefaultAllGather):
    """torch's all-gather, with a call of `begun` before it."""

    def __init__(self, begun: Callable[[], None]) -> None:
        self._begun = begun

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call `begun`, and then torch's all-gather."""
        self._begun()
        return super().__call__(*arguments, **options)


class SumAndCut(DefaultReduceScatter):
    """A reduce-scatter of a module's gradients: they are summed over ranks, and each rank keeps its part.

    If `narrow` returns a dtype, gradients are cast to it, summed and cast back, as in DDP (torch_backend/ranks/ddp.py).
    FSDP's own `reduce_dtype` would also accumulate micro-batches in that dtype.
    """

    def __init__(self, begun: Callable[[Tensor], None], narrow: Callable[[], torch.dtype | None]) -> None:
        self._begun, self._narrow = begun, narrow

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Sum `input_tensor` over ranks, and write this rank's part to `output_tensor`.

        input_tensor: the parts of all ranks, one after another. op: ignored; the operation is always a sum.
        """
        self._begun(input_tensor)
        narrow = self._narrow()
        if narrow is None:
            return super().__call__(output_tensor, input_tensor, group, dist.ReduceOp.SUM)
        out = torch.empty_like(output_tensor, dtype=narrow)
        work = super().__call__(out, input_tensor.to(narrow), group, dist.ReduceOp.SUM)
        output_tensor.copy_(out)
        return work


class NotSummed(DefaultReduceScatter):
    """A replacement for the reduce-scatter: `take` receives each parameter and this rank's own whole gradient."""

    def __init__(self, members: Sequence[Tensor], take: Callable[[Tensor, Tensor], None]) -> None:
        self._members, self._take = members, take

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Call `take` with each parameter and this rank's gradient, and write zeros to `output_tensor`.

        input_tensor: one row per rank, which holds that rank's part of every gradient, padded to equal sizes.
        """
        by_rank = input_tensor.view(group.size(), -1)
        begin = 0
        for p in self._members:
            rows, row = -(-p.shape[0] // group.size()), p.shape[1:]
            size = rows * row.numel()
            padded = by_rank[:, begin : begin + size].reshape(group.size() * rows, *row)
            self._take(p, padded[: p.shape[0]])
            begin += size
        output_tensor.zero_()


# Whole tensors and parts. The part of a tensor that is not sharded is the tensor itself.


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory, detached from autograd."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor from all ranks. Every rank calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def as_part(value: Tensor, like: Tensor) -> Tensor:
    """Wrap `value`, this rank's part, as a DTensor that is sharded like `like`; unchanged if `like` is not sharded."""
    if not isinstance(like, DTensor):
        return value
    return DTensor.from_local(
        value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def rows_of(tensor: Tensor) -> slice:
    """Return the rows of the whole tensor that this rank holds."""
    count = tensor.shape[0]
    if not isinstance(tensor, DTensor):
        return slice(0, count)
    return rows_of_rank(count, tensor.device_mesh.get_local_rank(), tensor.device_mesh.size())


def part_shape(tensor: Tensor) -> Shape:
    """Return the shape of this rank's part of a tensor."""
    return tuple(local(tensor).shape)


def put(tensor: Tensor, rows: np.ndarray) -> None:
    """Copy `rows`, this rank's rows, into its part of `tensor`."""
    local(tensor).copy_(torch.from_numpy(np.ascontiguousarray(rows)))


def sum_of_squares(norms: Tensor) -> Tensor:
    """Return the norms of whole tensors, float64, from the norms of the parts. Every rank calls it."""
    squares = norms.double().square()
    dist.all_reduce(squares)
    return squares.sqrt()


# Layouts that cannot be sharded


def check_sharded(config: RunConfig) -> None:
    """Raise UserError if a run has 8-bit moments and a rank's part of a parameter is not made of whole blocks."""
    if not is_sharded(config):
        return
    shapes = parameter_shapes(config.model)
    for name, rule in update_rules(config).items():
        if rule.moment_bytes and not _blocks_stay_whole(shape := shapes[name], config.train.ranks):
            raise UserError(
                f"optim.name = {config.optim.name!r} over {config.train.ranks} ranks of parallel.strategy = 'fsdp': a "
                f"rank's part of {name} {shape} is not made of whole blocks of {BLOCK} numbers, "
                f"{LEAST_IN_EIGHT_BITS} or more in all; take adamw, ddp or another number of ranks"
            )


def _blocks_stay_whole(shape: Shape, ranks: int) -> bool:
    row = int(np.prod(shape[1:]))
    parts = (rows_of_rank(shape[0], rank, ranks) for rank in range(ranks))
    sizes = [(part.stop - part.start) * row for part in parts]
    return all(size % BLOCK == 0 and size >= LEAST_IN_EIGHT_BITS for size in sizes)


def to_numpy(tensor: Tensor | None) -> np.ndarray:
    """Copy a whole tensor to host memory; a sharded one is gathered, and every rank must call it.

    16-bit floating-point numbers become float32, because NumPy has no bf16.
    """
    assert tensor is not None
    array: np.ndarray = _widened(whole(tensor.detach()).to("cpu", copy=True)).numpy()
    return array


def part_to_numpy(tensor: Tensor | None) -> np.ndarray:
    """Copy this rank's part of a tensor to host memory; 16-bit floating-point numbers become float32."""
    assert tensor is not None
    array: np.ndarray = _widened(local(tensor).to("cpu", copy=True)).numpy()
    return array


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize == 2 else tensor


def own_rows(arrays: Arrays, name: str, like: Tensor) -> np.ndarray:
    """Return this rank's rows of the array `name`.

    The array has all rows or, if `like` is sharded, may have only this rank's rows.
    """
    if not isinstance(like, DTensor):
        return arrays[name]
    rows = rows_of(like)
    if shape_of(arrays, name) != tuple(like.shape):
        return arrays[name]
    return rows_of_arrays(arrays, name, rows)
