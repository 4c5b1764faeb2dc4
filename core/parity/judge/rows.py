"""Name the rank whose rows are wrong, if weights are sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.measures.verdict import Finding
from lockstep.core.run.ranks import is_sharded, rows_of_rank

# A comparison of some rows. Its arguments are the rows and the shape of this part.
OfRows = Callable[[slice, tuple[int, ...]], Finding]


def with_ranks(found: Finding, config: RunConfig, shape: tuple[int, ...], of_rows: OfRows) -> Finding:
    """Add a note to a tensor's finding if only the rows of some ranks are wrong."""
    if found.ok or not is_sharded(config) or not shape:
        return found
    ranks = range(config.train.ranks)
    rows = {rank: rows_of_rank(shape[0], rank, config.train.ranks) for rank in ranks}
    held = {rank: where for rank, where in rows.items() if where.start < where.stop}
    if len(held) < 2:
        return found
    wrong = {r: w for r, w in held.items() if not of_rows(w, (w.stop - w.start, *shape[1:])).ok}
    if not wrong or wrong.keys() == held.keys():
        return found
    where = ", ".join(f"{rows.start} to {rows.stop - 1} of rank {rank}" for rank, rows in wrong.items())
    return replace(found, note="; ".join(note for note in (f"rows {where} alone", found.note) if note))
