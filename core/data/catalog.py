"""The first reading of a source: every document's place, size and split, but not its text."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.data.documents import read_documents
from lockstep.core.data.sources import SourceFile, SourceListing
from lockstep.core.errors import UserError
from lockstep.core.report.text import plural

# Counts of what is left out, with the reasons.
LEFT_OUT = {
    "skipped_files": "not UTF-8 text",
    "skipped_documents": "not valid Unicode",
    "empty_documents": "empty",
}


@dataclass(frozen=True)
class Catalog:
    """All documents of a source in order; each array has one entry per document.

    Attributes:
        file: int64 (D,), which file of the listing.
        start, stop: int64 (D,), the span in that file.
        text_bytes: int64 (D,), size in UTF-8.
        is_val: bool (D,), whether the document belongs to the validation split.
        skipped_files: plain files that are not UTF-8 text.
        skipped_documents: documents of JSON lines that are not valid Unicode.
        empty_documents: documents without anything but white space.
        first_left_out: for each of these three counts above 0, the name of the first such file.
    """

    file: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    text_bytes: NDArray[np.int64]
    is_val: NDArray[np.bool_]
    skipped_files: int
    skipped_documents: int
    empty_documents: int
    first_left_out: dict[str, str]


def read_catalog(listing: SourceListing, column: str, val_fraction: float, on_bytes: Callable[[int], None]) -> Catalog:
    """Read the whole source once.

    A document belongs to the validation split if the hash of its text, as a number in [0, 1), is below `val_fraction`:
    a copy of a document is in the same split as the document, and adding files moves nothing. Of two or more
    documents at least one is in each split. A source that is one plain text file is cut at a line's end
    into two documents, the last `val_fraction` of it for validation.

    Args:
        listing: the files.
        column: see `read_documents`.
        val_fraction: in (0, 1).
        on_bytes: told the bytes of source read so far, after each file.

    Raises:
        UserError: no document with text in it, or see `read_documents`.
    """
    files, starts, stops, sizes = (array("q") for _ in range(4))
    hashes = array("Q")
    left_out = dict.fromkeys(LEFT_OUT, 0)
    first_left_out: dict[str, str] = {}
    done = 0

    def leave_out(why: str, name: str) -> None:
        left_out[why] += 1
        first_left_out.setdefault(why, name)

    for number, file in enumerate(listing.files):
        for document in read_documents(file, column):
            if document.text is None:
                leave_out("skipped_files" if file.kind == "text" else "skipped_documents", file.name)
            elif not document.text.strip():
                leave_out("empty_documents", file.name)
            else:
                raw = document.text.encode()
                files.append(number)
                starts.append(document.start)
                stops.append(document.stop)
                sizes.append(len(raw))
                hashes.append(_split_hash(raw))
        done += file.size
        on_bytes(done)
    if not hashes:
        found = {"files": len(listing.files), **left_out, "first_left_out": first_left_out}
        raise UserError(f"no text in {listing.description}: {'; '.join(left_out_in_words(found))}")
    is_val = _choose_val(np.array(hashes, dtype=np.uint64), val_fraction)
    if len(hashes) == 1 and (cut := _cut_single(listing.files[files[0]], column, val_fraction)) is not None:
        start, stop = starts[0], stops[0]
        files, starts, stops = (
            array("q", [files[0]] * 2),
            array("q", [start, start + cut]),
            array("q", [start + cut, stop]),
        )
        sizes = array("q", [cut, sizes[0] - cut])
        is_val = np.array([False, True])
    return Catalog(
        file=np.array(files, dtype=np.int64),
        start=np.array(starts, dtype=np.int64),
        stop=np.array(stops, dtype=np.int64),
        text_bytes=np.array(sizes, dtype=np.int64),
        is_val=is_val,
        **left_out,
        first_left_out=first_left_out,
    )


def left_out_in_words(source: Mapping[str, Any]) -> list[str]:
    """List what of a source is in no shard: `1 of 2 files: not UTF-8 text (b.txt)`.

    source: `source` of index.json; data that was prepared earlier has the counts and not the first names.
    """
    first = source.get("first_left_out", {})
    said = []
    for key, why in LEFT_OUT.items():
        if number := source.get(key, 0):
            of_files = f" of {plural(source['files'], 'file')}"
            many = f"{number:,}{of_files}" if key == "skipped_files" else plural(number, "document")
            named = f" ({first[key]}{', …' if number > 1 else ''})" if key in first else ""
            said.append(f"{many}: {why}{named}")
    return said


def read_cataloged(listing: SourceListing, column: str, catalog: Catalog, chosen: NDArray[np.int64]) -> Iterator[str]:
    """Yield the texts of the documents `chosen`, int64 (K,), ascending."""
    for number in np.unique(catalog.file[chosen]):
        rows = chosen[catalog.file[chosen] == number]
        spans = [(int(catalog.start[row]), int(catalog.stop[row])) for row in rows]
        yield from expected_texts(listing.files[number], column, spans)


def expected_texts(file: SourceFile, column: str, spans: list[tuple[int, int]]) -> Iterator[str]:
    """Yield the texts with something in them within `spans`; the same ones that the catalog counted.

    Raises:
        UserError: the file is not the one that was listed.
    """
    if not file.unchanged():
        raise UserError(f"{file.path} was changed while the data was being prepared; run the command again")
    for document in read_documents(file, column, spans):
        if document.text is not None and document.text.strip():
            yield document.text


def _split_hash(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8, person=b"lockstep-split").digest(), "little")


def _choose_val(hashes: NDArray[np.uint64], val_fraction: float) -> NDArray[np.bool_]:
    is_val = hashes < np.uint64(int(val_fraction * 2.0**64))
    if not is_val.any():
        is_val[np.argmin(hashes)] = True
    # Last, because nothing can be done without a document to train on.
    if is_val.all():
        is_val[np.argmax(hashes)] = False
    return is_val


def _cut_single(file: SourceFile, column: str, val_fraction: float) -> int | None:
    """Return the byte of its text at which to cut the only document in two.

    None if it is no plain text or has no second line.
    """
    if file.kind != "text":
        return None
    (document,) = read_documents(file, column)
    raw = (document.text or "").encode()
    wanted = int(len(raw) * (1.0 - val_fraction))
    cut = raw.rfind(b"\n", 0, wanted) + 1 or raw.find(b"\n", wanted) + 1
    return cut if raw[:cut].strip() and raw[cut:].strip() else None
