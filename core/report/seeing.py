"""Charts of what is seen besides loss and gradients: norms of weights, accuracy, attention, memory, time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lockstep.core.report.curves import (
    Json,
    Pairs,
    Records,
    at_spikes,
    chart_of,
    groups_of,
    host,
    keys_of,
    left_out,
    metric,
    series_of,
    wire,
)
from lockstep.core.report.read import section
from lockstep.core.report.text import plural
from lockstep.core.train.metrics import ATTENTION_LOGIT, MEMORY, SECONDS
from lockstep.core.train.time_accounting import PARTS

# Columns of the stacked chart; steps in between are summed.
COLUMNS = 150
# Steps that are named one by one.
NAMED = 10
COLOURS = {
    "data": "c2",
    "compute": "c1",
    "compilation": "c9",
    "communication": "c8",
    "optimizer": "c3",
    "checks": "c4",
    "validation": "c5",
    "logging": "c6",
    "checkpoint": "bad",
    "other": "c7",
}


def more_charts(records: Records) -> list[Json]:
    """Return charts of weight norms, top-1 accuracy, attention logits, memory, and time; those with data."""
    specs = [
        chart_of("weights", "Weight norm", "by group", groups_of(records, "param_norm/"), log=True),
        chart_of(
            "top1",
            "Top-1 accuracy",
            "% of tokens",
            [
                series_of("validation", "c2", "dots", _scaled(metric(records, "val/top1"), 100)),
                series_of("training, on a slice", "c4", "diamonds", _scaled(metric(records, "train/top1"), 100)),
            ],
            zero=True,
        ),
        chart_of("attention", "Largest attention logit", "q·kᵀ/√E, on a slice", _attention(records), zero=True),
        chart_of("memory", "Memory", "GB", _memory(records), zero=True),
        chart_of("stalls", "Where the time went", "% of the time between records", stacked(records), zero=True),
    ]
    return [spec for spec in specs if spec["series"]]


def events(records: Records) -> list[str]:
    """List the events that a reader should know: loss spikes, and steps that were left out."""
    spikes, skips = ([step for step, _ in pairs] for pairs in (at_spikes(records), left_out(records)))
    said = [f"{plural(len(spikes), 'loss spike')}, at {_named(spikes)}."] if spikes else []
    return said + ([f"{plural(len(skips), 'step')} left out, not finite: {_named(skips)}."] if skips else [])


def _named(steps: list[int]) -> str:
    more = f" and {len(steps) - NAMED:,} more" if len(steps) > NAMED else ""
    return "step " + ", ".join(f"{step:,}" for step in steps[:NAMED]) + more


def seconds(records: Records) -> dict[str, float]:
    """Return the seconds of each part over all records, in the order of `PARTS`."""
    sums = dict.fromkeys(PARTS, 0.0)
    for record in records:
        for part in PARTS:
            value = section(record, "host").get(SECONDS + part)
            sums[part] += value if isinstance(value, int | float) else 0.0
    return {part: total for part, total in sums.items() if total}


def stacked(records: Records) -> list[Json]:
    """Return a series of style `area` for each part: `y` on top of `base`, `own` the part's own share, in per cent."""
    steps = [record["step"] for record in records if _times(record)]
    if not steps:
        return []
    table = np.array([[_times(record).get(part, 0.0) for part in PARTS] for record in records if _times(record)])
    edges = np.unique(np.linspace(0, len(steps), min(COLUMNS, len(steps)) + 1).astype(int))
    sums = np.add.reduceat(table, edges[:-1], axis=0)
    shares = 100 * sums / np.maximum(sums.sum(1, keepdims=True), 1e-12)
    tops = shares.cumsum(1)
    # A column speaks of its steps; drawn at the last of them, the first one at its first.
    x = [steps[edge - 1] for edge in edges[1:]]
    x[0] = steps[0]
    found = []
    for number, part in enumerate(PARTS):
        if shares[:, number].max() > 0:
            series = series_of(part, COLOURS[part], "area", list(zip(x, tops[:, number].tolist(), strict=True)))
            series["base"] = [wire(value, 4) for value in (tops - shares)[:, number].tolist()]
            series["own"] = [wire(value, 3) for value in shares[:, number].tolist()]
            found.append(series)
    return found


def _times(record: Mapping[str, Any]) -> dict[str, float]:
    found = {
        key.removeprefix(SECONDS): value
        for key, value in section(record, "host").items()
        if key.startswith(SECONDS) and isinstance(value, int | float) and value > 0
    }
    return {part: value for part, value in found.items() if part in PARTS}


def _attention(records: Records) -> list[Json]:
    keys = keys_of(section(record, "metrics") for record in records)
    blocks = [key for key in keys if key.startswith(f"{ATTENTION_LOGIT}blocks.")]
    shown = list(dict.fromkeys((*blocks[:1], *blocks[-1:])))
    largest = [series_of("largest of all layers", "c1", "line", metric(records, f"{ATTENTION_LOGIT}max"))]
    colours = zip(shown, ("c7", "c8"), strict=False)
    return largest + [series_of(k.removeprefix(ATTENTION_LOGIT), c, "line", metric(records, k)) for k, c in colours]


def _memory(records: Records) -> list[Json]:
    colours = {"peak": "c2", "reserved": "c3", "allocated": "c1", "resident": "c6"}
    return [series_of(k, c, "line", _scaled(host(records, MEMORY + k), 1e-9)) for k, c in colours.items()]


def _scaled(pairs: Pairs, factor: float) -> Pairs:
    return [(step, value * factor) for step, value in pairs]
