"""The format of a shard: a file of token ids, with a table of its documents and a checksum.

    offset  size  contents
    0       8     magic, "LKSTPTOK"
    8       4     format version
    12      4     bytes per token: 2 (ids below 65,536) or 4
    16      8     T, the number of tokens
    24      8     D, the number of documents
    32      32    SHA-256 of bytes 0 to 31 followed by everything from byte 64
    64      8 D   the start of each document, in tokens; the first is 0
    64+8D   .. T  the tokens; each document ends with the end-of-text token

All numbers are unsigned and little-endian. The document table is before the tokens, so that both are aligned.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import re
import struct
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import require_file, write_atomically

FORMAT_VERSION = 1

_MAGIC = b"LKSTPTOK"
_FIELDS = struct.Struct("<8sIIQQ")
_DIGEST_BYTES = 32
_HEADER_BYTES = _FIELDS.size + _DIGEST_BYTES
_CHUNK_BYTES = 1 << 24
_HELD_BYTES = 1 << 26
_LARGEST_SHORT_VOCABULARY = 1 << 16

_NAME = re.compile(r"(train|val)_\d{5,}\.bin")

Tokens = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class ShardHeader:
    """The header of a shard. `token_bytes` is 2 or 4; `sha256` is in hexadecimal."""

    token_bytes: int
    tokens: int
    documents: int
    sha256: str

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the tokens in the file."""
        return np.dtype(f"<u{self.token_bytes}")

    @property
    def tokens_offset(self) -> int:
        """The offset of the tokens in the file, in bytes."""
        return _HEADER_BYTES + 8 * self.documents

    @property
    def file_bytes(self) -> int:
        """The size of the file that the header implies, in bytes."""
        return self.tokens_offset + self.tokens * self.token_bytes


def shard_name(split: str, number: int) -> str:
    """Return the file name of a split's shard."""
    return f"{split}_{number:05d}.bin"


def require_shard_name(name: object) -> None:
    """Raise UserError unless `name` is a shard's file name: files that an index or a plan names may be removed."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(f"{name!r} is not the name of a shard; prepare the data again with --force")


def token_bytes_for(vocab_size: int) -> int:
    """Return the bytes per token: 2 if every id below `vocab_size` fits in 16 bits, else 4."""
    return 2 if vocab_size <= _LARGEST_SHORT_VOCABULARY else 4


@dataclass(frozen=True)
class ShardFile:
    """The identity of a memory-mapped file, which shows whether the file was changed or replaced."""

    path: Path
    identity: tuple[int, int, int, int]

    @classmethod
    def of(cls, path: Path) -> ShardFile:
        """Return the current identity of a file. Raises UserError if it does not exist."""
        return cls(path, _identity(path))

    def require_unchanged(self) -> None:
        """Raise UserError if the file is missing or was changed: a read beyond the end of a mapped file is fatal."""
        if _identity(self.path) != self.identity:
            raise UserError(
                f"the shard {self.path} was changed while it was in use; restore it, or prepare the data again"
            )


def _identity(path: Path) -> tuple[int, int, int, int]:
    """Return (device, inode, size, time of change) of a file. Raises UserError if it does not exist."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise UserError(f"cannot read the shard {path}: {error.strerror or error}") from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class ShardWriter:
    """A writer that collects the tokens of documents, and writes them as one shard, atomically.

    Up to `_HELD_BYTES` bytes of tokens are kept in memory, more in a temporary file.
    """

    def __init__(self, path: Path, token_bytes: int) -> None:
        self._path, self._token_bytes = path, token_bytes
        self._starts = array("Q")
        self._tokens, self._begins = 0, True
        self._held: IO[bytes] = tempfile.SpooledTemporaryFile(_HELD_BYTES, dir=str(path.parent))  # noqa: SIM115 - see __exit__

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def add(self, ids: NDArray[np.integer[Any]], *, ends: bool = True) -> None:
        """Add token ids of a document, shape (tokens,). ends: they end the document, and include its end of text.

        Raises:
            UserError: a temporary file cannot be written.
            ValueError: the document has no tokens, or an id that does not fit into `token_bytes`.
        """
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= 1 << (8 * self._token_bytes)):
            raise ValueError(f"token ids do not fit in {self._token_bytes} unsigned bytes")
        if self._begins:
            self._starts.append(self._tokens)
        try:
            self._held.write(ids.astype(f"<u{self._token_bytes}").data)
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror or error}") from error
        self._tokens += ids.size
        self._begins = ends
        if ends and self._tokens == self._starts[-1]:
            raise ValueError("no document may be empty")

    @property
    def documents(self) -> int:
        """The number of documents so far."""
        return len(self._starts)

    def write(self) -> ShardHeader:
        """Write the shard.

        Raises:
            UserError: the file cannot be written.
            ValueError: there are no documents.
        """
        if not self._starts:
            raise ValueError("a shard needs at least one document")
        starts = np.frombuffer(self._starts, dtype=np.uint64).astype("<u8")
        fields = _FIELDS.pack(_MAGIC, FORMAT_VERSION, self._token_bytes, self._tokens, starts.size)
        digest = hashlib.sha256(fields)
        digest.update(starts.data)
        for chunk in self._chunks():
            digest.update(chunk)
        write_atomically(self._path, itertools.chain([fields, digest.digest(), starts.data], self._chunks()))
        return ShardHeader(self._token_bytes, self._tokens, starts.size, digest.hexdigest())

    def _chunks(self) -> Iterator[bytes]:
        self._held.seek(0)
        while chunk := self._held.read(_CHUNK_BYTES):
            yield chunk


def write_shard(path: Path, documents: Iterable[NDArray[np.integer[Any]]], token_bytes: int) -> ShardHeader:
    """Write documents as one shard, atomically.

    documents: token ids of each document, shape (tokens,), including its end of text.

    Raises:
        UserError: the file cannot be written.
        ValueError: there are no documents, a document is empty, or an id does not fit into `token_bytes`.
    """
    with ShardWriter(path, token_bytes) as shard:
        for document in documents:
            shard.add(document)
        return shard.write()


def read_header(path: Path) -> ShardHeader:
    """Read and check a shard's header and the size of its file, but not its contents.

    Raises:
        UserError: the file is missing, is not a shard, has another version, or has another size than in its header.
    """
    require_file(path)
    try:
        with open(path, "rb") as file:
            raw = file.read(_HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UserError(f"cannot read the shard {path}: {error.strerror or error}") from error
    if len(raw) < _HEADER_BYTES or not raw.startswith(_MAGIC):
        raise UserError(f"{path} is not a Lockstep token shard; prepare the data again with --force")
    _, version, token_bytes, tokens, documents = _FIELDS.unpack_from(raw)
    if version != FORMAT_VERSION:
        raise UserError(f"{path} has format version {version}, this Lockstep reads version {FORMAT_VERSION}")
    header = ShardHeader(token_bytes, tokens, documents, raw[_FIELDS.size :].hex())
    if token_bytes not in (2, 4) or header.file_bytes != size:
        raise UserError(f"the shard {path} is damaged: it has {size} bytes, which differs from its header")
    return header


def verify_shard(path: Path, header: ShardHeader, vocab_size: int, eot_id: int) -> None:
    """Check all bytes of a shard: its checksum, the range of ids, and the table of documents.

    Raises:
        UserError: a check fails.
    """
    if _checksum(path) != header.sha256:
        raise UserError(
            f"the shard {path} is damaged: its checksum does not match; prepare the data again with --force"
        )
    tokens, starts = map_tokens(path, header), read_document_starts(path, header)
    step = _CHUNK_BYTES // header.token_bytes
    if any(int(tokens[at : at + step].max()) >= vocab_size for at in range(0, header.tokens, step)):
        raise UserError(f"the shard {path} holds token ids outside the vocabulary of {vocab_size}")
    ends = np.append(starts[1:], header.tokens)
    rising = starts[0] == 0 and bool((starts < ends).all())
    if not (rising and (tokens[ends - 1] == eot_id).all()):
        raise UserError(f"the shard {path} has a wrong document table: documents must end with token {eot_id}")


def map_tokens(path: Path, header: ShardHeader) -> Tokens:
    """Map the tokens of a shard, shape (tokens,), without reading them; the mapping is read-only.

    Raises:
        UserError: the file cannot be mapped.
    """
    try:
        mapped = np.memmap(path, dtype=header.dtype, mode="r", offset=header.tokens_offset, shape=(header.tokens,))
        # Windows are read in random order. Without this hint the system reads up to megabytes around each of them.
        cast(mmap.mmap, mapped.base).madvise(mmap.MADV_RANDOM)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot map the shard {path}: {error}") from error
    # Return a plain array over the same pages: indexing a memmap runs Python code each time.
    return np.asarray(mapped)


def read_document_starts(path: Path, header: ShardHeader) -> NDArray[np.int64]:
    """Return the start of each document of a shard, in tokens: int64 (documents,)."""
    return np.fromfile(path, dtype="<u8", count=header.documents, offset=_HEADER_BYTES).astype(np.int64)


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    for chunk in _covered_bytes(path):
        digest.update(chunk)
    return digest.hexdigest()


def _covered_bytes(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            yield file.read(_FIELDS.size)
            file.seek(_HEADER_BYTES)
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise UserError(f"cannot read the shard {path}: {error.strerror or error}") from error
