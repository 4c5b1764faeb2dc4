"""Weights, gradients and moments cut over the ranks (`parallel.strategy = "fsdp"`): torch's FSDP2.

`fully_shard` cuts every parameter along its first axis into equal parts, the last of them shorter or empty, one a rank
(Rajbhandari et al. 2020, arXiv 1910.02054, stage 3; Zhao et al. 2023, arXiv 2304.11277). A block's parameters are
gathered when it is called, freed behind it, gathered again for its backward pass; its gradients are then summed and
cut. The rest (embedding, final norm, head) is gathered while the root's forward and backward pass last: the head's
weight, which the loss reads outside its module, is there.

A parameter is a DTensor. Elementwise operations work on the parts; this file holds those that need the whole.
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

# Losses by token come out as a view; nobody changes them in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


class Root(nn.Module):
    """The outermost module, which runs any program over the model with what belongs to no block gathered."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, program: Callable[[], Any]) -> Any:
        """Call `program()`. FSDP sees none of its inputs: it would give an unused input a gradient of zeros."""
        return program()


def cut(model: nn.Module, config: RunConfig, device: torch.device) -> Root:
    """Cut a model, which may be without memory yet (device `meta`), over the default process group; returns its root.

    Gradients are summed over ranks, not averaged: the loss is divided by the weight of all ranks' tokens already.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    again = config.parallel.reshard_after_forward
    blocks: Any = getattr(model, "blocks")  # noqa: B009 - what a module is made of, not an attribute of the class
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=again)
    root = Root(model)
    fully_shard(root, mesh=mesh)
    return root


def parts(module: nn.Module) -> dict[str, FSDPModule]:
    """Return the modules whose parameters are gathered together, by name; the root's is empty."""
    return {name: found for name, found in module.named_modules() if isinstance(found, FSDPModule)}


class Gather(DefaultAllGather):
    """torch's all-gather, which first reports that it begins."""

    def __init__(self, begun: Callable[[], None]) -> None:
        self._begun = begun

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Report that the gather begins, and call torch's."""
        self._begun()
        return super().__call__(*arguments, **options)


class SumAndCut(DefaultReduceScatter):
    """A reduce-scatter of a module's gradients: the sum over all ranks, of which each keeps its part.

    In a narrow dtype if `narrow` is one: cast, summed, cast back, as DDP's buckets are (torch_backend/ranks/ddp.py).
    FSDP's own `reduce_dtype` would add up micro-batches in it as well.
    """

    def __init__(self, begun: Callable[[Tensor], None], narrow: Callable[[], torch.dtype | None]) -> None:
        self._begun, self._narrow = begun, narrow

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Sum the parts of all ranks, and keep this rank's.

        input_tensor: every rank's part, one after another; output_tensor: this rank's. op is always the sum.
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
    """A replacement for the sum: `take` gets each of a module's parameters and this rank's own whole gradient of it."""

    def __init__(self, members: Sequence[Tensor], take: Callable[[Tensor, Tensor], None]) -> None:
        self._members, self._take = members, take

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Hand `take` each parameter and this rank's gradient of it, and write zeros in place of the sum.

        input_tensor: a row a rank, of that rank's part of every gradient, filled up to equal parts.
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


# A tensor and its part. An uncut tensor is its own part.


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part, in the same memory, detached from autograd."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Gather all of it. Every rank calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def as_part(value: Tensor, like: Tensor) -> Tensor:
    """Wrap this rank's part of a tensor that is cut as `like` is."""
    if not isinstance(like, DTensor):
        return value
    return DTensor.from_local(
        value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def rows_of(tensor: Tensor) -> slice:
    """Return the rows of the whole that this rank has."""
    count = tensor.shape[0]
    if not isinstance(tensor, DTensor):
        return slice(0, count)
    return rows_of_rank(count, tensor.device_mesh.get_local_rank(), tensor.device_mesh.size())


def part_shape(tensor: Tensor) -> Shape:
    """Return the shape of this rank's part."""
    return tuple(local(tensor).shape)


def put(tensor: Tensor, rows: np.ndarray) -> None:
    """Copy this rank's rows into its part."""
    local(tensor).copy_(torch.from_numpy(np.ascontiguousarray(rows)))


def sum_of_squares(norms: Tensor) -> Tensor:
    """Turn the norms of the parts into norms of the whole tensors, float64. Every rank calls it."""
    squares = norms.double().square()
    dist.all_reduce(squares)
    return squares.sqrt()


# Layouts that cannot be cut


def check_sharded(config: RunConfig) -> None:
    """Raise UserError if a run's optimizer cannot work on parts."""
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
    """Copy a tensor, whole where it is cut over ranks, to host memory; every rank that holds a part calls it.

    Numbers of 16 bits are widened there: NumPy has no bf16.
    """
    assert tensor is not None
    array: np.ndarray = _widened(whole(tensor.detach()).to("cpu", copy=True)).numpy()
    return array


def part_to_numpy(tensor: Tensor | None) -> np.ndarray:
    """Copy this rank's part of a tensor to host memory."""
    assert tensor is not None
    array: np.ndarray = _widened(local(tensor).to("cpu", copy=True)).numpy()
    return array


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize == 2 else tensor


def own_rows(arrays: Arrays, name: str, like: Tensor) -> np.ndarray:
    """Return this rank's rows of an array by name, which holds all rows or, where `like` is cut, these rows alone."""
    if not isinstance(like, DTensor):
        return arrays[name]
    rows = rows_of(like)
    if shape_of(arrays, name) != tuple(like.shape):
        return arrays[name]
    return rows_of_arrays(arrays, name, rows)
