"""`lockstep bench best`: search the fastest configuration within a time limit.

The candidates are all combinations of the levers' choices. Those that by the plan do not fit, or are far slower than
the plan's best, are left out without a run. The rest are measured one at a time: first the plan's fastest, then those
that differ from the best so far in one lever, until no such neighbour is left or time is short. Then the leaders are
measured over more steps, and the fastest one wins (successive halving, Jamieson & Talwalkar 2016, arXiv 1502.07943,
with two rungs). The winner's neighbours show the gain of each of its choices.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError

# A candidate whose planned time is this many times the best one's is not measured: plans are not that far off.
SLOWER = 1.5
LEADERS = 3
OUT_OF_TIME = "the time was up"
# Lever → choice → settings (dotted key → text).
Space = Mapping[str, Mapping[str, Mapping[str, str]]]
Choices = tuple[tuple[str, str], ...]  # (lever, choice), in the order of the space
FACTS = ("median", "seconds", "first_step_seconds", "memory", "loss", "in_force")


@dataclass(frozen=True)
class Prediction:
    """A prediction for a configuration on a device: bytes that it needs, seconds of a step (None: not known)."""

    peak: float
    seconds: float | None


class Predicts(Protocol):
    """A plan that predicts configurations."""

    memory: float
    """bytes of the device; 0: not known"""

    def __call__(self, config: RunConfig) -> Prediction:
        """Return the memory and the time that `config` needs."""
        ...


@dataclass(frozen=True)
class Candidate:
    """A combination of choices by lever, with its configuration and its prediction."""

    choices: Choices
    config: RunConfig
    prediction: Prediction

    @property
    def name(self) -> str:
        """The choices in words."""
        return ", ".join(f"{lever} {choice}" for lever, choice in self.choices)


@dataclass
class Search:
    """A search: candidates, reasons for those left out, results by candidate's choices, the winner.

    results: status, reason and, if measured, FACTS and `steps`. A status is one of core/bench/results.py's, or
    `not_finite`.
    """

    candidates: list[Candidate]
    pruned: dict[Choices, str]
    results: dict[Choices, dict[str, Any]] = field(default_factory=dict)
    order: list[Choices] = field(default_factory=list)
    winner: Choices | None = None
    ended: str = ""

    def of(self, choices: Choices) -> Candidate:
        """Return the candidate with these choices."""
        return next(one for one in self.candidates if one.choices == choices)

    def measured(self) -> list[Choices]:
        """Return those with a time, fastest first; a measurement over more steps replaces the earlier one."""
        found = [c for c in self.order if self.results[c]["status"] == "measured"]
        return sorted(found, key=lambda c: self.results[c]["median"])


def candidates(space: Space, configure: Callable[[dict[str, str]], RunConfig], predict: Predicts) -> Search:
    """Return every combination, sorted by what is predicted, but for what is left out with its reason.

    configure: settings → the configuration; a UserError of it leaves the combination out.
    """
    kept, pruned = [], {}
    for combination in itertools.product(*(choices.items() for choices in space.values())):
        choices = tuple((lever, name) for lever, (name, _) in zip(space, combination, strict=True))
        settings = {key: value for _, some in combination for key, value in some.items()}
        try:
            config = configure(settings)
        except UserError as error:
            pruned[choices] = str(error)
            continue
        prediction = predict(config)
        if predict.memory and prediction.peak > predict.memory:
            pruned[choices] = "the plan: does not fit into memory"
            continue
        kept.append(Candidate(choices, config, prediction))
    quickest = min((c.prediction.seconds for c in kept if c.prediction.seconds is not None), default=None)
    for one in [c for c in kept if quickest and (c.prediction.seconds or 0) > SLOWER * quickest]:
        pruned[one.choices] = f"the plan: more than {SLOWER:g} times as slow as its fastest"
        kept.remove(one)
    kept.sort(key=lambda c: c.prediction.seconds or 0.0)
    return Search(kept, pruned)


# (candidate, steps that count, seconds it may take) → its result.
Measure = Callable[[Candidate, int, float], dict[str, Any]]


def search(
    found: Search,
    measure: Measure,
    seconds: float,
    few: int,
    many: int,
    clock: Callable[[], float] = time.monotonic,
    told: Callable[[Candidate, dict[str, Any]], None] = lambda candidate, result: None,
) -> None:
    """Fill in results and winner within `seconds`. few, many: steps that count of a candidate, of a leader.

    No candidate is started if the longest duration so far would exceed the limit. At most half of the time is reserved
    for leaders. A candidate still running at the limit is stopped.
    """
    started, longest = clock(), 0.0

    def left() -> float:
        return seconds - (clock() - started)

    def run(one: Candidate, steps: int) -> dict[str, Any]:
        nonlocal longest
        began = clock()
        result = judged(measure(one, steps, left())) | {"steps": steps}
        longest = max(longest, clock() - began)
        return result

    def climb() -> None:
        while (one := _next(found)) is not None:
            if left() - longest <= min(LEADERS * longest, seconds / 2):
                found.ended = OUT_OF_TIME
                return
            found.results[one.choices] = run(one, few)
            found.order.append(one.choices)
            told(one, found.results[one.choices])

    def hold_against_each_other() -> None:
        leaders = found.measured()[:LEADERS]
        for choices in leaders if len(leaders) > 1 else ():
            if choices in final or left() <= longest:
                continue
            result = run(found.of(choices), many)
            told(found.of(choices), result)
            if result["status"] == "measured" or result["status"] == "not_finite":
                found.results[choices] = result
            if result["status"] == "measured":
                final[choices] = result["median"]

    final: dict[Choices, float] = {}
    while not found.ended:
        climb()
        hold_against_each_other()
        # Only candidates with the same number of steps are compared.
        standing = found.measured()
        found.winner = min(final, key=lambda c: final[c]) if final else standing[0] if standing else None
        # Over more steps another candidate may win, whose neighbours are not tried yet.
        if not found.ended and _next(found) is None:
            found.ended = "no neighbour of the best was left"


def judged(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result with its median, or with another status if its loss is not finite."""
    if result["status"] == "measured" and result.get("loss") is None:
        return {"status": "not_finite", "reason": "its loss is not finite"}
    if result["status"] == "failed" and str(result.get("reason", "")).startswith("NotFinite"):
        return {"status": "not_finite", "reason": result["reason"]}
    found = dict(result)
    if result["status"] == "measured":
        found["median"] = statistics.median(result["seconds"])
    return found


def _next(found: Search) -> Candidate | None:
    """Choose the next to measure: the plan's fastest until one could be measured, then neighbours of the best."""
    untried = [one for one in found.candidates if one.choices not in found.results]
    best = next(iter(found.measured()), None)
    if best is None:
        return untried[0] if untried else None
    around = (best, found.winner) if found.winner else (best,)
    return next((one for centre in around for one in untried if distance(one.choices, centre) == 1), None)


def distance(one: Choices, other: Choices) -> int:
    """Count the levers in which they differ."""
    return sum(a != b for a, b in zip(one, other, strict=True))


def differences(found: Search) -> list[dict[str, Any]]:
    """Compare each other choice of one lever with the winner: step time and memory, or the reason why not known."""
    if found.winner is None:
        return []
    base = found.results[found.winner]
    rows: list[dict[str, Any]] = []
    for choices in dict.fromkeys([*found.results, *found.pruned, *(c.choices for c in found.candidates)]):
        if distance(choices, found.winner) != 1:
            continue
        lever, choice = next(a for a, b in zip(choices, found.winner, strict=True) if a != b)
        row: dict[str, Any] = {"lever": lever, "choice": choice, "choices": choices}
        result = found.results.get(choices)
        if result and result["status"] == "measured":
            row["seconds"] = result["median"]
            row["slower"] = result["median"] / base["median"] - 1
            row["memory"] = peak(result)
        else:
            row["reason"] = found.pruned.get(choices) or (_words(result) if result else f"not measured: {found.ended}")
        rows.append(row)
    levers = [lever for lever, _ in found.winner]
    return sorted(rows, key=lambda row: (levers.index(row["lever"]), row.get("slower", 1e9)))


def peak(result: Mapping[str, Any]) -> int | None:
    """Return the peak bytes of a measured candidate."""
    memory = result["memory"]
    return next((memory[kind] for kind in ("reserved", "peak_allocated", "peak_rss") if kind in memory), None)


def _words(result: Mapping[str, Any]) -> str:
    return f"{result['status'].replace('_', ' ')}: {result['reason']}"


def as_data(found: Search, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON of a search."""

    def one(choices: Choices) -> dict[str, Any]:
        candidate, result = found.of(choices), found.results[choices]
        predicted = {"peak": candidate.prediction.peak, "seconds": candidate.prediction.seconds}
        facts = {key: result[key] for key in ("status", "reason", "steps", *FACTS) if key in result}
        return {"choices": dict(choices), "predicted": predicted, **facts}

    rows = [{**row, "choices": dict(row["choices"])} for row in differences(found)]
    return {
        "schema": 1,
        "suite": "best",
        **about,
        "combinations": len(found.candidates) + len(found.pruned),
        "pruned": [
            {"reason": reason, "count": count} for reason, count in Counter(found.pruned.values()).most_common()
        ],
        "measured": [one(choices) for choices in found.order],
        "winner": dict(found.winner) if found.winner else None,
        "differences": rows,
        "ended": found.ended,
    }


def page(data: Mapping[str, Any]) -> str:
    """Write a search as a page in Markdown."""
    lines = [
        f"# The best configuration of {data['config']}",
        "",
        f"Found by `{data['command']}` on {data['device']['name']}; torch {data['versions']['torch']}. "
        f"{data['combinations']:,} combinations, {sum(row['count'] for row in data['pruned']):,} left out without a "
        f"run, {len(data['measured'])} measured; it ended because {data['ended']}.",
        "",
    ]
    if data["winner"]:
        lines += ["**Winner**: " + ", ".join(f"{lever} {choice}" for lever, choice in data["winner"].items()), ""]
    else:
        lines += ["No candidate could be measured.", ""]
    lines += ["## Why", "", "The winner with one lever changed:", ""]
    lines += table(("lever", "instead", "step", "against the winner", "memory"), map(_difference, data["differences"]))
    if data["pruned"]:
        lines += ["", "## Left out without a run", ""]
        lines += table(("why", "combinations"), ((row["reason"], f"{row['count']:,}") for row in data["pruned"]))
    lines += ["", "## Measured, in this order", ""]
    lines += table(("candidate", "predicted", "step", "steps", "memory", "remark"), map(_measured, data["measured"]))
    return "\n".join([*lines, ""])


def _difference(row: Mapping[str, Any]) -> tuple[str, ...]:
    if "reason" in row:
        return (row["lever"], row["choice"], row["reason"], "", "")
    return (row["lever"], row["choice"], f"{row['seconds']:.4g} s", f"{100 * row['slower']:+.1f} %", _gb(row["memory"]))


def _measured(row: Mapping[str, Any]) -> tuple[str, ...]:
    name = ", ".join(f"{lever} {choice}" for lever, choice in row["choices"].items())
    seconds = row["predicted"]["seconds"]
    predicted = _gb(row["predicted"]["peak"]) + ("" if seconds is None else f", {seconds:.3g} s")
    if row["status"] != "measured":
        return (name, predicted, "", "", "", _words(row))
    return (name, predicted, f"{row['median']:.4g} s", str(row["steps"]), _gb(peak(row)), "")


def _gb(size: float | None) -> str:
    if size is None:
        return ""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def table(headers: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Write a table in Markdown."""
    head = list(headers)
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]
