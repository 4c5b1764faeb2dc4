"""The first reading of a source: every document's place, size and split, but not its text."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.core.data.documents import Document, OnBroken, line_end, read_documents
from lockstep.core.data.engines.engine import Engine
from lockstep.core.data.left_out import KEPT, RecordCounts, left_out_in_words
from lockstep.core.data.sources import SourceFile, SourceListing
from lockstep.core.errors import UserError

Duplicates = Literal["keep", "drop"]

# Read by one worker at a time. Reading is some hundred times as fast as encoding, so less is not worth its start.
_PART_BYTES = 32 << 20
_PARTS_FOR_WORKERS = 4


@dataclass(frozen=True)
class RecordRules:
    """Rules for records that are not plainly documents.

    Attributes:
        on_broken: raise an error for a record that its file should not hold, or leave it out and count it.
        duplicates: keep a document with the very text of an earlier one, or leave it out; count it in either case.
        max_document_bytes: a longer text, in UTF-8, is left out as a whole and counted: the beginning of a document is
            another document. 0 is no limit.
    """

    on_broken: OnBroken = "error"
    duplicates: Duplicates = "keep"
    max_document_bytes: int = 0


@dataclass(frozen=True)
class Catalog:
    """The documents of a source in order; each array has one entry per document.

    Attributes:
        file: int32 (D,), which file of the listing.
        start, stop: int64 (D,), the span in that file.
        text_bytes: int64 (D,), size in UTF-8.
        is_val: bool (D,), whether the document belongs to the validation split.
        counts: records that are no document of this catalog, and copies among its documents.
    """

    file: NDArray[np.int32]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    text_bytes: NDArray[np.int64]
    is_val: NDArray[np.bool_]
    counts: RecordCounts


@dataclass(frozen=True)
class CatalogTask:
    """A worker's task: files to read, `first` the number of the first in its listing, and how to read them."""

    first: int
    files: tuple[SourceFile, ...]
    column: str
    rules: RecordRules


class _Columns:
    """The columns of a catalog as they grow: 44 bytes a document."""

    def __init__(self) -> None:
        self.file, self.start, self.stop, self.size = array("i"), array("q"), array("q"), array("q")
        self.split, self.copy = array("Q"), array("Q")

    def add(self, file: int, document: Document, size: int, split: int, copy: int) -> None:
        self.file.append(file)
        self.start.append(document.start)
        self.stop.append(document.stop)
        self.size.append(size)
        self.split.append(split)
        self.copy.append(copy)

    def extend(self, other: _Columns) -> None:
        """Add the documents of `other` behind these."""
        for name, column in vars(self).items():
            column.extend(getattr(other, name))


def read_catalog(
    listing: SourceListing,
    column: str,
    val_fraction: float,
    on_bytes: Callable[[int], None],
    rules: RecordRules = RecordRules(),
    engine: Engine | None = None,
    folder: Path = Path(),
) -> Catalog:
    """Read the whole source once.

    A document belongs to the validation split if the hash of its text, as a number in [0, 1), is below `val_fraction`:
    a copy of a document is in the same split as the document, and adding files moves nothing. If there are two or more
    documents, at least one is in each split. A source that is one plain text file is cut at a line's end
    into two documents, the last `val_fraction` of it for validation.

    Two documents are copies if 128 bits of BLAKE2b over their text are equal; the first in order is no copy.

    Args:
        listing: the files.
        column: see `read_documents`.
        val_fraction: in (0, 1).
        on_bytes: called with the bytes of source read so far, after each file or each part that a worker has read.
        rules: what is done with other records.
        engine: who reads, several files at a time; None, or a source of less than a few parts: this process.
        folder: the folder that the engine's workers must see.

    Raises:
        UserError: no document with text in it, or see `read_documents`.
    """
    columns = _Columns()
    counts = RecordCounts()
    done = 0
    for part, (documents, others) in _read_parts(listing, column, rules, engine, folder):
        columns.extend(documents)
        counts.extend(others)
        done += sum(file.size for file in part.files)
        on_bytes(done)
    if not columns.file:
        found = {"files": len(listing.files), **counts.content()}
        left_out = "; ".join(left_out_in_words(found)) or "it has no records"
        raise UserError(f"no text in {listing.description}: {left_out}")
    kept = _without_copies(listing, columns, counts, drop=rules.duplicates == "drop")
    file, start, stop, size = (
        np.frombuffer(of, dtype=of.typecode)[kept] for of in (columns.file, columns.start, columns.stop, columns.size)
    )
    is_val = _choose_val(np.frombuffer(columns.split, dtype=np.uint64)[kept], val_fraction)
    cut = _cut_single(listing.files[file[0]], int(start[0]), int(stop[0]), val_fraction) if len(file) == 1 else None
    if cut is not None:
        file, is_val = np.repeat(file, 2), np.array([False, True])
        start, stop = np.append(start, cut), np.append(cut, stop)
        size = stop - start
    return Catalog(file, start, stop, size, is_val, counts)


def catalog_files(task: CatalogTask) -> tuple[_Columns, RecordCounts]:
    """Read the files of a task; what is found depends on them and the rules only.

    Raises:
        UserError: see `read_documents`.
    """
    columns, counts = _Columns(), RecordCounts()
    for number, file in enumerate(task.files, task.first):
        for document in read_documents(file, task.column, on_broken=task.rules.on_broken):
            if (kind := _add(columns, number, document, task.rules.max_document_bytes)) is not None:
                counts.add(kind, file.name, document.place)
    return columns, counts


def _read_parts(
    listing: SourceListing, column: str, rules: RecordRules, engine: Engine | None, folder: Path
) -> Iterator[tuple[CatalogTask, tuple[_Columns, RecordCounts]]]:
    """Yield each part of the listing and what is found in it, in order, whoever is done first."""
    parts = list(_parts(listing, column, rules, _PART_BYTES))
    if engine is None or len(parts) < _PARTS_FOR_WORKERS:
        yield from ((part, catalog_files(part)) for part in _parts(listing, column, rules, 0))
        return
    found: dict[int, tuple[_Columns, RecordCounts]] = {}
    following = 0
    for number, result in engine.map(catalog_files, parts, folder):
        found[number] = result
        while following in found:
            yield parts[following], found.pop(following)
            following += 1


def _parts(listing: SourceListing, column: str, rules: RecordRules, least: int) -> Iterator[CatalogTask]:
    """Cut the listing into neighbouring files of `least` bytes together, or more."""
    first, size = 0, 0
    for number, file in enumerate(listing.files, 1):
        size += file.size
        if size >= least or number == len(listing.files):
            yield CatalogTask(first, listing.files[first:number], column, rules)
            first, size = number, 0


def _add(columns: _Columns, number: int, document: Document, most: int) -> str | None:
    """Add a document to the columns, or return why it is none."""
    if document.fault is not None:
        return document.fault
    split = hashlib.blake2b(digest_size=8, person=b"lockstep-split")
    copy = hashlib.blake2b(digest_size=8, person=b"lockstep-copies")
    size, empty = 0, True
    try:
        for chunk in document.chunks():
            raw = chunk.encode()
            split.update(raw)
            copy.update(raw)
            size += len(raw)
            empty = empty and not chunk.strip()
    except UnicodeDecodeError:
        return "skipped_files"
    if empty:
        return "empty_documents"
    if 0 < most < size:
        return "overlong_documents"
    columns.add(number, document, size, *(int.from_bytes(of.digest(), "little") for of in (split, copy)))
    return None


def _without_copies(
    listing: SourceListing, columns: _Columns, counts: RecordCounts, *, drop: bool
) -> NDArray[np.bool_] | slice:
    """Count the copies of earlier documents; return the rows that stay."""
    split, copy = (np.frombuffer(of, dtype=np.uint64) for of in (columns.split, columns.copy))
    order = np.lexsort((copy, split))
    # The sort is stable: of equal documents the first in order comes first.
    equal = (split[order[1:]] == split[order[:-1]]) & (copy[order[1:]] == copy[order[:-1]])
    copies = np.sort(order[1:][equal])
    of_file = np.frombuffer(columns.file, dtype=np.int32)[copies]
    numbers, firsts, many = np.unique(of_file, return_index=True, return_counts=True)
    for number, first, count in zip(numbers.tolist(), copies[firsts].tolist(), many.tolist(), strict=True):
        file = listing.files[number]
        places = {"text": "", "jsonl": f", at byte {columns.start[first]}", "parquet": f", row {columns.start[first]}"}
        counts.add("duplicate_documents" if drop else KEPT, file.name, file.name + places[file.kind], count)
    if not drop or not copies.size:
        return slice(None)
    stays = np.ones(len(split), dtype=np.bool_)
    stays[copies] = False
    return stays


def read_cataloged(
    listing: SourceListing, column: str, catalog: Catalog, chosen: NDArray[np.int64]
) -> Iterator[Document]:
    """Yield the documents `chosen`, int64 (K,), ascending; see `Document.read` on how long their text can be read."""
    for number in np.unique(catalog.file[chosen]):
        rows = chosen[catalog.file[chosen] == number]
        spans = [(int(catalog.start[row]), int(catalog.stop[row])) for row in rows]
        yield from expected_documents(listing.files[number], column, spans)


def expected_documents(file: SourceFile, column: str, spans: list[tuple[int, int]]) -> Iterator[Document]:
    """Yield the documents with something in them within `spans`; the same ones that the catalog counted.

    Raises:
        UserError: the file is not the one that was listed.
    """
    _require_unchanged(file)
    for document in read_documents(file, column, spans):
        if document.fault is None and _has_text(document):
            yield document
    _require_unchanged(file)


def _require_unchanged(file: SourceFile) -> None:
    if not file.unchanged():
        raise UserError(f"{file.path} was changed while the data was being prepared; run the command again")


def _has_text(document: Document) -> bool:
    try:
        return any(chunk.strip() for chunk in document.chunks())
    except UnicodeDecodeError:
        return False


def _choose_val(hashes: NDArray[np.uint64], val_fraction: float) -> NDArray[np.bool_]:
    is_val = hashes < np.uint64(int(val_fraction * 2.0**64))
    if not is_val.any():
        is_val[np.argmin(hashes)] = True
    # Last, because nothing can be done without a document to train on.
    if is_val.all():
        is_val[np.argmax(hashes)] = False
    return is_val


def _cut_single(file: SourceFile, start: int, stop: int, val_fraction: float) -> int | None:
    """Return the byte of the file at which to cut its only document in two.

    None if it is no plain text or has no second line.
    """
    if file.kind != "text":
        return None
    cut = line_end(file, start, stop, start + int((stop - start) * (1.0 - val_fraction)))
    parts = [] if cut is None else read_documents(file, "", [(start, cut), (cut, stop)])
    return cut if cut is not None and all(map(_has_text, parts)) else None
