"""plan.json: the documents of each shard. It is written before any shard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.data.catalog import Catalog
from lockstep.core.data.shards import FORMAT_VERSION, require_shard_name, shard_name
from lockstep.core.data.sources import SourceFile, SourceListing
from lockstep.core.errors import UserError
from lockstep.core.files.atomic import read_sealed_json, write_sealed_json

PLAN_NAME = "plan.json"


@dataclass(frozen=True)
class ShardPlan:
    """A shard to write.

    runs: (index of the file, start, stop), spans that contain only documents of this shard.
    """

    file: str
    split: str
    documents: int
    text_bytes: int
    runs: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Plan:
    """The plan of a preparation: its inputs and its outputs.

    Attributes:
        identity: the settings that determine the contents.
        listing: the source at the time of the plan.
        tokenizer_sha256: the fingerprint of the tokenizer.
        bytes_per_token: bytes of text per token, measured on a sample.
        left_out: counts of skipped records and copies; see `RecordCounts.content`.
        shards: the shards in the order of the token stream, train before val.
    """

    identity: dict[str, Any]
    listing: SourceListing
    tokenizer_sha256: str
    bytes_per_token: float
    left_out: dict[str, Any]
    shards: tuple[ShardPlan, ...]


def plan_shards(catalog: Catalog, shard_text_bytes: float) -> Iterator[ShardPlan]:
    """Split the documents of each split, in order, into shards of about `shard_text_bytes` bytes of text.

    The result depends only on the documents. Sizes are bytes of text, because numbers of tokens are known only after
    the preparation.
    """
    for split, chosen in (("train", ~catalog.is_val), ("val", catalog.is_val)):
        documents = np.flatnonzero(chosen)
        sizes = catalog.text_bytes[documents]
        bins = ((np.cumsum(sizes) - sizes) // max(1.0, shard_text_bytes)).astype(np.int64)
        borders = np.flatnonzero(np.diff(bins)) + 1
        for number, members in enumerate(np.split(documents, borders) if documents.size else []):
            yield ShardPlan(
                file=shard_name(split, number),
                split=split,
                documents=members.size,
                text_bytes=int(catalog.text_bytes[members].sum()),
                runs=tuple(_runs(catalog, members)),
            )


def write_plan(folder: Path, plan: Plan) -> None:
    """Write plan.json.

    Raises:
        UserError: it cannot be written.
    """
    content = {
        "format_version": FORMAT_VERSION,
        "identity": plan.identity,
        "description": plan.listing.description,
        "files": [_file_row(file) for file in plan.listing.files],
        "tokenizer_sha256": plan.tokenizer_sha256,
        "bytes_per_token": plan.bytes_per_token,
        "left_out": plan.left_out,
        "shards": [vars(shard) for shard in plan.shards],
    }
    write_sealed_json(folder / PLAN_NAME, content, indent=None)


def read_plan(folder: Path) -> Plan | None:
    """Read plan.json; return None if the file does not exist.

    Raises:
        UserError: the file is damaged, or has another version.
    """
    path = folder / PLAN_NAME
    if not path.exists():
        return None
    content = read_sealed_json(path, indent=None)
    if content.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{path} is of another version of Lockstep; prepare the data again with --force")
    for shard in content["shards"]:
        require_shard_name(shard["file"])
    return Plan(
        identity=content["identity"],
        listing=SourceListing(content["description"], tuple(SourceFile(*file) for file in content["files"])),
        tokenizer_sha256=content["tokenizer_sha256"],
        bytes_per_token=content["bytes_per_token"],
        left_out=content["left_out"],
        shards=tuple(
            ShardPlan(**{**shard, "runs": tuple(tuple(run) for run in shard["runs"])}) for shard in content["shards"]
        ),
    )


def _file_row(file: SourceFile) -> list[Any]:
    row = [file.path, file.name, file.kind, file.size, file.mtime_ns]
    return [*row, file.version] if file.version else row


def _runs(catalog: Catalog, members: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Join the spans of documents that are adjacent in one file."""
    file, start, stop = catalog.file[members], catalog.start[members], catalog.stop[members]
    breaks = np.flatnonzero((file[1:] != file[:-1]) | (start[1:] != stop[:-1])) + 1
    firsts, lasts = np.append(0, breaks), np.append(breaks, members.size) - 1
    yield from zip(file[firsts].tolist(), start[firsts].tolist(), stop[lasts].tolist(), strict=True)
