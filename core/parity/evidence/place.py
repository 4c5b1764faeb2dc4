"""Choose where the evidence of a check lies while it is judged: in memory, or, of a large model, in a folder."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from lockstep.core.config.schema import RunConfig
from lockstep.core.model.names import parameter_shapes
from lockstep.core.parity.evidence.store import FolderStore, MemoryStore, Store

# Bytes of evidence a parameter: weights and moments before and after, three gradients, and as much of taps.
BYTES_A_PARAMETER = 40
# Evidence of more bytes lies in a folder.
LARGE = 256_000_000


def is_large(config: RunConfig) -> bool:
    """Return whether the evidence of a check of this model is too large for memory."""
    return BYTES_A_PARAMETER * sum(map(math.prod, parameter_shapes(config.model).values())) > LARGE


@contextmanager
def store_for(config: RunConfig) -> Iterator[Store]:
    """Give the store for a check of this model; a folder is removed at the end, unless it was moved away.

    Raises UserError if it cannot be made.
    """
    if not is_large(config):
        yield MemoryStore()
        return
    with TemporaryDirectory(prefix="lockstep-evidence-", ignore_cleanup_errors=True) as folder:
        yield FolderStore.create(Path(folder) / "evidence")
