"""Find the documents of a batch's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.core.data.shards import read_document_starts, read_header


def document_ids(shards: Sequence[Path], starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Return the number of the document of each token of the windows: int64 (B, length).

    Documents are numbered from 0, in the order of the split. shards: the files of the split, in order. starts: int64
    (B,), the first token of each window in the split. Raises UserError if a shard cannot be read, and OSError if its
    table of documents cannot be read.
    """
    begins, tokens = [], 0
    for path in shards:
        header = read_header(path)
        begins.append(read_document_starts(path, header) + tokens)
        tokens += header.tokens
    places = starts[:, None] + np.arange(length, dtype=np.int64)
    return np.searchsorted(np.concatenate(begins), places, side="right") - 1
