"""Stores of tensors: in memory for small models and tests, or in a folder, with one tensor at a time in memory.

A tensor has a kind (`before/params`, `taps`, …) and a name. A folder holds

    index.json             file, dtype, shape and digests of each tensor, digests of headers; written last
    embedding.safetensors  the tensors of one segment of the model; `blocks.3.safetensors`, `head.safetensors`,
                           and `blocks.3-1.safetensors` and so on after a full header

and is readable by safetensors alone: each key is KIND/NAME. A folder without its index is not evidence.

Several ranks write to one folder, each to its own files (`rank-1.blocks.3.safetensors`), the rows of each tensor that
it holds. A rank that has written all its tensors writes its entries to `rank-1.json`. Rank 0 waits for these files and
adds the entries to the index.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from lockstep.core.backend import Arrays
from lockstep.core.errors import UserError
from lockstep.core.files.atomic import read_whole
from lockstep.core.parity.evidence.index import (
    BF16,
    DATA,
    DTYPES,
    HEADER,
    INDEX,
    NAMES,
    PIECE,
    Entries,
    Entry,
    digest_of,
    hashes_of,
    index_bytes,
    pieces,
    read_index,
    shape_of,
    stored_dtype,
)
from lockstep.core.run.ranks import Ranks

# Seconds between rank 0's tests for the other ranks' files.
LOOK_SECONDS = 0.02


class Store(Protocol):
    """A place for evidence, written one tensor at a time."""

    @property
    def ranks(self) -> int:
        """Number of ranks that put tensors, each the part that it holds."""
        ...

    def put(self, kind: str, name: str, array: np.ndarray) -> None:
        """Store a tensor of any shape. Raises UserError if writing fails, ValueError if the name exists."""
        ...

    def get(self, kind: str, name: str) -> np.ndarray:
        """Return a tensor. Raises KeyError if it does not exist, UserError if it is damaged."""
        ...

    def part(self, kind: str, name: str, start: int, stop: int) -> np.ndarray:
        """Return elements `start` to `stop` of the flat tensor without reading the rest. Raises as `get`."""
        ...

    def digest(self, kind: str, name: str) -> str:
        """Return the digest of a tensor's bytes (`digest_of`), which is equal for equal bytes. Raises KeyError."""
        ...

    def arrays(self, kind: str) -> Arrays:
        """Return all tensors of a kind by name."""
        ...

    def scratch(self) -> Store:
        """Return another store of the same type, for temporary tensors."""
        ...

    def remove(self) -> None:
        """Remove all tensors."""
        ...


class MemoryStore:
    """A store in memory, which keeps references to the arrays."""

    ranks = 1

    def __init__(self) -> None:
        self._kinds: dict[str, dict[str, np.ndarray]] = {}

    def put(self, kind: str, name: str, array: np.ndarray) -> None:
        """Implement `Store.put`."""
        if name in (of_kind := self._kinds.setdefault(kind, {})):
            raise ValueError(f"{kind}/{name} exists already")
        of_kind[name] = array

    def get(self, kind: str, name: str) -> np.ndarray:
        """Implement `Store.get`."""
        return self._kinds[kind][name]

    def part(self, kind: str, name: str, start: int, stop: int) -> np.ndarray:
        """Implement `Store.part`."""
        return self.get(kind, name).reshape(-1)[start:stop]

    def digest(self, kind: str, name: str) -> str:
        """Implement `Store.digest`."""
        return digest_of(self.get(kind, name))

    def arrays(self, kind: str) -> Arrays:
        """Implement `Store.arrays`."""
        return self._kinds.get(kind, {})

    def scratch(self) -> Store:
        """Implement `Store.scratch`."""
        return MemoryStore()

    def remove(self) -> None:
        """Implement `Store.remove`."""
        self._kinds.clear()


class NoStore(MemoryStore):
    """A store that keeps nothing, for a rank that takes part in gathering for rank 0."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        self.ranks = ranks

    def put(self, kind: str, name: str, array: np.ndarray) -> None:
        """Discard the tensor."""


@dataclass
class _Segment:
    """A file that is being written.

    size: bytes of its data.
    header: JSON of each tensor in it.
    length: bytes of the header.
    """

    file: str
    size: int = 0
    header: list[str] = field(default_factory=list)
    length: int = 2

    def has_room(self, described: str) -> bool:
        """Return whether the header has room for another tensor."""
        return self.length + len(described) + 1 <= HEADER


class FolderStore:
    """A store in a folder. `create` and `join` make one for writing and reading, `open` one for reading.

    Each tensor that is read is a separate memory map, private and writable. Nothing else is kept in memory. Its SHA-256
    is verified at the first read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # This part's rank, the number of ranks, and the time in seconds that rank 0 waits for the others.
        self.rank, self.ranks, self._patience = 0, 1, 0.0
        self._entries: Entries = {}
        # Rank 0's tensors that this rank may read.
        self._lent: Entries = {}
        self._documents: dict[str, str] = {}
        self._same: dict[tuple[Any, ...], Entry] = {}
        self._segments: dict[str, list[_Segment]] = {}
        self._verified: set[tuple[str, int, str]] = set()
        # True after the index is written.
        self.finished = False

    @classmethod
    def create(cls, folder: Path, ranks: int = 1, patience: float = 0.0) -> Self:
        """Make the folder, which must not exist, in an existing one. Raises UserError if this fails.

        ranks: number of ranks that write, this one being rank 0.
        patience: time in seconds that rank 0 waits for the others.
        """
        try:
            folder.mkdir()
        except OSError as error:
            raise UserError(f"cannot write the evidence {folder}: {error.strerror or error}") from error
        made = cls(folder)
        made.ranks, made._patience = ranks, patience
        return made

    @classmethod
    def join(cls, folder: Path, rank: int, ranks: int) -> Self:
        """Open the folder that rank 0 has made, for writing. Raises UserError if this rank does not see it."""
        if not folder.is_dir():
            raise UserError(
                f"rank {rank} does not see {folder}, the folder of rank 0's evidence: all nodes must have it "
                "under the same name (TMPDIR selects another place)"
            )
        made = cls(folder)
        made.rank, made.ranks = rank, ranks
        return made

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a finished folder. Raises UserError as `read_index`."""
        made = cls(folder)
        made._entries, made._documents, _, _ = read_index(folder)
        made.finished = True
        return made

    def put(self, kind: str, name: str, array: np.ndarray) -> None:
        """Implement `Store.put`. A tensor with bytes, dtype and shape of a stored one is not written again."""
        if self.finished:
            raise ValueError(f"{self.folder} is finished: {kind}/{name} cannot be added")
        if name in (of_kind := self._entries.setdefault(kind, {})):
            raise ValueError(f"{kind}/{name} exists already")
        array = np.asarray(array)
        dtype = NAMES.get(array.dtype.newbyteorder("<"))
        if dtype is None:
            self.remove()
            raise UserError(f"cannot write the evidence {self.folder}: {kind}/{name} is of dtype {array.dtype}")
        flat = np.ascontiguousarray(array, dtype=DTYPES[dtype]).reshape(-1)
        hashes = hashes_of(flat)
        entry = self._same.get((dtype, array.shape, hashes))
        if entry is None:
            try:
                entry = self._append(f"{kind}/{name}", segment_of(name), flat, array.shape, dtype, hashes)
            except OSError as error:
                self.remove()
                raise UserError(f"cannot write the evidence {self.folder}: {error.strerror or error}") from error
            self._same[dtype, array.shape, hashes] = entry
        of_kind[name] = (entry,)

    def get(self, kind: str, name: str) -> np.ndarray:
        """Implement `Store.get`."""
        parts = self._parts(kind, name)
        if len(parts) == 1:
            return self._read(parts[0], 0, parts[0].size).reshape(parts[0].shape)
        found = np.empty(shape_of(parts), DTYPES[parts[0].dtype])
        rows = 0
        for entry in parts:
            found[rows : rows + entry.shape[0]] = self._read(entry, 0, entry.size).reshape(entry.shape)
            rows += entry.shape[0]
        return found

    def part(self, kind: str, name: str, start: int, stop: int) -> np.ndarray:
        """Implement `Store.part`. The pieces that overlap the part are verified."""
        parts = self._parts(kind, name)
        start, stop, _ = slice(start, stop).indices(sum(entry.size for entry in parts))
        found, begin = [], 0
        for entry in parts:
            first, last = max(start - begin, 0), min(stop - begin, entry.size)
            if first < last or len(parts) == 1:
                found.append(self._read(entry, first, max(first, last)))
            begin += entry.size
        return found[0] if len(found) == 1 else np.concatenate(found or [np.empty(0, DTYPES[parts[0].dtype])])

    def digest(self, kind: str, name: str) -> str:
        """Implement `Store.digest` from the index; for a tensor in several parts, from its bytes."""
        parts = self._parts(kind, name)
        return parts[0].digest if len(parts) == 1 else digest_of(self.get(kind, name))

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """Return a tensor's shape from the index. Raises KeyError if it does not exist."""
        return shape_of(self._parts(kind, name))

    def names(self, kind: str) -> KeysView[str]:
        """Return the names of a kind, in the order of `put`."""
        return (self._entries.get(kind) or self._lent.get(kind, {})).keys()

    def arrays(self, kind: str) -> Stored:
        """Implement `Store.arrays`. A tensor is read on access."""
        return Stored(self, kind)

    def lend(self, ranks: Ranks, of: str) -> None:
        """Share with every rank, before `finish`, the tensors that rank 0 has put under kinds that begin with `of`."""
        lent = ranks.of_first(lambda: {k: dict(tensors) for k, tensors in self._entries.items() if k.startswith(of)})
        self._lent |= lent if self.rank else {}

    def scratch(self) -> Self:
        """Implement `Store.scratch`, with a folder inside this one."""
        folders = (self.folder / f"scratch-{self.rank}-{number}" for number in itertools.count())
        return type(self).create(next(folder for folder in folders if not folder.exists()))

    def document(self, name: str) -> bytes:
        """Return the document that `finish` wrote under this name. Raises UserError if it is missing or damaged."""
        path = self.folder / name
        if name not in self._documents:
            raise UserError(f"{self.folder / INDEX} names no {name}")
        if path.is_symlink():
            raise UserError(f"cannot read {path}: it is no file")
        raw = read_whole(path)
        if hashlib.sha256(raw).hexdigest() != self._documents[name]:
            raise UserError(f"{path} was damaged after it was written (its SHA-256 differs)")
        return raw

    def finish(self, documents: Mapping[str, bytes] | None = None) -> None:
        """Write the headers, then `documents`, then the index. Raises UserError if writing fails.

        Rank 0 waits for the other ranks, which write no documents.
        """
        written = [s for of_name in self._segments.values() for s in of_name]
        sizes = {s.file: DATA + s.size for s in written}
        documents = documents or {}
        try:
            headers = {}
            for segment in written:
                with (self.folder / segment.file).open("r+b") as file:
                    file.write(header := _header(segment))
                headers[segment.file] = hashlib.sha256(header).hexdigest()
            for name, raw in documents.items():
                (self.folder / name).write_bytes(raw)
            if self.rank == 0:
                more, of_more = self._take_in()
                sizes |= more
                headers |= of_more
            name = _of_rank(self.rank) if self.rank else INDEX
            aside = self.folder / f".{name}"
            aside.write_bytes(index_bytes(sizes, headers, self._entries, documents))
            os.replace(aside, self.folder / name)
        except OSError as error:
            self.remove()
            raise UserError(f"cannot write the evidence {self.folder}: {error.strerror or error}") from error
        except UserError:
            self.remove()
            raise
        self._documents = {name: hashlib.sha256(raw).hexdigest() for name, raw in documents.items()}
        self.finished = True

    def _take_in(self) -> tuple[dict[str, int], dict[str, str]]:
        """Wait for the entries of the other ranks, and append them. Returns sizes and header digests of their files.

        Raises UserError if a rank has lost its part, or does not finish in time.
        """
        until, sizes, headers = time.monotonic() + self._patience, dict[str, int](), dict[str, str]()
        for rank in range(1, self.ranks):
            path = self.folder / _of_rank(rank)
            while not path.exists():
                if (self.folder / _lost(rank)).exists():
                    raise UserError(f"rank {rank} could not write its part of the evidence")
                if time.monotonic() > until:
                    raise UserError(f"rank {rank} gave no part of the evidence within {self._patience:g} s")
                time.sleep(LOOK_SECONDS)
            entries, _, of_rank, their_headers = read_index(self.folder, path.name)
            path.unlink()
            for kind, by_name in entries.items():
                of_kind = self._entries.setdefault(kind, {})
                for name, parts in by_name.items():
                    of_kind[name] = (*of_kind.get(name, ()), *parts)
            sizes |= of_rank
            headers |= their_headers
        return sizes, headers

    def remove(self) -> None:
        """Implement `Store.remove`: delete the folder. On other ranks than 0, report that the part is lost."""
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        with contextlib.suppress(OSError):
            (self.folder / _lost(self.rank)).touch()

    def move(self, folder: Path) -> None:
        """Move to `folder`, which must not exist: rename if the file system can, else copy. Raises OSError."""
        shutil.move(self.folder, folder)
        self.folder = folder

    def flush(self) -> None:
        """Wait until all data is on the disk. Raises OSError."""
        for path in (*self.folder.iterdir(), self.folder):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the path. Unpickling opens the folder."""
        return FolderStore.open, (self.folder.resolve(),)

    def _parts(self, kind: str, name: str) -> tuple[Entry, ...]:
        return (self._entries.get(kind) or self._lent.get(kind, {}))[name]

    def _append(
        self, key: str, segment: str, flat: np.ndarray, shape: tuple[int, ...], dtype: str, hashes: tuple[str, ...]
    ) -> Entry:
        stored = BF16 if dtype == "F32" and _fits_bf16(flat) else dtype
        length = flat.size * stored_dtype(stored).itemsize
        files = self._segments.setdefault(segment, [])
        if not files or not files[-1].has_room(_described(key, stored, shape, files[-1].size, length)):
            of_rank = f"rank-{self.rank}." if self.rank else ""
            number = f"-{len(files)}" if files else ""
            files.append(_Segment(f"{of_rank}{segment}{number}.safetensors"))
        file = files[-1]
        described = _described(key, stored, shape, file.size, length)
        if not file.has_room(described):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        out = os.open(self.folder / file.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            if not file.header:
                _write(out, memoryview(bytes(DATA)))
            for start in range(0, flat.size, PIECE):
                piece = flat[start : start + PIECE]
                _write(out, (_upper(piece) if stored == BF16 else piece.view(np.uint8)).data)
        finally:
            os.close(out)
        entry = Entry(file.file, dtype, stored, shape, file.size, hashes)
        file.size += length
        file.header.append(described)
        file.length += len(described) + 1
        self._verified |= {_piece(entry, number) for number in pieces(entry, 0, entry.size)}
        return entry

    def _read(self, entry: Entry, start: int, stop: int) -> np.ndarray:
        dtype, path = stored_dtype(entry.stored), self.folder / entry.file
        if start == stop:
            return np.empty(0, DTYPES[entry.dtype])
        self._verify(entry, start, stop)
        try:
            at = DATA + entry.begin + start * dtype.itemsize
            found = np.asarray(np.memmap(path, dtype, "c", at, (stop - start,)))
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        if entry.stored == BF16:
            return _widened(found)
        return found if found.flags.aligned else found.copy()

    def _verify(self, entry: Entry, start: int, stop: int) -> None:
        """Verify the pieces that were not read before, through a buffer. No page of a memory map becomes resident."""
        path, dtype = self.folder / entry.file, stored_dtype(entry.stored)
        for number in pieces(entry, start, stop):
            if _piece(entry, number) in self._verified:
                continue
            first = number * entry.per_piece
            count = min(entry.per_piece, entry.size - first)
            try:
                with path.open("rb") as file:
                    file.seek(DATA + entry.begin + first * dtype.itemsize)
                    raw = np.frombuffer(file.read(count * dtype.itemsize), np.uint8)
            except OSError as error:
                raise _unreadable(path, error) from error
            if raw.size == count * dtype.itemsize:
                found = _widened(raw.view(dtype)) if entry.stored == BF16 else raw
                if hashes_of(found) == (entry.sha256[number],):
                    self._verified.add(_piece(entry, number))
                    continue
            raise UserError(f"{path} was damaged after it was written (its SHA-256 differs)")


class Stored(Mapping[str, np.ndarray]):
    """The tensors of one kind in a folder, by name. Each is read on access, and none is kept."""

    def __init__(self, store: FolderStore, kind: str) -> None:
        self.store, self.kind = store, kind

    def __getitem__(self, name: str) -> np.ndarray:
        return self.store.get(self.kind, name)

    def __contains__(self, name: object) -> bool:
        return name in self.store.names(self.kind)

    def __iter__(self) -> Iterator[str]:
        return iter(self.store.names(self.kind))

    def __len__(self) -> int:
        return len(self.store.names(self.kind))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.store, self.kind)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return self.store.shape(self.kind, name)

    def digest(self, name: str) -> str:
        """Return the digest of a tensor without reading it (`digest_of`)."""
        return self.store.digest(self.kind, name)

    def part(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return elements `start` to `stop` of the flat tensor."""
        return self.store.part(self.kind, name, start, stop)


def segment_of(name: str) -> str:
    """Return the segment of the model that a tensor belongs to: `embedding`, `blocks.N` or `head`."""
    first, *rest = name.rpartition("/")[2].split(".")
    if first == "blocks" and rest and rest[0].isascii() and rest[0].isdigit() and len(rest[0]) < 9:
        return f"blocks.{int(rest[0])}"
    return "embedding" if first == "embed" else "head"


def _of_rank(rank: int) -> str:
    return f"rank-{rank}.json"


def _lost(rank: int) -> str:
    return f"rank-{rank}.lost"


def _piece(entry: Entry, number: int) -> tuple[str, int, str]:
    return entry.file, entry.begin, entry.sha256[number]


def _described(key: str, stored: str, shape: tuple[int, ...], begin: int, length: int) -> str:
    return f"{json.dumps(key)}:" + json.dumps(
        {"dtype": stored, "shape": list(shape), "data_offsets": [begin, begin + length]}, separators=(",", ":")
    )


def _header(segment: _Segment) -> bytes:
    return HEADER.to_bytes(8, "little") + f"{{{','.join(segment.header)}}}".encode().ljust(HEADER)


def _write(descriptor: int, data: memoryview) -> None:
    """Write all of the data. A single call may write less."""
    while data.nbytes:
        data = data[os.write(descriptor, data) :]


def _fits_bf16(flat: np.ndarray) -> bool:
    """Return whether the lower half of every float32 is zero, NaN and −0 included."""
    bits = flat.view(np.uint32)
    # If the first numbers are not exact in bf16, the rest need not be tested.
    parts = (slice(0, 1024), *(slice(i, i + PIECE) for i in range(0, bits.size, PIECE)))
    return not any((bits[part] & 0xFFFF).any() for part in parts)


def _upper(piece: np.ndarray) -> np.ndarray:
    halves: np.ndarray = (piece.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    return halves


def _widened(halves: np.ndarray) -> np.ndarray:
    found = halves.astype("<u4")
    found <<= 16
    return found.view("<f4")


def _unreadable(path: Path, error: OSError | ValueError) -> UserError:
    if isinstance(error, FileNotFoundError):
        return UserError(f"{path} is missing")
    if isinstance(error, OSError):
        return UserError(f"cannot read {path}: {error.strerror or error}")
    return UserError(f"{path} is shorter than it was written")
