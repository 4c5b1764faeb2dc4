"""Compare the gradients of each rank after the reduction with rank 0's, because a sum has one value on all ranks.

Rank 0's gradients are judged as those of a single process. A rank with an incomplete reduction would continue with
other weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lockstep.core.backend import RankReport
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.measures.compare import exact
from lockstep.core.parity.measures.verdict import Finding
from lockstep.core.run.ranks import is_sharded


def same_sums(ranks: Sequence[RankReport]) -> Iterator[Finding]:
    """Compare each gradient on every rank with rank 0's, bit for bit. No findings if ranks report no gradients."""
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


def of_the_sum(findings: Sequence[Finding], config: RunConfig) -> list[Finding]:
    """Return the findings. A stage's finding that a wrong sum over ranks causes becomes a finding of that sum.

    With sharded weights, each gradient of a weight is a sum over ranks, also in the tapped program. If this gradient is
    not the sum of the ranks' own, the stage of the weight is not at fault.
    """
    wrong = {one.tap for one in findings if one.stage == "reduction" and not one.ok} if is_sharded(config) else set()

    def named(one: Finding) -> Finding:
        if one.ok or one.tap not in wrong or one.phase != "backward" or one.scope != "local":
            return one
        seen = () if one.stage == "reduction" else (f"seen in the backward pass of {one.stage}",)
        return replace(one, stage="reduction", note="; ".join(words for words in (one.note, *seen) if words))

    return [named(one) for one in findings]
