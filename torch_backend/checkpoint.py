"""A session's state into a checkpoint's folder by torch.distributed.checkpoint, while training goes on.

Every rank copies its share of the tensors, or its part of each where they are cut over ranks, to host memory, which is
what training waits for, and writes it to a file of safetensors of its own. Those files say which part of which tensor
they hold (`HuggingFaceStorageWriter`; torch's other writer leaves a pickle), and core/checkpoint/format.py reads them
without torch.
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
# A rank that writes for longer than this is given up.
PATIENCE = timedelta(hours=1)
# Timeout for making a group, right after the ranks have met.
MEETING = timedelta(minutes=1)
# torch.distributed.checkpoint builds each file in memory before it writes it.
FILE_BYTES = 256_000_000


class Writer:
    """A writer of a session's states. It keeps its host memory from one checkpoint to the next, until `release`."""

    def __init__(self, session: Programs) -> None:
        self._session = session
        self._staged: dict[str, Tensor] = {}
        self._group: dist.ProcessGroup | None = None
        self._mesh: DeviceMesh | None = None

    def join_ranks(self) -> None:
        """Make the group over which ranks agree on a checkpoint: not that of a step, whose messages it must not meet.

        Every rank calls it. Not left to the first checkpoint: whoever makes a group waits for a rank that has died.
        """
        self._group = dist.new_group(backend="gloo", timeout=MEETING)
        set_timeout(PATIENCE, self._group)
        if self._session.root is not None:
            self._mesh = DeviceMesh.from_group(self._group, "cpu")

    def release(self) -> None:
        """Release the host memory; a checkpoint that is being written keeps it until it is on the disk."""
        self._staged = {}

    def begin(self, folder: Path) -> WritingTorch:
        """Copy this rank's share to host memory. Every rank of the session calls it, and `wait` of what it gives."""
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
            if not tensor.numel():  # with more ranks than rows, other ranks have them
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
        """Begin to copy into host memory; 8-bit moments as codes and scales, a quarter of what they stand for."""
        if in_codes(tensor):
            codes, scale = self._copy(f"{name}/codes", tensor.codes), self._copy(f"{name}/scale", tensor.scale)
            return type(tensor)(codes, scale, tensor.qmap.cpu(), tensor.signed, tensor.dtype)
        if name not in self._staged:
            self._staged[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return self._staged[name].copy_(tensor, non_blocking=True)

    def _as_part(self, staged: Tensor, whole: Tensor) -> Tensor:
        """Return a copy in host memory as the part of a tensor that it is; ranks use this writer's group."""
        if not isinstance(whole, DTensor):
            return staged
        assert self._mesh is not None
        return DTensor.from_local(
            staged, self._mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )


class WritingTorch:
    """A rank's part of a state on its way into a folder."""

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
        """Return names of this rank's tensors that are not finite, and a count of other ranks'. Every rank calls it."""
        odd = [name for name, tensor in self._tensors.items() if not torch.isfinite(numbers_of(local(tensor))).all()]
        if self._group is not None:
            found = torch.tensor(len(odd))
            dist.all_reduce(found, group=self._group)
            odd += ["a tensor of another rank"] * (int(found) - len(odd))
        return odd

    def wait(self) -> None:
        """Write this rank's files, and wait for the other ranks. Raises OSError if any of them could not.

        Its copy of the state is released: a writing is waited for once.
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
    """Write a canonical state into a folder, as a session of one rank writes its own; return the write in progress."""
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
    """Return torch.distributed.checkpoint's planner, which makes numbers of 8-bit moments when they are written."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    class Planner(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return numbers_of(super().transform_object(write_item, object))

    return Planner()


def _parameter(session: Programs, name: str) -> Tensor:
    """Return the parameter to which a tensor of the state belongs."""
    return session.parameters[name.partition("/")[2]]


def named_tensors(session: Programs) -> dict[str, Callable[[], Tensor]]:
    """Return a reader of each tensor of the state, by KIND/PARAMETER, alike on all ranks; moments as they are kept."""
    found: dict[str, Callable[[], Tensor]] = {f"{PARAMS}/{name}": p.detach for name, p in session.parameters.items()}
    for kind, names in moment_names(session.config).items():
        for name in names:
            found[f"{kind}/{name}"] = partial(kept_moment, session.optimizer, session.parameters[name], kind)
    return found


def shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign tensors to the ranks that write them: the largest first, each to the rank with least so far."""
    of_rank: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        least = load.index(min(load))
        of_rank[least].append(number)
        load[least] += sizes[number]
    return of_rank


def files_of(sizes: Mapping[str, int], most: int) -> dict[str, int]:
    """Assign each tensor a file, from 1, so that no file has more than `most` bytes but for a tensor that has."""
    found, filled = {}, 0
    number = 1
    for name, size in sizes.items():
        if filled and filled + size > most:
            number, filled = number + 1, 0
        found[name], filled = number, filled + size
    return found
