"""Prepared data: open a folder, and read windows of tokens from it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from lockstep.core.data.index import INDEX_NAME, TOKENIZER_NAME, DatasetIndex, ShardEntry, read_index
from lockstep.core.data.memory import available_memory_bytes
from lockstep.core.data.origin import document_ids
from lockstep.core.data.shards import ShardFile, ShardHeader, Tokens, map_tokens, read_header, verify_shard
from lockstep.core.data.tokenizer import TextTokenizer, load_tokenizer
from lockstep.core.errors import UserError
from lockstep.core.files.atomic import require_file

# By default, tokens may take 1 / this of the available memory: other programs run on the machine as well.
_MEMORY_SHARE = 4


class TokenSplit:
    """The tokens of a split, as one stream over all its shards."""

    def __init__(self, parts: Sequence[Tokens], files: Sequence[ShardFile] = ()) -> None:
        """Build the stream from consecutive `parts`, each of shape (tokens,), all of one dtype.

        files: for memory-mapped parts, their files. Each read verifies that its files have not changed.
        """
        self._parts = list(parts)
        self._files = list(files)
        self._dtype = self._parts[0].dtype if self._parts else np.dtype(np.uint16)
        self._bounds = np.cumsum([0, *(part.size for part in self._parts)], dtype=np.int64)
        self._views: dict[int, Tokens] = {}

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the stream."""
        return int(self._bounds[-1])

    @property
    def held(self) -> Tokens | None:
        """All tokens, (tokens,), if they are in memory as one array; else None."""
        return self._parts[0] if len(self._parts) == 1 and not self._files else None

    def hold(self, tokens: Tokens) -> None:
        """Replace the stream's memory by `tokens`, an array of the same tokens, which may be a part of a larger one."""
        self._parts, self._views = [tokens], {}

    @property
    def held_bytes(self) -> int:
        """The bytes of tokens that are in memory and not memory-mapped."""
        return 0 if self._files else sum(part.nbytes for part in self._parts)

    def gather(self, starts: NDArray[np.int64], length: int) -> Tokens:
        """Return the windows [start, start + length) of the stream; a window may extend over several shards.

        Args:
            starts: int64 (B,), in any order; repetitions are allowed.
            length: tokens per window, >= 1.

        Returns:
            (B, length), in the dtype of the parts, which is unsigned.

        Raises:
            IndexError: a window is not inside the stream.
            ValueError: `starts` is not a vector of integers, or `length` is below one.
            UserError: a memory-mapped file is missing or was changed.
        """
        if starts.ndim != 1 or not np.issubdtype(starts.dtype, np.integer) or length < 1:
            raise ValueError(f"gather takes integers (B,) and length >= 1, got {starts.dtype} {starts.shape}, {length}")
        begins = starts.astype(np.int64)
        # As an unsigned number, a negative start is larger than any other, so one comparison covers both ends.
        if starts.size and int(begins.view(np.uint64).max()) > self.num_tokens - length:
            raise IndexError(f"a window of {length} tokens reaches outside the split's {self.num_tokens} tokens")
        if len(self._parts) == 1 and starts.size:
            self._require_unchanged({0})
            return self._windows_of_one_part(length)[begins]
        first = np.searchsorted(self._bounds, begins, side="right") - 1
        last = np.searchsorted(self._bounds, begins + (length - 1), side="right") - 1
        self._require_unchanged(set().union(*map(range, first.tolist(), (last + 1).tolist())))
        return self._copied(first, begins, length)

    def _require_unchanged(self, parts: set[int]) -> None:
        if self._files:
            for part in parts:
                self._files[part].require_unchanged()

    def _windows_of_one_part(self, length: int) -> Tokens:
        """Return a view (starts, length) whose row i is the window at i; NumPy can copy many rows in one call.

        Views are cached: creating one takes as long as copying a small batch, and a run has few lengths.
        """
        if length not in self._views:
            self._views[length] = sliding_window_view(self._parts[0], length)
        return self._views[length]

    def _copied(self, first: NDArray[np.intp], begins: NDArray[np.int64], length: int) -> Tokens:
        """Copy windows one by one; a window that extends over several shards is copied in pieces."""
        windows = np.empty((begins.size, length), dtype=self._dtype)
        for row, (part, start) in enumerate(zip(first.tolist(), (begins - self._bounds[first]).tolist(), strict=True)):
            filled = 0
            while filled < length:
                piece = self._parts[part][start : start + length - filled]
                windows[row, filled : filled + piece.size] = piece
                filled, part, start = filled + piece.size, part + 1, 0
        return windows


class TokenDataset:
    """A prepared folder: its index, its tokenizer, and its splits."""

    def __init__(self, folder: Path, index: DatasetIndex, splits: Mapping[str, TokenSplit]) -> None:
        """Set the results of `open`."""
        self.folder = folder
        self.index = index
        self._splits = dict(splits)

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True, memory_limit_bytes: int | None = None) -> TokenDataset:
        """Open the folder that `prepare` wrote.

        Args:
            path: the folder.
            verify: read every shard and check its checksum, ids and document table. Sizes, headers and the
                tokenizer's fingerprint are always checked.
            memory_limit_bytes: limit of the bytes of tokens in memory. Splits are loaded, the smallest first, as long
                as they fit; the others are memory-mapped. None is a quarter of the memory that is available now. If
                several processes of one machine open the same data, each should pass its share.

        Raises:
            UserError: a file is missing, damaged, or does not belong to this data; the message names the file.
        """
        folder = Path(path)
        index = read_index(folder)
        _check_tokenizer(folder / TOKENIZER_NAME, index)
        left = memory_to_hold() if memory_limit_bytes is None else memory_limit_bytes
        splits = {}
        for name, split in sorted(index.splits.items(), key=lambda item: item[1].tokens):
            files = [ShardFile.of(folder / entry.file) for entry in split.shards]
            parts = [_open_shard(folder, entry, index, verify) for entry in split.shards]
            size = split.tokens * index.token_bytes
            if parts and size <= left:
                left -= size
                parts, files = [np.concatenate(parts)], []
            splits[name] = TokenSplit(parts, files)
        return cls(folder, index, splits)

    @property
    def held_bytes(self) -> int:
        """The bytes of tokens that are in memory and not memory-mapped."""
        return sum(split.held_bytes for split in self._splits.values())

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the contents, see `DatasetIndex.fingerprint`."""
        return self.index.fingerprint

    @property
    def vocab_size(self) -> int:
        """The tokenizer's largest token id, plus one."""
        return self.index.vocab_size

    @property
    def eot_id(self) -> int:
        """The token that ends a document."""
        return self.index.eot_id

    def split(self, name: str) -> TokenSplit:
        """Return the split "train" or "val".

        Raises:
            UserError: there is no such split.
        """
        if name not in self._splits:
            raise UserError(f"{self.folder} has no split {name!r}; there are {', '.join(sorted(self._splits))}")
        return self._splits[name]

    def tokenizer(self) -> TextTokenizer:
        """Load the tokenizer of this data.

        Raises:
            UserError: tokenizer.json cannot be read.
        """
        return load_tokenizer(self.folder / TOKENIZER_NAME)

    def facts(self) -> dict[str, Any]:
        """Return sizes, entropies and fingerprints, for run.json."""
        index = self.index
        return {
            "path": str(self.folder),
            "vocabulary": index.vocab_size,
            "train_tokens": index.train.tokens,
            "train_documents": index.train.documents,
            "val_tokens": index.val.tokens,
            "val_unigram_entropy": index.val.unigram_entropy,
            "val_bigram_entropy": index.val.bigram_entropy,
            "val_bytes_per_token": index.val.bytes_per_token,
            "tokenizer_fingerprint": index.tokenizer_sha256,
            "fingerprint": self.fingerprint,
        }

    def origin(self, starts: NDArray[np.int64], length: int) -> dict[str, NDArray[np.int64]]:
        """Return `document_ids`, int64 (B, length), of windows of the training split; see `document_ids`."""
        shards = [self.folder / entry.file for entry in self.index.train.shards]
        return {"document_ids": document_ids(shards, starts, length)}


def memory_to_hold() -> int:
    """Return the default limit of the bytes of tokens in memory."""
    return available_memory_bytes() // _MEMORY_SHARE


def _check_tokenizer(path: Path, index: DatasetIndex) -> None:
    require_file(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the tokenizer {path}: {error.strerror or error}") from error
    if hashlib.sha256(content).hexdigest() != index.tokenizer_sha256:
        raise UserError(f"{path} is not the tokenizer that {INDEX_NAME} names; prepare the data again with --force")


def _open_shard(folder: Path, entry: ShardEntry, index: DatasetIndex, verify: bool) -> Tokens:
    path = folder / entry.file
    header = read_header(path)
    expected = ShardHeader(index.token_bytes, entry.tokens, entry.documents, entry.sha256)
    if header != expected:
        raise UserError(f"the shard {path} is not the one that {INDEX_NAME} names; prepare the data again with --force")
    if verify:
        verify_shard(path, header, index.vocab_size, index.eot_id)
    return map_tokens(path, header)
