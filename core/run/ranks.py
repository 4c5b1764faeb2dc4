"""Ranks as the loop knows them: every rank runs the same program, and rank 0 alone knows the directory and the console.

`of_first` broadcasts a decision of rank 0; `gather` collects what any rank noticed. Every rank makes the same calls in
the same order. torch_backend/ranks/peers.py implements both for several processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from lockstep.core.config.schema import RunConfig

T = TypeVar("T")


class Ranks(Protocol):
    """The processes of one run. rank: this one's number. count: of all of them."""

    rank: int
    count: int

    def of_first(self, compute: Callable[[], T], asked: str = ...) -> T:
        """Return on every rank what `compute` gives on rank 0, where alone it is called; plain data.

        The others wait as long as it takes. asked: what they wait for, in words. Its error is raised on all of them: on
        the others NotSupported is NotSupported, and anything else a UserError.
        """
        ...

    def gather(self, value: T, asked: str = ...) -> list[T]:
        """Return every rank's value, rank 0's first; plain data. asked: what it is for, in words."""
        ...


class _One:
    """A run of one process."""

    rank, count = 0, 1

    def of_first(self, compute: Callable[[], T], asked: str = "") -> T:
        """Return what `compute` gives."""
        return compute()

    def gather(self, value: T, asked: str = "") -> list[T]:
        """Return the value alone."""
        return [value]


ONE: Ranks = _One()


def rows_of_rank(count: int, rank: int, ranks: int) -> slice:
    """Return which of `count` rows of a tensor a rank holds where weights are cut: as `torch.chunk` and FSDP2 cut."""
    size = -(-count // ranks)
    first = min(rank * size, count)
    return slice(first, min(first + size, count))


def is_sharded(config: RunConfig) -> bool:
    """Return whether a run's weights are cut over ranks: one rank has nothing to share."""
    return config.parallel.strategy == "fsdp" and config.train.ranks > 1
