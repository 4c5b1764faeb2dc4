"""Trials on this machine: so many processes at a time, each supervised by a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Protocol

from lockstep.core.sweep.trial import POLL_SECONDS, End, Job, supervise

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Engine(Protocol):
    """An executor of a round's trials."""

    def start(self) -> None:
        """Connect to the place where trials run: called once, before the sweep's folder is made.

        Raises UserError if no trial could begin there.
        """
        ...

    def run(self, jobs: Sequence[Job], ended: Callable[[Job, End], None], tick: Callable[[], None]) -> None:
        """Run each job to its end, and call `ended` of it; call `tick` now and then meanwhile, in this thread.

        Stops all on KeyboardInterrupt, which is raised again once every trial has written its checkpoint.
        """
        ...


@dataclass(frozen=True)
class Local:
    """An engine of this machine, with `jobs` processes at a time.

    gpus: of each trial; with several jobs each has its own, 0 = as they come.
    """

    jobs: int = 1
    gpus: int = 0

    def start(self) -> None:
        """Implement `Engine.start`: this machine needs nothing."""

    def run(self, jobs: Sequence[Job], ended: Callable[[Job, End], None], tick: Callable[[], None]) -> None:
        """Implement `Engine.run`."""
        stop = threading.Event()
        slots: SimpleQueue[int] = SimpleQueue()
        for slot in range(self.jobs):
            slots.put(slot)

        def one(job: Job) -> End:
            if stop.is_set():
                return End(stopped=True)
            slot = slots.get()
            try:
                return supervise(self._placed(job, slot), stop.is_set)
            finally:
                slots.put(slot)

        with ThreadPoolExecutor(self.jobs, thread_name_prefix="lockstep-trial") as pool:
            waiting = {pool.submit(one, job): job for job in jobs}
            try:
                while waiting:
                    done, _ = wait(waiting, POLL_SECONDS, FIRST_COMPLETED)
                    for future in done:
                        ended(waiting.pop(future), future.result())
                    tick()
            except BaseException:
                stop.set()
                raise

    def _placed(self, job: Job, slot: int) -> Job:
        if not self.gpus:
            return job
        there = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
        first, last = slot * self.gpus, (slot + 1) * self.gpus
        own = there[first:last] if there else [str(number) for number in range(first, last)]
        return replace(job, environment={**job.environment, VISIBLE: ",".join(own)})
