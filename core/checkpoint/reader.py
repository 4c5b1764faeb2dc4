"""The tensors in a checkpoint's folder, read a part at a time: some rows of a tensor are read without the others.

Both layouts of core/checkpoint/format.py: a file per kind, and parts as torch.distributed.checkpoint writes them on any
number of ranks. (Its own `HuggingFaceStorageReader` knows the second alone.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.core.backend import State
from lockstep.core.checkpoint.format import (
    PARAMS,
    RANDOM,
    SAFETENSORS,
    CorruptCheckpoint,
    Read,
    load_checkpoint,
    offsets_of,
    require_names,
    verify_checkpoint,
)


@dataclass(frozen=True)
class _Part:
    """A part of a tensor: its file and key, its offset in the whole, and its shape."""

    path: Path
    key: str
    begin: tuple[int, ...]
    shape: tuple[int, ...]


class Stored:
    """A folder's tensors. A file is open, and its pages are in memory, only while it is read.

    Raises ValueError for names that no tensor of a state has, and the exceptions of safetensors.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._parts: dict[tuple[str, str], list[_Part]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            if path.name == RANDOM:
                continue
            with safe_open(path, framework="numpy") as file:
                offsets = offsets_of(file)
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    kind, name = (path.stem, key) if offsets is None else key.split("/", 1)
                    require_names(kind, name)
                    shape = tuple(file.get_slice(key).get_shape())
                    begin = tuple(offsets[key]) if offsets else (0,) * len(shape)
                    self._parts.setdefault((kind, name), []).append(_Part(path, key, begin, shape))

    def state(self, step: int, scalars: Mapping[str, float]) -> State:
        """Return the state, each tensor read when it is accessed."""
        kinds: dict[str, list[str]] = {}
        for kind, name in self._parts:
            kinds.setdefault(kind, []).append(name)
        tensors = {kind: _Tensors(self, kind, names) for kind, names in kinds.items()}
        return State(step, tensors.pop(PARAMS), tensors, dict(scalars))

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor. kind: `params`, or a kind of moment."""
        ends = [np.add(part.begin, part.shape) for part in self._parts[kind, name]]
        return tuple(int(end) for end in np.max(ends, axis=0))

    def shaped(self, step: int, scalars: Mapping[str, float]) -> State:
        """Return the state with arrays of the right names and shapes that hold nothing."""
        found: dict[str, dict[str, np.ndarray]] = {}
        for kind, name in self._parts:
            found.setdefault(kind, {})[name] = np.broadcast_to(np.float32(0), self.shape(kind, name))
        return State(step, found.pop(PARAMS, {}), found, dict(scalars))

    def whole(self, kind: str, name: str) -> np.ndarray:
        """Read a whole tensor, also one without axes. Raises ValueError if parts of it are missing."""
        if self.shape(kind, name):
            return self.read(kind, name, slice(None))
        from safetensors import safe_open

        only = self._parts[kind, name][0]
        with safe_open(only.path, framework="numpy") as file:
            found: np.ndarray = file.get_tensor(only.key)
        return found

    def read(self, kind: str, name: str, rows: slice) -> np.ndarray:
        """Read some rows (a stretch of the first axis) of a tensor. Raises ValueError if parts of them are missing."""
        from safetensors import safe_open

        shape = self.shape(kind, name)
        first, last, _ = rows.indices(shape[0])
        found, filled = None, 0
        for part in self._parts[kind, name]:
            begin, end = max(first, part.begin[0]), min(last, part.begin[0] + part.shape[0])
            if begin >= end and first < last:
                continue
            with safe_open(part.path, framework="numpy") as file:
                piece = file.get_slice(part.key)[begin - part.begin[0] : max(begin, end) - part.begin[0]]
            if found is None:
                found = np.empty((last - first, *shape[1:]), piece.dtype)
            across = tuple(slice(at, at + n) for at, n in zip(part.begin[1:], part.shape[1:], strict=True))
            found[(slice(begin - first, begin - first + len(piece)), *across)] = piece
            filled += piece.size
        if found is None or filled != found.size:
            raise ValueError(f"parts of {kind}/{name} are missing")
        return found


class _Tensors(Mapping[str, np.ndarray]):
    """The tensors of a kind by name, read on access."""

    def __init__(self, stored: Stored, kind: str, names: list[str]) -> None:
        self._stored, self._kind, self._names = stored, kind, names

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        return self._stored.whole(self._kind, name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def part(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read the elements start to stop of a tensor, row-major, as a flat array; no other row is read."""
        shape = self.shape_of(name)
        if not shape:
            return self._stored.whole(self._kind, name).reshape(-1)[start:stop]
        size = max(math.prod(shape[1:]), 1)
        first = start // size
        rows = self._stored.read(self._kind, name, slice(first, -(-stop // size)))
        return rows.reshape(-1)[start - first * size : stop - first * size]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return self._stored.shape(self._kind, name)


@contextmanager
def opened_checkpoint(folder: Path, read: Read | None = None) -> Iterator[State]:
    """Verify a checkpoint as `load_checkpoint` does, and yield its state while it is open, a tensor at a time.

    Raises CorruptCheckpoint, as `load_checkpoint` does. Other formats than safetensors are read at once.
    """
    manifest = verify_checkpoint(folder)
    if manifest["format"] != SAFETENSORS:
        yield load_checkpoint(folder, read)[0]
        return
    from safetensors import SafetensorError

    try:
        yield Stored(folder).state(manifest["step"], manifest.get("scalars", {}))
    except SafetensorError as error:
        raise CorruptCheckpoint(f"{folder}: {error}") from error
