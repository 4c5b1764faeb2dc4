"""The index of a folder of evidence: place and digest of each tensor. The index is read as untrusted data."""

from __future__ import annotations

import hashlib
import math
import operator
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import read_sealed_json, sealed_json

SCHEMA = 1
INDEX = "index.json"
# Each file begins with 8 bytes for the length of its header, then a header of this size, padded with spaces.
HEADER = 1 << 15
DATA = 8 + HEADER
# A tensor is hashed in pieces of this many bytes, so that a part can be verified alone.
PIECE = 1 << 23
# Dtypes by their names in safetensors. All are stored as little-endian.
DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "|u1",
    "BOOL": "|b1",
}
NAMES = {np.dtype(code): name for name, code in DTYPES.items()}
# A float32 tensor whose values are exact in bf16 is stored as the upper halves of its values.
BF16 = "BF16"
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REMEDY = "its evidence is lost"

# Kind → name → the parts of a tensor, in order along its first axis. Each rank stores one part.
Entries = dict[str, dict[str, tuple["Entry", ...]]]


@dataclass(frozen=True)
class Entry:
    """A tensor, or a part of one.

    file: name of the file in the folder.
    dtype: dtype of the tensor. stored: dtype in the file.
    shape: shape of this part.
    begin: offset in the file's data, in bytes.
    sha256: digest of each piece of its bytes. A piece has PIECE bytes, the last one may have fewer.
    """

    file: str
    dtype: str
    stored: str
    shape: tuple[int, ...]
    begin: int
    sha256: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Offset in the file's data after its last byte."""
        return self.begin + self.size * stored_dtype(self.stored).itemsize

    @property
    def per_piece(self) -> int:
        """Number of elements in a piece."""
        return PIECE // np.dtype(DTYPES[self.dtype]).itemsize

    @property
    def digest(self) -> str:
        """The digest, as from `digest_of`."""
        return joined(self.sha256)


def stored_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of stored data."""
    return np.dtype("<u2" if name == BF16 else DTYPES[name])


def hashes_of(flat: np.ndarray) -> tuple[str, ...]:
    """Return the SHA-256 of each piece of a contiguous array of one axis. An empty array has one piece."""
    raw = flat.view(np.uint8)
    return tuple(hashlib.sha256(raw[i : i + PIECE].data).hexdigest() for i in range(0, max(raw.size, 1), PIECE))


def joined(hashes: Sequence[str]) -> str:
    """Return one digest for the pieces of a tensor: that of a single piece, else the SHA-256 of all joined digests."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def digest_of(array: np.ndarray) -> str:
    """Return the digest by which stores compare tensors. Equal bytes give equal digests, whatever dtype and shape."""
    return joined(hashes_of(np.ascontiguousarray(array).reshape(-1)))


def index_bytes(
    sizes: Mapping[str, int], headers: Mapping[str, str], entries: Entries, documents: Mapping[str, bytes]
) -> bytes:
    """Return the bytes of an index.

    sizes: file of tensors → its size in bytes.
    headers: file → SHA-256 of its first DATA bytes.
    documents: name → bytes of each JSON file in the folder.
    """
    return sealed_json(
        {
            "schema": SCHEMA,
            "files": dict(sizes),
            "headers": dict(headers),
            "documents": {name: hashlib.sha256(raw).hexdigest() for name, raw in documents.items()},
            # Keep the insertion order, which sorted keys would lose.
            "tensors": [
                [kind, name, e.file, e.dtype, e.stored, e.shape, e.begin, e.sha256]
                for kind, by_name in entries.items()
                for name, parts in by_name.items()
                for e in parts
            ],
        },
        indent=None,
    )


def shape_of(parts: Sequence[Entry]) -> tuple[int, ...]:
    """Return the shape of the tensor that consists of these parts."""
    first, *others = parts
    return (first.shape[0] + sum(e.shape[0] for e in others), *first.shape[1:]) if others else first.shape


def read_index(folder: Path, name: str = INDEX) -> tuple[Entries, dict[str, str], dict[str, int], dict[str, str]]:
    """Read a folder's index.

    Returns its entries, document → SHA-256, file → size in bytes, and file → SHA-256 of its header. Indexes of earlier
    versions have no headers. Raises UserError if the index is missing, damaged, inconsistent or of another schema, or
    if one of its files is missing or has another size or header.
    """
    path = folder / name
    found = read_sealed_json(path, indent=None, remedy=_REMEDY)
    if found.get("schema") != SCHEMA:
        raise UserError(f"{path} has schema {found.get('schema')!r}; this Lockstep reads {SCHEMA}")
    try:
        sizes = {_plain(name): operator.index(size) for name, size in found["files"].items()}
        documents = {_plain(name): _hash(digest) for name, digest in found["documents"].items()}
        headers = {_known(name, sizes): _hash(digest) for name, digest in found.get("headers", {}).items()}
        entries: Entries = {}
        for kind, name, *raw in found["tensors"]:
            if not isinstance(kind, str) or not isinstance(name, str):
                raise ValueError(f"{kind!r}, {name!r} are no names")
            of_kind, part = entries.setdefault(kind, {}), _entry(raw, sizes)
            of_kind[name] = (*of_kind.get(name, ()), part)
            _require_alike(of_kind[name])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(f"{path} is not a valid index of evidence: {type(error).__name__}: {error}") from error
    for name, size in sizes.items():
        require_size(folder / name, size)
    for name, digest in headers.items():
        _require_header(folder / name, digest)
    return entries, documents, sizes, headers


def require_size(path: Path, size: int) -> None:
    """Raise UserError unless `path` is a regular file of this size. Links are refused."""
    try:
        about = os.lstat(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if not stat.S_ISREG(about.st_mode):
        raise UserError(f"cannot read {path}: it is no file")
    if about.st_size != size:
        raise UserError(f"{path} has {about.st_size} bytes; {size} were written")


def _require_header(path: Path, digest: str) -> None:
    try:
        with path.open("rb") as file:
            found = hashlib.sha256(file.read(DATA)).hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if found != digest:
        raise UserError(f"{path} was damaged after it was written (the SHA-256 of its header differs)")


def pieces(entry: Entry, start: int, stop: int) -> Iterator[int]:
    """Yield the numbers of the pieces that contain elements `start` to `stop`."""
    yield from range(start // entry.per_piece, -(-stop // entry.per_piece))


def _entry(raw: list[Any], sizes: Mapping[str, int]) -> Entry:
    file, dtype, stored, shape, begin, hashes = raw
    _known(file, sizes)
    if dtype not in DTYPES or stored not in ({dtype, BF16} if dtype == "F32" else {dtype}):
        raise ValueError(f"{dtype!r} cannot be stored as {stored!r}")
    entry = Entry(
        file, dtype, stored, tuple(map(operator.index, shape)), operator.index(begin), tuple(map(_hash, hashes))
    )
    if min(entry.shape, default=0) < 0 or entry.begin < 0 or DATA + entry.end > sizes[file]:
        raise ValueError(f"a tensor of shape {shape!r} does not lie in {file}")
    if len(entry.sha256) != max(1, -(-entry.size // entry.per_piece)):
        raise ValueError(f"a tensor of shape {shape!r} has {len(entry.sha256)} digests")
    return entry


def _known(name: Any, sizes: Mapping[str, int]) -> str:
    if name not in sizes:
        raise ValueError(f"{name!r} is none of its files")
    return str(name)


def _require_alike(parts: Sequence[Entry]) -> None:
    """Raise ValueError unless the last part is consistent with the others.

    The part of each rank is in a separate file.
    """
    *others, last = parts
    for one in others:
        if not last.shape or last.shape[1:] != one.shape[1:] or last.dtype != one.dtype or last.file == one.file:
            raise ValueError(f"parts of shapes {one.shape!r} and {last.shape!r} are not of one tensor")


def _plain(name: str) -> str:
    if not _FILE.fullmatch(name) or name == INDEX:
        raise ValueError(f"{name!r} is not the name of a file of evidence")
    return name


def _hash(text: Any) -> str:
    if not isinstance(text, str) or not _SHA256.fullmatch(text):
        raise ValueError(f"{text!r} is no SHA-256")
    return text
