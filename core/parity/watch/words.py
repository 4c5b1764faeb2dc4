"""Describe a check, and the verdict over all checks, in one line each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lockstep.core.parity.measures.verdict import Outcome
from lockstep.core.parity.watch.uncovered import WatchCheck


def in_words(check: WatchCheck) -> str:
    """Describe a check in a line: the verdict, and the comparison nearest to its bound, or the first that broke it."""
    if check.verdict == "could_not":
        return f"step {check.step}: nothing judged; {'; '.join(check.not_covered)}"
    left_out = "".join(f"; {text}" for text in check.not_judged)
    shown = check.worst if check.verdict == "agreed" else check.origin
    assert shown is not None
    measure = shown.worst
    bound = measure.high if measure.low is None or measure.value > measure.low else measure.low
    where = f"{shown.stage} at {shown.tap} ({shown.phase}): {measure.name} {measure.value:.4g}, bound {bound:.4g}"
    if check.verdict == "agreed":
        return f"step {check.step}: agreed, {len(check.findings)} comparisons{left_out}; nearest to its bound: {where}"
    broken = sum(not f.ok for f in check.findings)
    more = "".join(f"; {text}" for text in (measure.basis, shown.note, check.cause) if text)
    count = f"DISAGREED in {broken} of {len(check.findings)} comparisons"
    return f"step {check.step}: {count}; origin: {where}{more}{left_out}"


def headline(verdict: Outcome, checks: Sequence[WatchCheck], own: bool) -> str:
    """Describe the verdict over all checks and the links not judged, in a line. own: the model is its own reference."""
    left_out = Counter(item for check in checks for item in check.not_judged)
    items = [
        item if count == len(checks) else f"{item}, in {count} of {len(checks)} checks"
        for item, count in left_out.items()
    ]
    against = " against your own module" if own else ""
    counts = [str(c.operations) for c in checks if c.operations][-1:]
    return "; ".join([f"{verdict} in {len(checks)} checks{against}", *counts, *items])
