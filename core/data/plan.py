"""plan.json: which documents go into which shard, decided and written before any shard is."""

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
    """A shard to write. `runs` are (number of the file, start, stop): spans that hold only this shard's documents."""

    file: str
    split: str
    documents: int
    text_bytes: int
    runs: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Plan:
    """The plan of a preparation: everything that it reads and writes.

    Attributes:
        identity: the settings that decide the contents.
        listing: the source as it was.
        tokenizer_sha256: the tokenizer that the shards are written with.
        bytes_per_token: measured on a sample; text bytes per token.
        left_out: counts of records that are no document, or copies of one; see `RecordCounts.content`.
        shards: in the order of the token stream, train before val.
    """

    identity: dict[str, Any]
    listing: SourceListing
    tokenizer_sha256: str
    bytes_per_token: float
    left_out: dict[str, Any]
    shards: tuple[ShardPlan, ...]


def plan_shards(catalog: Catalog, shard_text_bytes: float) -> Iterator[ShardPlan]:
    """Cut each split's documents, in order, into shards of about `shard_text_bytes` bytes of text.

    A function of the documents alone: text bytes, not tokens, because tokens are known only when all is done.
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
    """Read plan.json; None if there is none.

    Raises:
        UserError: it is damaged, or of another version.
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
    """Join neighbours: documents that follow each other in one file with nothing between them."""
    file, start, stop = catalog.file[members], catalog.start[members], catalog.stop[members]
    breaks = np.flatnonzero((file[1:] != file[:-1]) | (start[1:] != stop[:-1])) + 1
    firsts, lasts = np.append(0, breaks), np.append(breaks, members.size) - 1
    yield from zip(file[firsts].tolist(), start[firsts].tolist(), stop[lasts].tolist(), strict=True)
