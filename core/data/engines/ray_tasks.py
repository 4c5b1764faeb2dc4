"""The engine for many machines: each part is a Ray task."""

from __future__ import annotations

import functools
import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from lockstep.core.data.encode import limit_threads
from lockstep.core.data.engines.engine import Part, Result
from lockstep.core.errors import UserError
from lockstep.core.files.shared_folder import sees, sources_fingerprint, token
from lockstep.core.ray_cluster import LOCAL, reach_ray
from lockstep.core.versions import version_of

# After this many lost workers, the part itself is at fault: it needs too much memory, or crashes a library.
MOST_ATTEMPTS = 4
# Bytes of Ray's object store. Parts and results are small, and Ray's minimum is 75 MiB.
_LOCAL_STORE_BYTES = 128 << 20
_CANCEL_SECONDS = 5.0


class RayTasks:
    """An engine of Ray tasks, one CPU each; see `lockstep.core.data.engines.engine.Engine`.

    The engine connects to Ray before the first part. If a worker is lost, its part is computed again, with at most
    MOST_ATTEMPTS attempts in all.

    Attributes:
        redone: number of attempts that were repeated because a worker was lost.
    """

    def __init__(self, workers: int, address: str | None = None) -> None:
        """Set the number of workers and the address of Ray.

        Args:
            workers: maximum number of parts at a time; 0 is the number of Ray's CPUs.
            address: a running Ray ("auto", "HOST:PORT"). None takes the value of RAY_ADDRESS; without it, the engine
                starts a Ray on this machine before the first part, and ends it when the context is left.
        """
        self.redone = 0
        self._workers = workers
        self._address = address or os.environ.get("RAY_ADDRESS") or LOCAL
        self._ray: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave Ray, and end it if this engine has started it."""
        if self._ray is not None:
            self._ray.shutdown()
            self._ray = None

    @property
    def workers(self) -> int:
        """The maximum number of tasks at the same time; 1 if Ray determines it."""
        return self._workers or 1

    def map(
        self, work: Callable[[Part], Result], parts: Sequence[Part], folder: Path, threads: int = 1
    ) -> Iterator[tuple[int, Result]]:
        """Yield each part's number and result.

        Raises UserError if a part fails, or if MOST_ATTEMPTS tasks of a part were lost.
        """
        if not parts:
            return
        ray = self._connect()
        from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayError, WorkerCrashedError

        # Do not use Ray's own retries: they are not counted, and never end for a part that runs out of memory.
        compute = ray.remote(num_cpus=1, max_retries=0)(_compute)
        waiting = deque(range(len(parts)))
        at_work: dict[Any, int] = {}
        attempts: Counter[int] = Counter()
        with token(folder) as name:
            place = (str(folder), name, _code())
            try:
                while waiting or at_work:
                    while waiting and len(at_work) < self._places():
                        number = waiting.popleft()
                        at_work[compute.remote(work, parts[number], place, threads)] = number
                    # The timeout updates the number of tasks, because a cluster may grow or shrink.
                    for ref in ray.wait(list(at_work), timeout=10.0)[0]:
                        number = at_work.pop(ref)
                        attempts[number] += 1
                        try:
                            answer = ray.get(ref)
                        except (NodeDiedError, ObjectLostError, OutOfMemoryError, WorkerCrashedError) as error:
                            if attempts[number] == MOST_ATTEMPTS:
                                raise UserError(_lost(error, folder)) from error
                            self.redone += 1
                            waiting.appendleft(number)
                            continue
                        except RayError as error:
                            # For example, Ray on the command's own machine has ended.
                            raise UserError(_ray_ended(error, folder)) from error
                        if isinstance(answer, UserError):
                            raise answer
                        yield number, answer
            finally:
                self._cancel(list(at_work))

    def _connect(self) -> Any:
        if self._ray is None:
            # Disable Ray's usage reports, which it otherwise sends to its developers.
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            try:
                import ray
            except ImportError:
                raise UserError(
                    "the engine ray needs Ray, which is not installed: pip install 'lockstep[ray]'"
                ) from None
            cpus = self._workers or os.cpu_count() or 1
            reach_ray(ray, self._address, num_cpus=cpus, object_store_memory=_LOCAL_STORE_BYTES)
            self._ray = ray
        return self._ray

    def _places(self) -> int:
        """Return how many tasks to submit at a time: `workers`, or twice Ray's CPUs, so that a cluster can grow."""
        return self._workers or max(1, 2 * int(self._ray.cluster_resources().get("CPU", 0)))

    def _cancel(self, refs: list[Any]) -> None:
        """Cancel running tasks, so that none of them writes to the folder after its lock is released."""
        if not refs:
            return
        for force in (False, True):
            for ref in refs:
                self._ray.cancel(ref, force=force)
            _, refs = self._ray.wait(refs, num_returns=len(refs), timeout=_CANCEL_SECONDS)
            if not refs:
                return


def _compute(
    work: Callable[[Part], Result], part: Part, place: tuple[str, str, str], threads: int
) -> Result | UserError:
    """Compute a part in a Ray worker; return a UserError instead of raising it, as Ray would add a traceback to it."""
    limit_threads(threads)
    try:
        _require_place(*place)
        return work(part)
    except UserError as error:
        return error


@functools.lru_cache(maxsize=1)
def _require_place(folder: str, name: str, code: str) -> None:
    """Raise UserError unless this worker finds the folder and runs the same code as the command."""
    host = socket.gethostname()
    if not sees(Path(folder, name)):
        raise UserError(
            f"a worker on {host} does not see {folder}: all machines must have this folder at the same path; "
            "workers write their shards there"
        )
    if _code() != code:
        raise UserError(
            f"a worker on {host} does not run the same code as this command ({_versions()} there, or another version "
            "of Lockstep): it could write other tokens; install the same on all machines"
        )


@functools.cache
def _code() -> str:
    return sources_fingerprint(Path(__file__).resolve().parents[3], ("core",), _versions())


def _versions() -> str:
    return ", ".join(f"{package} {version_of(package)}" for package in ("tokenizers", "pyarrow"))


def _ray_ended(error: BaseException, folder: Path) -> str:
    return (
        f"Ray ended before the work in {folder} was done ({type(error).__name__}); "
        "run the command again to go on from here"
    )


def _lost(error: BaseException, folder: Path) -> str:
    return (
        f"{MOST_ATTEMPTS} workers in turn were lost with the same part of the work in {folder} "
        f"({type(error).__name__}; out of memory?); run the command again to go on from here, with fewer workers"
    )
