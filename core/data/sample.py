"""A bounded, even sample of the training text, for training the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.core.data.catalog import Catalog, read_cataloged
from lockstep.core.data.sources import SourceListing

# A long document gives pieces of this many bytes, so that one document cannot fill the sample with its beginning.
_PIECE_BYTES = 1 << 16


def sample_training_text(listing: SourceListing, column: str, catalog: Catalog, budget: int) -> Iterator[str]:
    """Yield about `budget` bytes of the training documents, spread over them evenly; all of it if there is less.

    Going through the documents in order, one is taken whenever the share of the budget that the text so far deserves
    has not been taken yet. Nothing is drawn at random and nothing but the source decides.
    """
    train = np.flatnonzero(~catalog.is_val)
    sizes = catalog.text_bytes[train]
    deserved = np.cumsum(sizes) * min(1.0, budget / max(1, int(sizes.sum())))
    wanted: dict[int, int] = {}
    taken = 0
    for document, size, share in zip(train.tolist(), sizes.tolist(), deserved.tolist(), strict=True):
        missing = round(share) - taken
        if missing >= min(size, _PIECE_BYTES):
            wanted[document] = min(size, missing)
            taken += wanted[document]
    chosen = np.array(list(wanted), dtype=np.int64)
    for document, text in zip(wanted, read_cataloged(listing, column, catalog, chosen), strict=True):
        yield from _pieces(text, int(catalog.text_bytes[document]), wanted[document])


def _pieces(text: str, text_bytes: int, wanted_bytes: int) -> Iterator[str]:
    if wanted_bytes >= text_bytes:
        yield text
        return
    count = max(1, wanted_bytes // _PIECE_BYTES)
    # In characters, of which a byte count is some fraction.
    length = len(text) * wanted_bytes // (text_bytes * count)
    for number in range(count):
        begin = len(text) * number // count
        yield text[begin : begin + length]
