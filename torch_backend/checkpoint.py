"""Write a session's state into a checkpoint's folder with torch.distributed.checkpoint, while training continues.

Every rank copies its tensors to host memory; with sharded parameters it copies its part of each tensor. Training waits
for this copy alone. The rank then writes the copy to safetensors files of its own. The files describe which part of
which tensor they hold (`HuggingFaceStorageWriter`; torch's other writer uses pickle), and core/checkpoint/format.py
reads them without torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lockstep.core.backend import State
from lockstep.core.checkpoint.format import PARAMS, SAFETENSORS
from lockstep.core.model.groups import moment_names
from lockstep.torch_backend.optim import in_codes, kept_moment, numbers_of
from lockstep.torch_backend.programs import Programs
from lockstep.torch_backend.ranks.process_groups import set_timeout
from lockstep.torch_backend.ranks.sharded_tensors import local

# Silence torch's warning: saving from a single process is intended.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
# A checkpoint fails if a rank writes for longer than this.
PATIENCE = timedelta(hours=1)
# Timeout for the creation of a process group, right after the ranks have connected.
MEETING = timedelta(minutes=1)
# torch.distributed.checkpoint builds each file in memory before it writes it.
FILE_BYTES = 256_000_000


class Writer:
    """A writer of a session's checkpoints. It keeps its host memory between checkpoints, until `release`."""

    def __init__(self, session: Programs) -> None:
        self._session = session
        self._staged: dict[str, Tensor] = {}
        self._group: dist.ProcessGroup | None = None
        self._mesh: DeviceMesh | None = None

    def join_ranks(self) -> None:
        """Create the process group for checkpoints, so that their messages never mix with those of a step.

        Every rank calls it, before the first checkpoint: the creation of a group blocks if a rank has died by then.
        """
        self._group = dist.new_group(backend="gloo", timeout=MEETING)
        set_timeout(PATIENCE, self._group)
        if self._session.root is not None:
            self._mesh = DeviceMesh.from_group(self._group, "cpu")

    def release(self) -> None:
        """Release the host memory; a checkpoint in progress keeps its copy until it is on the disk."""
        self._staged = {}

    def begin(self, folder: Path) -> WritingTorch:
        """Copy this rank's tensors to host memory, and return the write; `wait` of the result writes the files.

        Every rank of the session calls both.
        """
        session, ranks = self._session, self._session.ranks
        tensors = named_tensors(session)
        mine = list(tensors)
        if ranks is not None and not ranks.sharded:
            sizes = [_parameter(session, name).numel() for name in mine]
            mine = [mine[number] for number in shares(sizes, ranks.count)[ranks.rank]]
        wholes, copies = {}, {}
        for name in mine:
            whole = tensors[name]()
            tensor = local(whole)
            if not tensor.numel():  # with more ranks than rows, some ranks have no part of a tensor
                continue
            wholes[name] = whole
            copies[name] = self._copy(name, tensor)
        if session.device.type == "cuda":
            torch.cuda.synchronize(session.device)
        staged = {name: self._as_part(copy, wholes[name]) for name, copy in copies.items()}
        cut_over = ranks.count if ranks is not None and ranks.sharded else 1
        files = files_of({name: _parameter(session, name).nbytes for name in tensors}, FILE_BYTES * cut_over)
        return WritingTorch(session.steps_done, dict(session.scalars), staged, folder, self._group, files)

    def _copy(self, name: str, tensor: Any) -> Any:
        """Start to copy a tensor into host memory; an 8-bit moment stays encoded, a quarter of its FP32 size."""
        if in_codes(tensor):
            codes, scale = self._copy(f"{name}/codes", tensor.codes), self._copy(f"{name}/scale", tensor.scale)
            return type(tensor)(codes, scale, tensor.qmap.cpu(), tensor.signed, tensor.dtype)
        if name not in self._staged:
            self._staged[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return self._staged[name].copy_(tensor, non_blocking=True)

    def _as_part(self, staged: Tensor, whole: Tensor) -> Tensor:
        """Return the copy of a sharded tensor's part as a DTensor on this writer's group; any other copy unchanged."""
        if not isinstance(whole, DTensor):
            return staged
        assert self._mesh is not None
        return DTensor.from_local(
            staged, self._mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )


class WritingTorch:
    """A rank's part of a state, copied and not yet written into a folder."""

    format = SAFETENSORS

    def __init__(
        self,
        step: int,
        scalars: Mapping[str, float],
        tensors: dict[str, Tensor],
        folder: Path,
        group: dist.ProcessGroup | None,
        files: Mapping[str, int],
    ) -> None:
        self.step, self.scalars = step, scalars
        self._tensors, self._folder, self._group, self._files = tensors, folder, group, files

    def not_finite(self) -> Sequence[str]:
        """Return the names of tensors that are not finite; a tensor of another rank has no name here.

        Every rank calls it.
        """
        odd = [name for name, tensor in self._tensors.items() if not torch.isfinite(numbers_of(local(tensor))).all()]
        if self._group is not None:
            found = torch.tensor(len(odd))
            dist.all_reduce(found, group=self._group)
            odd += ["a tensor of another rank"] * (int(found) - len(odd))
        return odd

    def wait(self) -> None:
        """Write this rank's files, and wait for the other ranks. Raises OSError if any rank could not write.

        It releases the copy of the state, so it can be called once only.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        writer = HuggingFaceStorageWriter(str(self._folder), dict(self._files), save_distributed=True)
        tensors, self._tensors = self._tensors, {}
        try:
            save(
                tensors,
                storage_writer=writer,
                planner=_planner(),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except CheckpointException as error:
            failed = sorted((rank, why[0]) for rank, why in error.failures.items())
            words = (f"rank {rank}: {getattr(why, 'strerror', None) or why}" for rank, why in failed)
            raise OSError("; ".join(words)) from error


def writing(state: State, folder: Path) -> WritingTorch:
    """Return the write of a canonical state into a folder, in the files that a session of one rank would write."""
    arrays = {PARAMS: state.params, **state.optimizer}
    tensors = {
        f"{kind}/{n}": torch.from_numpy(np.array(a)) for kind, by_name in arrays.items() for n, a in by_name.items()
    }
    return WritingTorch(
        state.step,
        state.scalars,
        tensors,
        folder,
        None,
        files_of({n: t.nbytes for n, t in tensors.items()}, FILE_BYTES),
    )


def _planner() -> Any:
    """Return a planner for torch.distributed.checkpoint that decodes 8-bit moments to FP32 when they are written."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    class Planner(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return numbers_of(super().transform_object(write_item, object))

    return Planner()


def _parameter(session: Programs, name: str) -> Tensor:
    """Return the parameter to which a tensor of the state, KIND/PARAMETER, belongs."""
    return session.parameters[name.partition("/")[2]]


def named_tensors(session: Programs) -> dict[str, Callable[[], Tensor]]:
    """Return a function for each tensor of the state that returns the tensor, by KIND/PARAMETER.

    Names and order are the same on all ranks. 8-bit moments are returned as codes.
    """
    found: dict[str, Callable[[], Tensor]] = {f"{PARAMS}/{name}": p.detach for name, p in session.parameters.items()}
    for kind, names in moment_names(session.config).items():
        for name in names:
            found[f"{kind}/{name}"] = partial(kept_moment, session.optimizer, session.parameters[name], kind)
    return found


def shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign tensors to the ranks that write them: the largest first, each to the rank with the smallest sum so far.

    Returns the indices into `sizes` of each rank.
    """
    of_rank: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        least = load.index(min(load))
        of_rank[least].append(number)
        load[least] += sizes[number]
    return of_rank


def files_of(sizes: Mapping[str, int], most: int) -> dict[str, int]:
    """Assign each tensor a file number, from 1; a file exceeds `most` bytes only if it holds one larger tensor."""
    found, filled = {}, 0
    number = 1
    for name, size in sizes.items():
        if filled and filled + size > most:
            number, filled = number + 1, 0
        found[name], filled = number, filled + size
    return found
