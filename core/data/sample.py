"""A bounded, even sample of the training text, for training the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.core.data.catalog import Catalog, read_cataloged
from lockstep.core.data.documents import Document
from lockstep.core.data.sources import SourceListing

# A long document gives pieces of this many bytes, so that one document cannot fill the sample with its beginning.
_PIECE_BYTES = 1 << 16
# Looked at as Python numbers at the same time.
_DOCUMENTS = 1 << 16


def sample_training_text(listing: SourceListing, column: str, catalog: Catalog, budget: int) -> Iterator[str]:
    """Yield about `budget` bytes of the training documents, spread over them evenly; all of it if there is less.

    Going through the documents in order, one is taken whenever the share of the budget that the text so far deserves
    has not been taken yet. Nothing is drawn at random and nothing but the source decides.
    """
    train = np.flatnonzero(~catalog.is_val)
    total = int(catalog.text_bytes[train].sum())
    wanted: dict[int, int] = {}
    before = taken = 0
    for first in range(0, train.size, _DOCUMENTS):
        documents = train[first : first + _DOCUMENTS]
        sizes = catalog.text_bytes[documents]
        deserved = (before + np.cumsum(sizes)) * min(1.0, budget / max(1, total))
        before += int(sizes.sum())
        for document, size, share in zip(documents.tolist(), sizes.tolist(), deserved.tolist(), strict=True):
            missing = round(share) - taken
            if missing >= min(size, _PIECE_BYTES):
                wanted[document] = min(size, missing)
                taken += wanted[document]
    chosen = np.array(list(wanted), dtype=np.int64)
    for number, document in zip(wanted, read_cataloged(listing, column, catalog, chosen), strict=True):
        yield from _pieces(document, int(catalog.text_bytes[number]), wanted[number])


def _pieces(document: Document, text_bytes: int, wanted_bytes: int) -> Iterator[str]:
    if wanted_bytes >= text_bytes:
        yield "".join(document.chunks())
        return
    count = max(1, wanted_bytes // _PIECE_BYTES)
    # In characters, of which a byte count is some fraction. A long text is read once to count them, and once more.
    characters = sum(map(len, document.chunks()))
    length = characters * wanted_bytes // (text_bytes * count)
    begins = iter([characters * number // count for number in range(count)])
    begin, piece, position = next(begins), "", 0
    for chunk in document.chunks():
        while begin >= 0 and begin < position + len(chunk):
            at = max(begin, position) - position
            piece += chunk[at : at + length - len(piece)]
            if len(piece) < length:
                break
            yield piece
            begin, piece = next(begins, -1), ""
        position += len(chunk)
    if piece:
        yield piece
