"""Reduce a run to a few figures, and find where two runs diverge."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.core.config.schema import flatten
from lockstep.core.report.checks import Checks
from lockstep.core.report.curves import Pairs, at_spikes, field, host, left_out, metric, mfu, smooth, smoothing_steps
from lockstep.core.report.read import Run, section
from lockstep.core.report.seeing import seconds
from lockstep.core.report.text import count, number
from lockstep.core.run.info import CHANGED
from lockstep.core.train.loss_scale import SKIPPED
from lockstep.core.train.metrics import MEMORY

# So many standard errors make two smoothed curves differ.
APART = 4.0
UNKNOWN = "—"


@dataclass(frozen=True)
class Figure:
    """A figure of a run: its text, the note beside it, and a value where the least or greatest is best."""

    text: str
    beside: str = ""
    value: float | None = None


def figures(run: Run, checks: Checks) -> dict[str, Figure]:
    """Return the figures of a run by name, in the order in which they are shown."""
    records, last = run.records, run.records[-1]
    planned = section(run.config, "train").get("steps")
    done = run.about.get("finished")
    state = "" if done is None else "finished" if done else "not finished"
    tokens = sum(int(r["tokens"]) for r in records if isinstance(r.get("tokens"), int))
    loss, validation = _finite(field(records, "loss")), _finite(metric(records, "val/loss"))
    best = min(validation, key=lambda pair: pair[1], default=None)
    speeds = [v for _, v in _finite(field(records, "tokens_per_second"))]
    top1 = metric(records, "val/top1")
    peak = max((v for _, v in _finite(host(records, f"{MEMORY}peak"))), default=None)
    shares = [(name, 100 * statistics.median(v for _, v in mfu(records, name))) for name in section(last, "mfu")]
    tau = smoothing_steps(len(loss))
    smoothed = smooth(loss, tau)
    spent, between = seconds(records), sum(v for _, v in _finite(field(records, "seconds")))
    whole = sum(spent.values()) or between
    stalls = sorted(((s, p) for p, s in spent.items() if p != "compute"), reverse=True)[:2]
    skips = max((int(v) for _, v in metric(records, SKIPPED)), default=len(left_out(records)))
    return {
        "Steps": Figure(f"{last['step']:,}", ", ".join(t for t in (f"of {planned:,}" if planned else "", state) if t)),
        "Tokens": Figure(count(tokens)),
        "Best validation loss": _at(best, best and best[1]),
        "Last validation loss": _at(validation[-1] if validation else None, validation[-1][1] if validation else None),
        "Last training loss": Figure(number(smoothed[-1][1]) if smoothed else UNKNOWN, f"smoothed over {tau} steps"),
        "Validation top-1": Figure(f"{100 * top1[-1][1]:.1f} %", f"step {top1[-1][0]:,}") if top1 else Figure(UNKNOWN),
        "Tokens/s": Figure(count(statistics.median(speeds)), "median", -statistics.median(speeds))
        if speeds
        else Figure(UNKNOWN),
        "MFU": Figure(" · ".join(f"{k} {v:.1f} %" for k, v in shares), "median" if shares else "")
        if shares
        else Figure(UNKNOWN),
        "Memory, peak": Figure(f"{peak / 1e9:.2f} GB", "", peak) if peak else Figure(UNKNOWN),
        "Time": Figure(_duration(whole), f"{100 * between / whole:.0f} % in steps" if whole else ""),
        "Most time but for compute": Figure(" · ".join(f"{p} {100 * s / whole:.1f} %" for s, p in stalls) or UNKNOWN),
        "Checks": Figure(_checks(checks)),
        "Steps left out": Figure(f"{skips:,}"),
        "Loss spikes": Figure(f"{len(at_spikes(records)):,}"),
    }


def settings(run: Run) -> dict[str, Any]:
    """Return every setting by its dotted key, with those that a resume has changed; not the name."""
    changed = run.about.get(CHANGED)
    flat = flatten(run.config) | (dict(changed) if isinstance(changed, Mapping) else {})
    return {key: value for key, value in flat.items() if key != "name"}


def surroundings(run: Run) -> dict[str, Any]:
    """Return a run's environment: versions, device, backend, commit, data."""
    found = {f"version of {k}": v for k, v in section(run.about, "versions").items()}
    found |= {k: v for k, v in section(run.about, "hardware").items() if isinstance(v, str | int | float)}
    data = section(run.about, "data")
    found |= {"data": str(data.get("fingerprint", ""))[:12], "backend": run.about.get("backend")}
    commit = run.about.get("git_commit")
    return found | {"git commit": str(commit)[:12] + ("+" if str(commit).endswith("+") else "") if commit else None}


def differences(each: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the keys whose values differ, with the value of each (None where there is none)."""
    keys = dict.fromkeys(key for one in each for key in one)
    table = {key: [one.get(key) for one in each] for key in keys}
    return {key: values for key, values in table.items() if len(set(map(repr, values))) > 1}


@dataclass(frozen=True)
class Parting:
    """The point where two runs diverge.

    common: steps that both have. batch, bits: first step with another batch, with another loss; None if there is none.
    apart: the first step from which on the smoothed difference stays beyond APART standard errors; None if at the last
    common step it is within them. difference, error: the smoothed difference of the losses there, and its error.
    """

    common: int
    batch: int | None
    bits: int | None
    apart: int | None
    difference: float
    error: float


def difference(one: Run, other: Run) -> tuple[Pairs, Pairs, float]:
    """Return the loss of `other` minus that of `one` at common steps, the same smoothed, and its standard error.

    The error is σ/√(2τ − 1), the deviation of an exponential mean over τ steps of noise of deviation σ, and
    σ = 1.4826 · median |Δ_n − Δ_(n−1)| / √2.
    """
    theirs = dict(_finite(field(one.records, "loss")))
    pairs = [(step, loss - theirs[step]) for step, loss in _finite(field(other.records, "loss")) if step in theirs]
    if len(pairs) < 2:
        return pairs, pairs, math.inf
    tau = smoothing_steps(len(pairs))
    noise = 1.4826 * float(np.median(np.abs(np.diff([value for _, value in pairs])))) / math.sqrt(2)
    return pairs, smooth(pairs, tau), noise / math.sqrt(2 * tau - 1)


def parting(one: Run, other: Run) -> Parting:
    """Return the point at which `other` diverges from `one`."""
    first, second = ({r["step"]: r for r in run.records} for run in (one, other))
    common = sorted(first.keys() & second.keys())

    def leaves(key: str) -> int | None:
        return next((step for step in common if first[step].get(key) != second[step].get(key)), None)

    _, smoothed, error = difference(one, other)
    apart = None
    for step, value in reversed(smoothed):
        if abs(value) <= APART * error:
            break
        apart = step
    last = smoothed[-1][1] if smoothed else math.nan
    return Parting(len(common), leaves("digest"), leaves("loss"), apart, last, error)


def _finite(pairs: Pairs) -> Pairs:
    return [(step, value) for step, value in pairs if math.isfinite(value)]


def _at(pair: tuple[int, float] | None, value: float | None) -> Figure:
    return Figure(number(pair[1]), f"step {pair[0]:,}", value) if pair else Figure(UNKNOWN)


def _checks(checks: Checks) -> str:
    words = ("agreed", "disagreed", "could_not", "skipped")
    return ", ".join(f"{checks.counts[w]:,} {w.replace('_', ' ')}" for w in words if checks.counts[w]) or "none"


def _duration(spent: float) -> str:
    if spent < 120:
        return f"{spent:.0f} s"
    minutes = round(spent / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
