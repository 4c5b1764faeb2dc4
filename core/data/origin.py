"""Trace the tokens of a batch back to the documents of the data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lockstep.core.data.dataset import TokenDataset
from lockstep.core.data.shards import read_document_starts, read_header


def document_ids(dataset: TokenDataset, split: str, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """The number, from 0 and in the order of the split, of the document that each token of a window belongs to.

    starts: int64 (B,), first token of each window in the split. Returns int64 (B, length).
    Raises UserError if a shard cannot be read, OSError if its table of documents cannot.
    """
    begins, tokens = [], 0
    for entry in dataset.index.splits[split].shards:
        path = dataset.folder / entry.file
        begins.append(read_document_starts(path, read_header(path)) + tokens)
        tokens += entry.tokens
    places = starts[:, None] + np.arange(length, dtype=np.int64)
    return np.searchsorted(np.concatenate(begins), places, side="right") - 1
