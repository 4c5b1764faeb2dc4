"""A bounded, even sample of the training text, for the training of the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.core.data.catalog import Catalog, read_cataloged
from lockstep.core.data.documents import Document
from lockstep.core.data.sources import SourceListing

# Bytes of a piece. A long document gives several pieces, so that its beginning alone cannot fill the sample.
_PIECE_BYTES = 1 << 16
# Number of documents whose sizes are converted to Python numbers at a time.
_DOCUMENTS = 1 << 16


def sample_training_text(listing: SourceListing, column: str, catalog: Catalog, budget: int) -> Iterator[str]:
    """Yield about `budget` bytes of the training documents, spread evenly over them; all text if there is less.

    In the order of the documents, one is taken if less text than its proportional part of the budget was taken so far.
    The result depends only on the source; no random numbers are used.
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
    # Convert bytes to characters. A long text is read twice: to count its characters, and to cut pieces.
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
