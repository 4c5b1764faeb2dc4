"""The interface of a split and of a data set that makers of batches read: one folder's, or a mixture of several."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.core.data.shards import Tokens
from lockstep.core.data.tokenizer import TextTokenizer


class Split(Protocol):
    """Tokens by place."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the split."""
        ...

    def gather(self, starts: NDArray[np.int64], length: int) -> Tokens:
        """Return the windows [start, start + length): (B, length), unsigned, of starts int64 (B,)."""
        ...


class Dataset(Protocol):
    """Prepared data that a run reads."""

    @property
    def folder(self) -> Path:
        """A folder with the tokenizer."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides the samples, but for the run's own settings."""
        ...

    @property
    def vocab_size(self) -> int:
        """The tokenizer's largest token id, plus one."""
        ...

    @property
    def eot_id(self) -> int:
        """The token that ends a document."""
        ...

    def split(self, name: str) -> Split:
        """Return the split "train" or "val". Raises UserError if there is no such split."""
        ...

    def tokenizer(self) -> TextTokenizer:
        """Return the tokenizer of this data. Raises UserError if it cannot be read."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return sizes, entropies and fingerprints, as run.json keeps them; None where a value is not known."""
        ...

    def origin(self, starts: NDArray[np.int64], length: int) -> dict[str, NDArray[np.int64]]:
        """Return where each token of windows of the training split comes from.

        starts: int64 (B,). Returns `document_ids` int64 (B, length), the number of the token's document within its
        folder's split; of a mixture also `source_ids` (B,), the number of the folder. Raises UserError, or OSError, if
        a shard cannot be read.
        """
        ...
