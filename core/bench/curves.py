"""Compare the loss curves of two recipes, with the spread of several seeds as the limit.

Both begin with the same seed, hence the same weights and batches, so only rounding separates them. Other seeds differ
by more. Losses are averaged over windows of steps; the distance of two curves is the root mean square of their windows'
differences. The recipes agree where their distance at the same seed is at most the median of the distances between
seeds, over all windows and over the last quarter of them, which shows accumulated differences.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.core.errors import UserError

WINDOWS = 16


def windows(losses: Sequence[float], count: int = WINDOWS) -> np.ndarray:
    """Return the means over `count` stretches of steps of about the same length; fewer where there are fewer steps."""
    parts = np.array_split(np.asarray(losses, float), min(count, len(losses)))
    return np.array([part.mean() for part in parts])


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the root mean square of the differences."""
    return float(np.sqrt(np.mean(np.square(one - other))))


def compare(by_seed: Mapping[int, Sequence[float]], other: Sequence[float], seed: int) -> dict[str, Any]:
    """Return whether `other`, begun with `seed`, agrees with the curves of `by_seed`; distances in nats.

    Raises UserError where there are fewer than three seeds, no curve of the same one, or curves of another length.
    """
    if len(by_seed) < 3 or seed not in by_seed:
        raise UserError(f"a spread needs three seeds at least, and seed {seed} among them; there are {len(by_seed)}")
    if {len(losses) for losses in by_seed.values()} != {len(other)} or not len(other):
        raise UserError("the loss curves are not of one length")
    curves = {one: windows(losses) for one, losses in by_seed.items()}
    theirs = windows(other)
    found: dict[str, Any] = {}
    last = max(1, len(theirs) // 4)
    for name, part in (("all", slice(None)), ("last_quarter", slice(-last, None))):
        spread = [distance(a[part], b[part]) for a, b in itertools.combinations(curves.values(), 2)]
        apart = distance(curves[seed][part], theirs[part])
        found[name] = {"distance": apart, "between_seeds": spread, "limit": float(np.median(spread))}
        # NaN counts as disagreement.
        found[name]["agreed"] = bool(apart <= found[name]["limit"])
    return {**found, "agreed": all(found[name]["agreed"] for name in ("all", "last_quarter"))}


def in_words(found: Mapping[str, Any]) -> list[str]:
    """Describe the result of `compare` in words, a line each."""
    lines = []
    for name, words in (("all", "over all steps"), ("last_quarter", "over the last quarter")):
        of = found[name]
        spread = f"{min(of['between_seeds']):.3g} to {max(of['between_seeds']):.3g}"
        lines.append(
            f"{words}: {of['distance']:.3g} nats apart at the same seed; seeds are {spread} apart, median "
            f"{of['limit']:.3g}: {'agreed' if of['agreed'] else 'DISAGREED'}"
        )
    return lines
