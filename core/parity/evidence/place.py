"""Choose where the evidence of a check lies while it is judged: in memory, or, of a large model, in a folder."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.evidence.store import FolderStore, MemoryStore, Store
from lockstep.core.plan.checks import GB, cost_of_check

# Evidence of more bytes lies in a folder.
LARGE = 256_000_000


def is_large(config: RunConfig) -> bool:
    """Return whether the evidence of a check is too large for memory, or for what `parity.memory_gb` leaves of it."""
    cost, budget = cost_of_check(config, thorough=True), config.parity.memory_gb
    return cost.kept > LARGE or (budget > 0 and cost.judging + cost.kept > budget * GB)


def return_freed_memory() -> None:
    """Give the system back what the C library keeps of freed memory, if it is one that can be asked (glibc).

    After the evidence of the 1.24B model is gathered it keeps some gigabytes, which the judge needs in other pieces.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


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
