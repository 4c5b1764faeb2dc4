"""Hold the gradients that each rank has after the reduction to rank 0's: a sum has one value, whoever asks for it.

Rank 0's own are judged as those of one process are. A rank whose gradients were not reduced, or not all of them, would
go on with other weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lockstep.core.backend import RankReport
from lockstep.core.parity.measures.compare import exact
from lockstep.core.parity.measures.verdict import Finding


def same_sums(ranks: Sequence[RankReport]) -> Iterator[Finding]:
    """Compare each gradient on every rank with rank 0's, bit for bit; nothing where ranks tell none."""
    if len(ranks) < 2 or not ranks[0].gradients:
        return
    first, *others = ranks
    basis = "equal bits on every rank after the reduction, by SHA-256"
    count = 0
    for name, digest in first.gradients.items():
        wrong = [rank for rank, one in enumerate(others, 1) if one.gradients.get(name) != digest]
        count += len(wrong)
        if wrong:
            yield exact("reduction", name, len(wrong), len(others), basis, f"on rank {', '.join(map(str, wrong))}")
    yield exact("reduction", "gradients_of_ranks", count, len(others) * len(first.gradients), basis)
