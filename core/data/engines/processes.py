"""The engine for one machine: worker processes, each with a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import cast

from lockstep.core.data.encode import start_worker
from lockstep.core.data.engines.engine import Part, Result
from lockstep.core.errors import UserError


class Processes:
    """An engine of processes on this machine; see `lockstep.core.data.engines.engine.Engine`.

    A single worker is this process. Several workers are spawned processes: a fork of a process with threads (the
    tokenizer's, or a framework's) may hang.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers

    @property
    def workers(self) -> int:
        """The maximum number of processes."""
        return self._workers

    def map(
        self, work: Callable[[Part], Result], parts: Sequence[Part], folder: Path, threads: int = 1
    ) -> Iterator[tuple[int, Result]]:
        """Yield each part's number and result.

        Raises UserError if a part fails or a worker dies. Then all workers end; the files of finished parts stay.
        """
        if self._workers == 1 or len(parts) < 2:
            for number, part in enumerate(parts):
                yield number, work(part)
            return
        # Use one pipe per worker and not ProcessPoolExecutor: if a worker dies while that pool starts the next one, the
        # pool hangs, because two of its threads iterate over the processes without a lock (Python 3.11).
        context = multiprocessing.get_context("spawn")
        processes: list[SpawnProcess] = []
        at_work: dict[Connection, int] = {}
        waiting = deque(range(len(parts)))
        try:
            for _ in range(min(self._workers, len(parts))):
                ours, theirs = context.Pipe()
                at_work[ours] = waiting.popleft()
                processes.append(context.Process(target=_compute_what_comes, args=(theirs, work, threads), daemon=True))
                processes[-1].start()
                # Close the worker's end here: otherwise the death of the worker would not close the pipe.
                theirs.close()
                ours.send(parts[at_work[ours]])
            while at_work:
                for ready in cast("list[Connection]", wait(list(at_work))):
                    answer: Result | UserError = ready.recv()
                    if isinstance(answer, UserError):
                        raise answer
                    number = at_work.pop(ready)
                    if waiting:
                        at_work[ready] = waiting.popleft()
                        ready.send(parts[at_work[ready]])
                    else:
                        ready.close()
                    yield number, answer
        except (EOFError, ConnectionError) as error:
            raise UserError(
                f"a worker process ended before its work in {folder} was done (out of memory?); "
                "run the command again to go on from here, with fewer workers"
            ) from error
        finally:
            # The other workers finish their current part, which the next run can reuse, and then find the pipe closed.
            for connection in at_work:
                connection.close()
            for process in processes:
                process.join()


def _compute_what_comes(parts: Connection, work: Callable[[Part], Result], threads: int) -> None:
    """Compute each part that arrives, in a worker process, until the pipe is closed."""
    start_worker(threads)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            part: Part = parts.recv()
            try:
                parts.send(work(part))
            except UserError as error:
                parts.send(error)
