"""Writing shards with several processes at once."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import cast

from lockstep.core.data.encode import ShardTask, encode_shard, start_worker
from lockstep.core.data.plan import Plan, ShardPlan
from lockstep.core.data.shards import ShardHeader
from lockstep.core.errors import UserError


def encode_shards(
    shards: tuple[ShardPlan, ...], folder: Path, plan: Plan, workers: int
) -> Iterator[tuple[ShardPlan, ShardHeader]]:
    """Write `shards`, begun in their order, yielding each when it is on the disk.

    One worker is this process; more are processes of their own, spawned, because a fork of a process with threads (the
    tokenizer's, or a framework's) may hang.

    Raises:
        UserError: what `encode_shard` raises, or a worker died. Finished shards stay.
    """
    if workers == 1 or len(shards) < 2:
        for shard in shards:
            yield shard, encode_shard(task_of(shard, folder, plan))
        return
    # A pipe a worker, and not ProcessPoolExecutor: where a worker dies while that pool starts the next one, the pool
    # waits for ever, since two of its threads go over the processes without a lock (Python 3.11).
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    at_work: dict[Connection, ShardPlan] = {}
    # In their order, which a run that trains meanwhile reads; all but the last of a split are about as large.
    waiting = deque(shards)
    try:
        for _ in range(min(workers, len(shards))):
            ours, theirs = context.Pipe()
            at_work[ours] = waiting.popleft()
            processes.append(context.Process(target=_encode_what_comes, args=(theirs,), daemon=True))
            processes[-1].start()
            # With this end open here, the death of the worker would not show at the other one.
            theirs.close()
            ours.send(task_of(at_work[ours], folder, plan))
        while at_work:
            for ready in cast("list[Connection]", wait(list(at_work))):
                answer: ShardHeader | UserError = ready.recv()
                if isinstance(answer, UserError):
                    raise answer
                shard = at_work.pop(ready)
                if waiting:
                    at_work[ready] = waiting.popleft()
                    ready.send(task_of(at_work[ready], folder, plan))
                else:
                    ready.close()
                yield shard, answer
    except (EOFError, ConnectionError) as error:
        raise UserError(
            f"a worker process ended before its work in {folder} was done (out of memory?); "
            "run the command again to go on from here, with fewer workers"
        ) from error
    finally:
        # The others end what they write, which the next run need not write again, and find their pipe closed.
        for connection in at_work:
            connection.close()
        for process in processes:
            process.join()


def _encode_what_comes(tasks: Connection) -> None:
    """Write the shard of each task that comes, in a process of its own, until the pipe is closed."""
    start_worker()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            task: ShardTask = tasks.recv()
            try:
                tasks.send(encode_shard(task))
            except UserError as error:
                tasks.send(error)


def task_of(shard: ShardPlan, folder: Path, plan: Plan) -> ShardTask:
    """Return the task of writing `shard`: all that `encode_shard` needs, in any process that reads the source."""
    runs = itertools.groupby(shard.runs, key=lambda run: run[0])
    sources = tuple((plan.listing.files[number], [(start, stop) for _, start, stop in group]) for number, group in runs)
    return ShardTask(str(folder), shard.file, plan.identity["column"], shard.documents, sources)
