"""Writing shards with several processes at once."""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from lockstep.core.data.encode import ShardTask, encode_shard, start_worker
from lockstep.core.data.plan import Plan, ShardPlan
from lockstep.core.data.shards import ShardHeader
from lockstep.core.errors import UserError


def encode_shards(
    shards: tuple[ShardPlan, ...], folder: Path, plan: Plan, workers: int
) -> Iterator[tuple[ShardPlan, ShardHeader]]:
    """Write `shards`, yielding each when it is on the disk, in no particular order.

    One worker is this process; more are processes of their own, spawned, because a fork of a process with threads (the
    tokenizer's, or a framework's) may hang.

    Raises:
        UserError: what `encode_shard` raises, or a worker died. Finished shards stay.
    """
    tasks = {shard.file: _task(shard, folder, plan) for shard in shards}
    if workers == 1 or len(shards) < 2:
        for shard in shards:
            yield shard, encode_shard(tasks[shard.file])
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        min(workers, len(shards)), mp_context=multiprocessing.get_context("spawn"), initializer=start_worker
    )
    try:
        # The largest first, so that no worker is left alone with one at the end.
        ordered = sorted(shards, key=lambda shard: -shard.text_bytes)
        futures = {pool.submit(encode_shard, tasks[shard.file]): shard for shard in ordered}
        for future in concurrent.futures.as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise UserError(
            f"a worker process ended before its work in {folder} was done (out of memory?); "
            "run the command again to go on from here, with fewer workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _task(shard: ShardPlan, folder: Path, plan: Plan) -> ShardTask:
    runs = itertools.groupby(shard.runs, key=lambda run: run[0])
    sources = tuple((plan.listing.files[number], [(start, stop) for _, start, stop in group]) for number, group in runs)
    return ShardTask(str(folder), shard.file, plan.identity["column"], shard.documents, sources)
