"""Data sets of generated tokens for benches: one to read, and a virtual one of any size."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from lockstep.core.data.index import TOKENIZER_NAME, DatasetIndex, ShardEntry, SplitEntry, write_index
from lockstep.core.data.shards import ShardHeader, shard_name, token_bytes_for, write_shard
from lockstep.core.data.tokenizer import train_tokenizer
from lockstep.core.errors import UserError

# The same tokens as a raw file, which the peers read.
RAW_NAME = "train.bin"
VOCABULARY = 50_257
_SHARD_TOKENS, _DOCUMENT_TOKENS = 1 << 22, 1 << 10
_TOKEN_BYTES = token_bytes_for(VOCABULARY)


def write_made_up(folder: Path, tokens: int, vocabulary: int = VOCABULARY) -> None:
    """Write `tokens` random ids into `folder`, as shards of Lockstep's and as `RAW_NAME`.

    Ids are skewed: low ones are common, as in text, so that a loss falls from the first steps on.

    tokens: a multiple of 1,024, which is a document's length. vocabulary: number of ids, at least MIN_VOCAB_SIZE of
    core/data/tokenizer.py.
    """
    draw = np.random.default_rng(0)
    end = _write_tokenizer(folder)
    token_bytes = token_bytes_for(vocabulary)
    shards = []
    with (folder / RAW_NAME).open("wb") as raw:
        for number, begin in enumerate(range(0, tokens, _SHARD_TOKENS)):
            drawn = draw.random(min(_SHARD_TOKENS, tokens - begin), dtype=np.float32)
            ids = (1 + (vocabulary - 1) * drawn**3).astype(f"<u{token_bytes}")
            ids[_DOCUMENT_TOKENS - 1 :: _DOCUMENT_TOKENS] = end
            raw.write(ids.tobytes())
            name = shard_name("train", number)
            header = write_shard(folder / name, list(ids.reshape(-1, _DOCUMENT_TOKENS)), token_bytes)
            shards.append(_entry(name, header))
    _write_index(folder, tuple(shards), end, vocabulary, token_bytes)


def write_on_paper(folder: Path, tokens: int) -> None:
    """Write a data set whose only shard has `tokens` ids and is a hole in the file system but for its header.

    Its ids are all 0 and its checksum is not that of its bytes: it is to be opened without verifying.
    Raises UserError if the file system holds no file of that size.
    """
    end = _write_tokenizer(folder)
    name = shard_name("train", 0)
    try:
        real = write_shard(folder / name, [np.array([end])], _TOKEN_BYTES)
        header = ShardHeader(_TOKEN_BYTES, tokens, real.documents, real.sha256)
        with open(folder / name, "r+b") as file:
            file.seek(16)  # the number of tokens in the header
            file.write(tokens.to_bytes(8, "little"))
        os.truncate(folder / name, header.file_bytes)
    except OSError as error:
        raise UserError(f"{folder}: no file of {tokens * _TOKEN_BYTES:,} bytes here: {error.strerror}") from error
    _write_index(folder, (_entry(name, header),), end, VOCABULARY, _TOKEN_BYTES)


def _write_tokenizer(folder: Path) -> int:
    """Write a tokenizer; return its end of text."""
    tokenizer = train_tokenizer([], 257)
    (folder / TOKENIZER_NAME).write_bytes(tokenizer.content)
    return tokenizer.eot_id


def _entry(name: str, header: ShardHeader) -> ShardEntry:
    return ShardEntry(name, header.tokens, header.documents, 0, header.sha256)


def _write_index(folder: Path, shards: tuple[ShardEntry, ...], end: int, vocabulary: int, token_bytes: int) -> None:
    sha256 = hashlib.sha256((folder / TOKENIZER_NAME).read_bytes()).hexdigest()
    train, val = (SplitEntry(part, None, None) for part in (shards, ()))
    write_index(folder, DatasetIndex(vocabulary, end, token_bytes, sha256, train, val, {}, {}))
