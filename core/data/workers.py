"""Writing shards over an engine, and what a worker must see for it."""

from __future__ import annotations

import itertools
import math
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

from lockstep.core.data.encode import ShardTask, encode_shard
from lockstep.core.data.engines.engine import Engine
from lockstep.core.data.plan import Plan, ShardPlan
from lockstep.core.data.shards import ShardHeader
from lockstep.core.data.sources import SourceFile
from lockstep.core.errors import UserError

_PARTS_A_WORKER = 2


def encode_shards(
    shards: tuple[ShardPlan, ...], folder: Path, plan: Plan, engine: Engine
) -> Iterator[tuple[ShardPlan, ShardHeader]]:
    """Write `shards`, begun in their order, yielding each when it is on the disk.

    Raises:
        UserError: what `encode_shard` or the engine raises. Finished shards stay.
    """
    # In their order, which a run that trains meanwhile reads; all but the last of a split are about as large.
    threads = threads_of([shard.text_bytes for shard in shards], engine.workers)
    for number, header in engine.map(encode_shard, _Tasks(shards, folder, plan), folder, threads):
        yield shards[number], header


def threads_of(sizes: Sequence[int], workers: int) -> int:
    """Return how many threads of the tokenizer each worker needs, so that parts of these sizes occupy all cores.

    A text of one shard is one worker's, whatever the number of workers, because shards do not depend on it. Parts count
    by their size against the largest one. Twice as many parts as workers leave few cores idle at the end: then 1.
    """
    parts = sum(sizes) / max(sizes) if any(sizes) else 1.0
    return min(workers, math.ceil(_PARTS_A_WORKER * workers / parts))


class _Tasks(Sequence[ShardTask]):
    """The tasks of `shards`, each made when it is asked for: all their spans together are the size of the plan."""

    def __init__(self, shards: Sequence[ShardPlan], folder: Path, plan: Plan) -> None:
        self._shards, self._folder, self._plan = shards, folder, plan

    def __len__(self) -> int:
        return len(self._shards)

    @overload
    def __getitem__(self, number: int) -> ShardTask: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[ShardTask]: ...
    def __getitem__(self, number: int | slice) -> ShardTask | Sequence[ShardTask]:
        if isinstance(number, slice):
            return _Tasks(self._shards[number], self._folder, self._plan)
        return task_of(self._shards[number], self._folder, self._plan)


def require_source(file: SourceFile) -> None:
    """Raise UserError unless this worker sees a file of the source as it was listed."""
    if not file.unchanged():
        raise UserError(
            f"a worker on {socket.gethostname()} does not see {file.path} as it was listed: the source must lie where "
            "all machines have it, by the same name"
        )


def task_of(shard: ShardPlan, folder: Path, plan: Plan) -> ShardTask:
    """Return the task of writing `shard`: all that `encode_shard` needs, in any process that reads the source."""
    runs = itertools.groupby(shard.runs, key=lambda run: run[0])
    sources = tuple((plan.listing.files[number], [(start, stop) for _, start, stop in group]) for number, group in runs)
    return ShardTask(str(folder), shard.file, plan.identity["column"], shard.documents, sources)
