"""Choose where a check keeps its evidence until it is judged: in memory or, for a large model, in a folder."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.evidence.behind import BehindStore
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.saved import open_evidence, save_evidence
from lockstep.core.parity.evidence.store import FolderStore, MemoryStore, Store
from lockstep.core.plan.checks import GB, cost_of_check
from lockstep.core.run.ranks import ONE, Ranks

# Evidence above this size in bytes is stored in a folder.
LARGE = 256_000_000
# Above this size in bytes of a check's evidence, ranks return freed memory (`return_large_blocks`).
LARGE_ON_RANKS = 1_000_000_000
# glibc's parameter for the size from which a block is mapped separately, and returned to the system when it is freed.
M_MMAP_THRESHOLD = -3
LARGE_BLOCK = 4 << 20


def is_large(config: RunConfig) -> bool:
    """Return whether the evidence of a check is too large for memory, or for the rest of `parity.memory_gb`."""
    cost, budget = cost_of_check(config, thorough=True), config.parity.memory_gb
    return cost.kept > LARGE or (budget > 0 and cost.judging + cost.kept > budget * GB)


def return_large_blocks(config: RunConfig) -> None:
    """Return freed large blocks to the system at once, on each of several ranks, if a check is large.

    glibc raises its threshold for returning memory up to 32 MiB. Freed blocks below it stay between small ones that are
    still in use. On a rank that showed the 64.5M model under FSDP, two fifths of the memory was unused in this way. On
    a single rank the unused part is small, and blocks that the system zeroes each time would cost a twentieth of the
    time of a check and of a small model's steps. The setting remains until the process ends. Without glibc nothing
    happens.
    """
    if config.train.ranks > 1 and cost_of_check(config, thorough=True).kept > LARGE_ON_RANKS:
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


def return_freed_memory() -> None:
    """Return the freed memory that glibc keeps to the system. Without glibc nothing happens.

    After gathering the evidence of the 1.24B model, glibc keeps some gigabytes in blocks that do not fit the judge's
    requests.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def store_for(config: RunConfig, ranks: Ranks = ONE) -> Iterator[Store]:
    """Yield the store for a check of this model. A folder is removed at the end, unless it was moved.

    Several ranks have one folder, which rank 0 makes. Raises UserError if it cannot be made, or if a rank does not see
    it.
    """
    if ranks.count == 1 and not is_large(config):
        yield MemoryStore()
        return
    if ranks.rank:
        yield FolderStore.join(Path(ranks.of_first(str)), ranks.rank, ranks.count)
        ranks.gather(None)
        return
    with TemporaryDirectory(prefix="lockstep-evidence-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary) / "evidence"
        if ranks.count == 1:
            with closing(BehindStore.create(folder)) as store:
                yield store
            return
        # With several ranks, no core is free for a writer thread.
        of_rank = FolderStore.create(folder, ranks.count, config.parallel.timeout_seconds)
        ranks.of_first(lambda: str(folder))
        yield of_rank
        # Every rank that was still reading the evidence has reached this point.
        ranks.gather(None)


def of_all_ranks(evidence: Evidence, store: Store, ranks: Ranks) -> Evidence:
    """Return whole evidence that each rank gathered in part: all ranks' parts are read from the common folder.

    Every rank calls it. Raises UserError if writing fails on a rank.
    """
    if not isinstance(store, FolderStore) or ranks.count == 1:
        return evidence
    if ranks.rank:
        store.finish()
    ranks.of_first(lambda: save_evidence(evidence, store) and None)
    return open_evidence(store.folder)
