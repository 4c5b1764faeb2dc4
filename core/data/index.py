"""index.json: the contents of a prepared folder. It is written last, so a folder without it is unfinished."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.core.data.shards import FORMAT_VERSION, require_shard_name
from lockstep.core.errors import UserError
from lockstep.core.files.atomic import canonical_json, read_sealed_json, write_sealed_json

INDEX_NAME = "index.json"
TOKENIZER_NAME = "tokenizer.json"
_INDENT = 2


@dataclass(frozen=True)
class ShardEntry:
    """A shard: the name of its file, numbers of tokens and documents, bytes of its text in UTF-8, and its SHA-256."""

    file: str
    tokens: int
    documents: int
    text_bytes: int
    sha256: str


@dataclass(frozen=True)
class SplitEntry:
    """A split. The entropies, in nats per token, exist only for `val`, and are None if there are too few tokens."""

    shards: tuple[ShardEntry, ...]
    unigram_entropy: float | None
    bigram_entropy: float | None

    @property
    def tokens(self) -> int:
        """The number of tokens in all shards, including ends of text."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """The number of documents in all shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def text_bytes(self) -> int:
        """The bytes of the text in UTF-8."""
        return sum(shard.text_bytes for shard in self.shards)

    @property
    def bytes_per_token(self) -> float | None:
        """The mean bytes per token, including ends of text; loss / ln 2 / this value is bits per byte."""
        return self.text_bytes / self.tokens if self.tokens else None


@dataclass(frozen=True)
class DatasetIndex:
    """The contents of index.json. `settings` and `source` document the preparation; no code depends on them."""

    vocab_size: int
    eot_id: int
    token_bytes: int
    tokenizer_sha256: str
    train: SplitEntry
    val: SplitEntry
    settings: dict[str, Any]
    source: dict[str, Any]

    @property
    def splits(self) -> dict[str, SplitEntry]:
        """The splits by name."""
        return {"train": self.train, "val": self.val}

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the contents: tokenizer, ids, and every shard in order, without settings and source."""
        identity = {
            "format": FORMAT_VERSION,
            "vocab_size": self.vocab_size,
            "eot_id": self.eot_id,
            "token_bytes": self.token_bytes,
            "tokenizer": self.tokenizer_sha256,
            "splits": {
                name: [[shard.sha256, shard.tokens, shard.documents] for shard in split.shards]
                for name, split in self.splits.items()
            },
        }
        return hashlib.sha256(canonical_json(identity)).hexdigest()


def write_index(folder: Path, index: DatasetIndex) -> None:
    """Write index.json into `folder`, which marks it as finished.

    Raises:
        UserError: it cannot be written.
    """
    content = {
        "format_version": FORMAT_VERSION,
        "fingerprint": index.fingerprint,
        "vocab_size": index.vocab_size,
        "eot_id": index.eot_id,
        "dtype": f"uint{8 * index.token_bytes}",
        "tokenizer_sha256": index.tokenizer_sha256,
        "settings": index.settings,
        "source": index.source,
        "splits": {name: _split_content(split) for name, split in index.splits.items()},
    }
    write_sealed_json(folder / INDEX_NAME, content, indent=_INDENT)


def read_index(folder: Path) -> DatasetIndex:
    """Read index.json.

    Raises:
        UserError: the file is missing, is damaged, or has another format version.
    """
    path = folder / INDEX_NAME
    if not folder.is_dir():
        raise UserError(f"there is no data folder {folder}; make one with `lockstep data prepare`")
    if not path.is_file():
        raise UserError(f"{folder} has no {INDEX_NAME}: it is not prepared data, or preparing it was not finished")
    content = read_sealed_json(path, indent=_INDENT)
    if content.get("format_version") != FORMAT_VERSION:
        version = content.get("format_version")
        raise UserError(f"{path} has format version {version}, this Lockstep reads version {FORMAT_VERSION}")
    try:
        index = DatasetIndex(
            vocab_size=content["vocab_size"],
            eot_id=content["eot_id"],
            token_bytes={"uint16": 2, "uint32": 4}[content["dtype"]],
            tokenizer_sha256=content["tokenizer_sha256"],
            train=_split_entry(content["splits"]["train"]),
            val=_split_entry(content["splits"]["val"]),
            settings=content["settings"],
            source=content["source"],
        )
        consistent = index.fingerprint == content["fingerprint"]
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} lacks what version {FORMAT_VERSION} holds: {error}") from error
    if not consistent:
        raise UserError(f"{path} contradicts itself: its fingerprint is not that of its shards")
    return index


def _split_content(split: SplitEntry) -> dict[str, Any]:
    return {
        "tokens": split.tokens,
        "documents": split.documents,
        "text_bytes": split.text_bytes,
        "bytes_per_token": split.bytes_per_token,
        "unigram_entropy_nats": split.unigram_entropy,
        "bigram_entropy_nats": split.bigram_entropy,
        "shards": [asdict(shard) for shard in split.shards],
    }


def _split_entry(content: dict[str, Any]) -> SplitEntry:
    for shard in content["shards"]:
        require_shard_name(shard["file"])
    return SplitEntry(
        shards=tuple(ShardEntry(**shard) for shard in content["shards"]),
        unigram_entropy=content["unigram_entropy_nats"],
        bigram_entropy=content["bigram_entropy_nats"],
    )
