"""The interfaces of a split and of a data set, which a single folder and a mixture implement."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.core.data.shards import Tokens
from lockstep.core.data.tokenizer import TextTokenizer


class Split(Protocol):
    """Tokens by position."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the split."""
        ...

    def gather(self, starts: NDArray[np.int64], length: int) -> Tokens:
        """Return the windows [start, start + length): (B, length), unsigned. starts: int64 (B,)."""
        ...


class Dataset(Protocol):
    """Prepared data that a run reads."""

    @property
    def folder(self) -> Path:
        """A folder that has the tokenizer."""
        ...

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of all properties of the data that determine samples."""
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
        """Return sizes, entropies and fingerprints, for run.json; an unknown value is None."""
        ...

    def origin(self, starts: NDArray[np.int64], length: int) -> dict[str, NDArray[np.int64]]:
        """Return the documents of the tokens in windows of the training split.

        starts: int64 (B,). The result has `document_ids`, int64 (B, length), the number of each token's document in its
        folder's split; for a mixture also `source_ids`, (B,), the number of the folder. Raises UserError or OSError if
        a shard cannot be read.
        """
        ...
