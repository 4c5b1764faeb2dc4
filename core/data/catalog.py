"""The first reading of a source: every document's place, size and split, but not its text."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.core.data.documents import Document, OnBroken, line_end, read_documents
from lockstep.core.data.left_out import KEPT, RecordCounts, left_out_in_words
from lockstep.core.data.sources import SourceFile, SourceListing
from lockstep.core.errors import UserError

Duplicates = Literal["keep", "drop"]


@dataclass(frozen=True)
class RecordRules:
    """Say what is done with records that are not plainly documents.

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
    """All documents of a source in order; each array has one entry per document.

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


def read_catalog(
    listing: SourceListing,
    column: str,
    val_fraction: float,
    on_bytes: Callable[[int], None],
    rules: RecordRules = RecordRules(),
) -> Catalog:
    """Read the whole source once.

    A document belongs to the validation split if the hash of its text, as a number in [0, 1), is below `val_fraction`:
    a copy of a document is in the same split as the document, and adding files moves nothing. Of two or more
    documents at least one is in each split. A source that is one plain text file is cut at a line's end
    into two documents, the last `val_fraction` of it for validation.

    Two documents are copies if 128 bits of BLAKE2b over their text are equal; the first in order is no copy.

    Args:
        listing: the files.
        column: see `read_documents`.
        val_fraction: in (0, 1).
        on_bytes: told the bytes of source read so far, after each file.
        rules: what is done with other records.

    Raises:
        UserError: no document with text in it, or see `read_documents`.
    """
    columns = _Columns()
    counts = RecordCounts()
    done = 0
    for number, listed in enumerate(listing.files):
        for document in read_documents(listed, column, on_broken=rules.on_broken):
            if (kind := _add(columns, number, document, rules.max_document_bytes)) is not None:
                counts.add(kind, listed.name, document.place)
        done += listed.size
        on_bytes(done)
    if not columns.file:
        found = {"files": len(listing.files), **counts.content()}
        raise UserError(f"no text in {listing.description}: {'; '.join(left_out_in_words(found))}")
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
