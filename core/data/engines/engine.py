"""The interface of engines: a preparation has its parts computed, in any order, each once or more often."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

Part = TypeVar("Part")
Result = TypeVar("Result")


class Engine(Protocol):
    """An executor of parts that depend only on their arguments and on files that all workers see.

    A part may be computed twice, also at the same time, where a worker is lost: it must give the same result, and what
    it writes must be whole or absent.
    """

    @property
    def workers(self) -> int:
        """Parts that are computed at the same time, at most; 1 where that is not known beforehand."""
        ...

    def map(
        self, work: Callable[[Part], Result], parts: Sequence[Part], folder: Path, threads: int = 1
    ) -> Iterator[tuple[int, Result]]:
        """Yield (number of the part, `work(part)`) as parts are done, in no particular order.

        Parts are begun in their order, so the largest should come first: no worker is then left alone with one.

        Args:
            work: a function of a module, as workers look it up by its name.
            parts: what to compute; they are sent to workers, as results are sent back.
            folder: the folder that workers write to.
            threads: of the tokenizer, in each worker; more than 1 where there are too few parts to occupy the workers.

        Raises:
            UserError: what `work` raises, a worker that was lost too often, or one that does not see the folder.
        """
        ...
