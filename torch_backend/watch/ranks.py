"""The ranks that train a watched model: those of DistributedDataParallel's group, or of FSDP2's mesh.

They communicate over gloo groups of their own, on the CPU, so that the training's collectives are not affected. In a
check, a rank waits for the others for at most `MEETING`, so that a missing rank does not end the training of the rest.
It waits for rank 0's judgement without such a limit.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lockstep.core.errors import UserError
from lockstep.core.parity.watch.snapshot import array_of, parameters_of
from lockstep.core.parity.watch.together import Cut
from lockstep.core.parity.watch.uncovered import reason
from lockstep.torch_backend.watch.batches import on_cpu
from lockstep.torch_backend.watch.module_copy import COMPILED, REPLICATED, unwrapped
from lockstep.torch_backend.watch.sharded_module import divisor, shards

How = Literal["gather", "given"]
# Shorter than the timeout of training's own collectives (10 minutes for NCCL), in which other ranks may wait meanwhile.
MEETING = timedelta(minutes=5)
# Timeout of the wait for rank 0's judgement. It only matters if rank 0 hangs: its death is noticed at once.
LONGEST_WAIT = timedelta(days=1)


def ranks_that_train(model: nn.Module, gathers: bool) -> GlooRanks | None:
    """Return the ranks of a model under DistributedDataParallel or FSDP2; None for a single rank.

    With several ranks this is a collective call. Raises UserError for an unsupported layout.
    """
    members, factor = _members(model)
    return GlooRanks(members, factor, gathers) if len(members) > 1 else None


def _members(model: Any) -> tuple[list[int], float]:
    while type(model).__name__ == COMPILED:
        model = model._orig_mod
    if type(model).__name__ == REPLICATED[0]:
        members = dist.get_process_group_ranks(model.process_group)
        return members, float(len(members))
    own = unwrapped(model)
    if not shards(own):
        return [0], 1.0
    layouts = {
        tuple(map(str, p.placements)): p.device_mesh for p in parameters_of(own).values() if hasattr(p, "device_mesh")
    }
    meshes = list(dict.fromkeys(layouts.values()))
    if len(meshes) != 1 or any(_dims_of(names) is None for names in layouts):
        raise UserError(
            "parameters are sharded in a way that is not supported: use fully_shard over one mesh, of one axis or with "
            "copies along another"
        )
    members = sorted(meshes[0].mesh.flatten().tolist())
    return members, divisor(own, len(members))


def _dims_of(placements: Sequence[str]) -> tuple[int | None, ...] | None:
    """Return the tensor axis that is sharded over each mesh axis; None for an unsupported layout."""
    kinds = [name.partition("(")[0] for name in placements]
    if kinds not in (["S"], ["Shard"], ["R", "S"], ["Replicate", "Shard"]):
        return None
    return tuple(int(name.partition("(")[2].rstrip(")")) if "(" in name else None for name in placements)


class GlooRanks:
    """Ranks of `torch.distributed`, for core/parity/watch/together.py. Construction is a collective call.

    Raises UserError unless all ranks make the call within `MEETING`.
    """

    def __init__(self, members: Sequence[int], divisor: float, gathers: bool) -> None:
        self.members, self.divisor, self.gathers = members, divisor, gathers
        self.rank = list(members).index(dist.get_rank())
        self.apart = ""
        try:
            self._meeting, self._judging = (self._group(limit) for limit in (MEETING, LONGEST_WAIT))
        except RuntimeError as error:
            raise UserError(
                f"watch() was not called on all of the ranks {', '.join(map(str, members))} within "
                f"{MEETING.total_seconds():g} seconds: call it on each, or give ranks='given'"
            ) from error

    def _group(self, limit: timedelta) -> Any:
        return dist.new_group(list(self.members), timeout=limit, backend="gloo", use_local_synchronization=True)

    def gather(self, mine: Any) -> list[Any]:
        """Return every rank's object on rank 0, in the order of members; [] on other ranks."""
        found: list[Any] | None = [None] * len(self.members) if self.rank == 0 else None
        self._meet(lambda: dist.gather_object(mine, found, group_dst=0, group=self._meeting))
        return found or []

    def of_first(self, mine: Any) -> Any:
        """Return rank 0's object on every rank."""
        return self._from_first(mine, self._meeting)

    def judged(self, mine: Any) -> Any:
        """Return rank 0's object on every rank; wait up to `LONGEST_WAIT`."""
        return self._from_first(mine, self._judging)

    def _from_first(self, mine: Any, group: Any) -> Any:
        found = [mine]
        self._meet(lambda: dist.broadcast_object_list(found, group_src=0, group=group))
        return found[0]

    def _meet(self, collective: Callable[[], None]) -> None:
        """Run a collective; raise UserError if it fails, and at once in every call after a failure."""
        if self.apart:
            raise UserError(self.apart)
        try:
            collective()
        except RuntimeError as error:
            self.apart = (
                f"not all ranks came to this check within {MEETING.total_seconds():g} seconds, so no further "
                f"check is made: each rank must check the same steps ({reason(error)[:80]})"
            )
            raise UserError(self.apart) from error

    def portable(self, batch: Any) -> Any:
        """Copy a batch to the CPU. Raises UserError if it cannot be serialised."""
        found = on_cpu(batch, None)
        try:
            torch.save(found, io.BytesIO())
        except Exception as error:
            raise UserError(f"the batch cannot be sent to another rank: {reason(error)}") from error
        return found

    def part(self, tensor: Any) -> Cut:
        """Copy this rank's part of a DTensor. Raises UserError for an unsupported layout."""
        dims = tuple(getattr(placement, "dim", None) for placement in tensor.placements)
        if any(type(placement).__name__ not in ("Shard", "Replicate") for placement in tensor.placements):
            raise UserError(f"a tensor is sharded as {tensor.placements}, which cannot be gathered")
        if len(cut := [dim for dim in dims if dim is not None]) != len(set(cut)):
            raise UserError(f"a tensor is sharded twice along one axis, {tensor.placements}, which cannot be gathered")
        return Cut(array_of(tensor.to_local()), np.asarray(tensor.device_mesh.mesh.cpu()), dims)
