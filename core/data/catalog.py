"""The first pass over a source: it records every document's place, size and split, but not its text."""

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

# Bytes of a worker's task. Reading is some hundred times as fast as encoding, so smaller tasks or fewer than
# _PARTS_FOR_WORKERS tasks are slower with workers than without.
_PART_BYTES = 32 << 20
_PARTS_FOR_WORKERS = 4


@dataclass(frozen=True)
class RecordRules:
    """Rules for unusual records.

    Attributes:
        on_broken: what to do with an invalid record: raise an error, or skip and count it.
        duplicates: keep or skip a document with exactly the text of an earlier one; it is counted in both cases.
        max_document_bytes: longer texts, in bytes of UTF-8, are skipped and counted. They are not truncated, because
            the beginning of a document is another document. 0 is no limit.
    """

    on_broken: OnBroken = "error"
    duplicates: Duplicates = "keep"
    max_document_bytes: int = 0


@dataclass(frozen=True)
class Catalog:
    """The documents of a source, in order; each array has one entry per document.

    Attributes:
        file: int32 (D,), index of the file in the listing.
        start, stop: int64 (D,), the span in that file.
        text_bytes: int64 (D,), bytes of the text in UTF-8.
        is_val: bool (D,), True for documents of the validation split.
        counts: numbers of skipped records, and of copies among the documents.
    """

    file: NDArray[np.int32]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    text_bytes: NDArray[np.int64]
    is_val: NDArray[np.bool_]
    counts: RecordCounts


@dataclass(frozen=True)
class CatalogTask:
    """A worker's task: files to read, the index `first` of the first file in the listing, and rules."""

    first: int
    files: tuple[SourceFile, ...]
    column: str
    rules: RecordRules


class _Columns:
    """The columns of a catalog while it is built: 44 bytes per document."""

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
        """Append the documents of `other`."""
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

    A document belongs to the validation split if the hash of its text, as a number in [0, 1), is below `val_fraction`.
    So copies of a document are in the same split, and new files do not move documents between splits. With two or more
    documents, each split has at least one. A source with a single document of plain text is split at the end of a line
    into two documents; the last `val_fraction` of it is for validation.

    Two documents are copies if 128 bits of BLAKE2b over their texts are equal. The first of them does not count as a
    copy.

    Args:
        listing: the files.
        column: see `read_documents`.
        val_fraction: in (0, 1).
        on_bytes: called with the bytes read so far, after each file or each task of a worker.
        rules: rules for unusual records.
        engine: workers that read several files at a time. With None, or a small source, this process reads.
        folder: a folder that the engine's workers must be able to read.

    Raises:
        UserError: no document has text, or see `read_documents`.
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
    """Read the files of a task; the result depends only on the files and the rules.

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
    """Yield each part of the listing and its documents, in the order of the listing."""
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
    """Split the listing into groups of consecutive files, each of at least `least` bytes if possible."""
    first, size = 0, 0
    for number, file in enumerate(listing.files, 1):
        size += file.size
        if size >= least or number == len(listing.files):
            yield CatalogTask(first, listing.files[first:number], column, rules)
            first, size = number, 0


def _add(columns: _Columns, number: int, document: Document, most: int) -> str | None:
    """Add a document to the columns and return None, or return the kind of skipped record that it is."""
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
    """Count the copies of earlier documents; return the rows to keep."""
    split, copy = (np.frombuffer(of, dtype=np.uint64) for of in (columns.split, columns.copy))
    order = np.lexsort((copy, split))
    # The sort is stable: equal documents stay in the order of the source.
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
    """Yield the documents `chosen`, int64 (K,), ascending. `Document.read` defines how long a text can be read."""
    for number in np.unique(catalog.file[chosen]):
        rows = chosen[catalog.file[chosen] == number]
        spans = [(int(catalog.start[row]), int(catalog.stop[row])) for row in rows]
        yield from expected_documents(listing.files[number], column, spans)


def expected_documents(file: SourceFile, column: str, spans: list[tuple[int, int]]) -> Iterator[Document]:
    """Yield the documents with text in `spans`: the same documents as in the catalog.

    Raises:
        UserError: the file has changed since it was listed.
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
    # This comes last: the training split must never be empty.
    if is_val.all():
        is_val[np.argmax(hashes)] = False
    return is_val


def _cut_single(file: SourceFile, start: int, stop: int, val_fraction: float) -> int | None:
    """Return the byte of the file at which to split its only document.

    None if it is not plain text, or if one of the parts would have no text.
    """
    if file.kind != "text":
        return None
    cut = line_end(file, start, stop, start + int((stop - start) * (1.0 - val_fraction)))
    parts = [] if cut is None else read_documents(file, "", [(start, cut), (cut, stop)])
    return cut if cut is not None and all(map(_has_text, parts)) else None
