"""The conditions under which a mutant acts, and the first step in which it can."""

from __future__ import annotations

ALWAYS = "always"
ONE_RANK = "one-rank"
# In words, for pages and help.
CONDITIONS: dict[str, str] = {
    ALWAYS: "in every program and step",
    "ones": "only if all loss weights of the batch are 1",
    "last-micro": "only in the last of several micro-batches",
    "many-micro": "only in batches of more than three micro-batches",
    "last-row": "only in the last sequence of a micro-batch",
    "last-position": "only at the last position of each sequence",
    "repeated": "only where the token occurred before in its sequence",
    "from-step-3": "from the third step on",
    "resumed": "after the session has loaded a checkpoint",
    "compiled": "only in a compiled program",
    "untapped": "only in the program that shows no taps",
    ONE_RANK: "only on the last of several ranks",
}
# Conditions on parts of one tensor (B, S, …).
REGIONS = ("last-row", "last-position", "repeated")
# Conditions that hold only among several micro-batches.
AMONG_MICRO_BATCHES = ("last-micro", "many-micro")


def first_step(operator: str, condition: str) -> int:
    """Return the first step, from 1, in which a mutant can act; a `stale` one needs a step before it."""
    by_condition = {"from-step-3": 3, "resumed": 2}.get(condition, 1)
    return max(by_condition, 2 if operator == "stale" else 1)
