"""Write shards with an engine, and test a worker's access to the source."""

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
    """Write `shards`, started in their order; yield each (shard, header) when it is on the disk.

    Raises:
        UserError: an error of `encode_shard` or of the engine. Finished shards stay.
    """
    # Keep their order, in which a run that trains at the same time reads them. All but the last have about one size.
    threads = threads_of([shard.text_bytes for shard in shards], engine.workers)
    for number, header in engine.map(encode_shard, _Tasks(shards, folder, plan), folder, threads):
        yield shards[number], header


def threads_of(sizes: Sequence[int], workers: int) -> int:
    """Return the number of tokenizer threads per worker that lets parts of these sizes occupy all cores.

    One worker encodes a whole shard, because shards do not depend on the number of workers. A part counts by its size
    relative to the largest one. With twice as many parts as workers, few cores are idle at the end, and one thread is
    enough.
    """
    parts = sum(sizes) / max(sizes) if any(sizes) else 1.0
    return min(workers, math.ceil(_PARTS_A_WORKER * workers / parts))


class _Tasks(Sequence[ShardTask]):
    """The tasks of `shards`, each created when it is read: together, their spans are as large as the plan."""

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
    """Raise UserError unless this worker finds a file of the source unchanged."""
    if not file.unchanged():
        raise UserError(
            f"a worker on {socket.gethostname()} does not see {file.path} as it was listed: all machines must "
            "have the source at the same path"
        )


def task_of(shard: ShardPlan, folder: Path, plan: Plan) -> ShardTask:
    """Return the task of writing `shard`, for `encode_shard` in any process that can read the source."""
    runs = itertools.groupby(shard.runs, key=lambda run: run[0])
    sources = tuple((plan.listing.files[number], [(start, stop) for _, start, stop in group]) for number, group in runs)
    return ShardTask(str(folder), shard.file, plan.identity["column"], shard.documents, sources)
