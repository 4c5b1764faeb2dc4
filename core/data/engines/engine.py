"""The interface of engines, which compute the parts of a preparation in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

Part = TypeVar("Part")
Result = TypeVar("Result")


class Engine(Protocol):
    """An executor of parts that depend only on their arguments and on files that all workers can read.

    If a worker is lost, a part may be computed twice, even at the same time. It must give the same result, and write
    its files atomically.
    """

    @property
    def workers(self) -> int:
        """The maximum number of parts that are computed at the same time; 1 if it is not known in advance."""
        ...

    def map(
        self, work: Callable[[Part], Result], parts: Sequence[Part], folder: Path, threads: int = 1
    ) -> Iterator[tuple[int, Result]]:
        """Yield (number of the part, `work(part)`) when a part is finished, in no particular order.

        Parts are started in their order. The largest should come first, so that no worker runs a large one at the end
        while the others are idle.

        Args:
            work: a function at the top level of a module, because workers import it by name.
            parts: arguments of `work`; they and the results are sent between processes.
            folder: the folder into which workers write.
            threads: threads of the tokenizer in each worker; more than 1 if there are fewer parts than workers.

        Raises:
            UserError: an error of `work`, a worker that was lost too often, or a worker that cannot find the folder.
        """
        ...
