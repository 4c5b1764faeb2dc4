"""Compare weights and optimizer state at the beginning of a step with those at the end of the step before."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep.core.backend import Arrays
from lockstep.core.parity.measures.verdict import Finding
from lockstep.core.parity.watch.findings import exact
from lockstep.core.parity.watch.moved import since_last_step
from lockstep.core.parity.watch.snapshot import Snapshot
from lockstep.core.parity.watch.together import Cut


@dataclass(frozen=True)
class _End:
    """The end of a step.

    number: number of the step.
    state: digest of the optimizer state.
    weights: name → digest; empty if weights are not compared.
    """

    number: int
    state: str
    weights: Mapping[str, bytes]


class BetweenSteps:
    """Digests of what the last step left, kept only if the next step is checked."""

    def __init__(self) -> None:
        self._end: _End | None = None

    def keep(self, number: int, states: Sequence[Snapshot], weights: Mapping[str, bytes]) -> None:
        """Keep digests of the end of step `number`.

        states: one snapshot an optimizer.
        weights: name → digest; empty if weights are not compared.
        """
        self._end = _End(number, _digest(states), weights)

    def forget(self) -> None:
        """Discard the digests."""
        self._end = None

    def compare(
        self, number: int, weights: Arrays, dtypes: Mapping[str, str], states: Callable[[], Sequence[Snapshot]]
    ) -> Iterator[Finding]:
        """Compare the beginning of step `number` with the digests of the step before, if they were kept.

        weights: the weights now, by name.
        dtypes: name → dtype of the weight in the model.
        states: returns one snapshot an optimizer; called only if there are digests.
        """
        if self._end is None or self._end.number != number - 1:
            return
        if self._end.weights:
            yield since_last_step(self._end.weights, weights, dtypes)
        now = _digest(states())
        basis = "equal bits of optimizer state after one step and before the next"
        yield exact("moments", "state", int(now != self._end.state), 1, basis, phase="state")


def _digest(states: Sequence[Snapshot]) -> str:
    digest = hashlib.sha256()
    for state in states:
        for kind, by_name in sorted(state.moments.items()):
            for name, moment in sorted(by_name.items()):
                own = moment.local if isinstance(moment, Cut) else moment
                digest.update(f"{kind}/{name}".encode() + own.tobytes())
        digest.update(repr(sorted(state.steps.items())).encode())
    return digest.hexdigest()
