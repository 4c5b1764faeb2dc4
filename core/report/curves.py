"""Curves of a run as chart specifications: series by step, smoothed and thinned, never losing an extreme."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from lockstep.core.model.graph import GROUPS
from lockstep.core.report.read import section
from lockstep.core.train.metrics import SPIKE

POINTS = 1500

Json = dict[str, Any]
Records = Sequence[Mapping[str, Any]]
Pairs = list[tuple[int, float]]


def charts(records: Records, config: Mapping[str, Any], entropies: Mapping[str, float]) -> list[Json]:
    """Return the charts in the page's order: loss, learning rate, gradient norm, update ratio, throughput.

    entropies: horizontal lines of the loss chart by label, in nats. A chart without a point is left out.
    """
    loss = field(records, "loss")
    tau = smoothing_steps(len(loss))
    clip_norm = section(config, "optim").get("clip_norm")
    specs = [
        chart_of(
            "loss",
            "Loss",
            "nats per token",
            [
                series_of("training, every step", "c1", "thin", loss),
                series_of(f"training, smoothed over {tau} steps", "c1", "line", smooth(loss, tau)),
                series_of("validation", "c2", "dots", metric(records, "val/loss")),
                series_of("loss spike", "bad", "peaks", at_spikes(records)),
                series_of("left out, not finite", "bad", "rug", left_out(records)),
                series_of("FP32, on a slice", "c4", "diamonds", metric(records, "fp32/loss")),
                series_of("training minus FP32", "c4", "readout", metric(records, "fp32/difference")),
                series_of("validation top-1", "c2", "readout", metric(records, "val/top1"), percent=True),
            ],
            rules=[{"label": label, "y": wire(value)} for label, value in entropies.items()],
        ),
        chart_of(
            "lr",
            "Learning rate",
            "",
            [series_of("learning rate", "c1", "line", field(records, "lr"))],
            zero=True,
        ),
        chart_of(
            "grad",
            "Gradient norm",
            "before clipping",
            [
                series_of("global", "c1", "line", field(records, "grad_norm")),
                *groups_of(records, "grad_norm/"),
                series_of("clip coefficient below 1", "bad", "rug", field(records, "clip_coefficient")),
            ],
            rules=[{"label": "clip norm", "y": wire(float(clip_norm))}] if clip_norm else [],
            log=True,
        ),
        chart_of("update", "Update-to-weight ratio", "by group", groups_of(records, "update_ratio/"), log=True),
        chart_of(
            "speed",
            "Throughput",
            "tokens per second",
            [
                series_of("tokens per second", "c1", "line", field(records, "tokens_per_second")),
                *(
                    series_of(f"MFU ({name})", "c1", "readout", mfu(records, name), percent=True)
                    for name in keys_of(section(record, "mfu") for record in records)
                ),
            ],
            zero=True,
        ),
    ]
    return [spec for spec in specs if any(s["style"] != "readout" for s in spec["series"])]


def field(records: Records, name: str) -> Pairs:
    """Return (step, value) of a field of the records."""
    return [(r["step"], float(r[name])) for r in records if isinstance(r.get(name), int | float)]


def metric(records: Records, name: str) -> Pairs:
    """Return (step, value) of a metric, at the steps where it was due."""
    return _inner(records, "metrics", name)


def host(records: Records, name: str) -> Pairs:
    """Return (step, value) of what the machine gave, at the steps where it was due."""
    return _inner(records, "host", name)


def at_spikes(records: Records) -> Pairs:
    """Return (step, loss) of each loss spike."""
    found = {step for step, _ in metric(records, SPIKE)}
    return [(step, loss) for step, loss in field(records, "loss") if step in found]


def left_out(records: Records) -> Pairs:
    """Return (step, 0) of each step that was left out because it is not finite."""
    return [(r["step"], 0.0) for r in records if r.get("left_out") is not None or _fp16_left_out(r)]


def _fp16_left_out(record: Mapping[str, Any]) -> bool:
    metrics, norm = section(record, "metrics"), record.get("grad_norm")
    return "loss_scale" in metrics and isinstance(norm, float) and not math.isfinite(norm)


def mfu(records: Records, name: str) -> Pairs:
    """Return (step, value) of the model FLOP utilisation under one convention."""
    return _inner(records, "mfu", name)


def smoothing_steps(count: int) -> int:
    """Return the time constant of the smoothed loss: a fiftieth of the run, from 5 to 100 steps."""
    return min(max(count // 50, 5), 100)


def smooth(pairs: Pairs, tau: int) -> Pairs:
    """Return the exponential mean with a time constant of `tau` steps; non-finite values are passed over.

    The time constant grows from 1 by a twentieth a step, so that it does not lag behind the steep start.
    """
    mean: float | None = None
    out: Pairs = []
    for place, (step, value) in enumerate(pairs):
        if math.isfinite(value):
            share = 1.0 / min(tau, 1 + place / 20)
            mean = value if mean is None else mean + share * (value - mean)
        if mean is not None:
            out.append((step, mean))
    return out


def thin(values: np.ndarray, limit: int = POINTS) -> np.ndarray:
    """Return indices of at most `limit` points: the ends, each bucket's least, greatest, first non-finite value."""
    count = len(values)
    if count <= limit:
        return np.arange(count)
    edges = np.linspace(0, count, (limit - 2) // 3 + 1).astype(int)
    kept = {0, count - 1}
    finite = np.isfinite(values)
    for start, stop in pairwise(edges):
        good = start + np.flatnonzero(finite[start:stop])
        if len(good):
            kept.add(int(good[np.argmin(values[good])]))
            kept.add(int(good[np.argmax(values[good])]))
        if len(good) < stop - start:
            kept.add(int(start + np.argmin(finite[start:stop])))
    return np.array(sorted(kept))


def wire(value: float | None, digits: int = 6) -> float | int | str | None:
    """Return a number for the page's JSON: `digits` significant digits; NaN and infinities as strings."""
    if value is None:
        return None
    if not math.isfinite(value):
        return str(value)
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _inner(records: Records, outer: str, name: str) -> Pairs:
    pairs = ((record["step"], section(record, outer).get(name)) for record in records)
    return [(step, float(value)) for step, value in pairs if isinstance(value, int | float)]


def keys_of(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return every key of the mappings, in the order in which they come."""
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def groups_of(records: Records, prefix: str) -> list[Json]:
    """Return a line for each group and outer block that has a metric `prefix`NAME."""
    seen = keys_of(section(record, "metrics") for record in records)
    found = [key.removeprefix(prefix) for key in seen if key.startswith(prefix)]
    names = [*(g for g in GROUPS if g in found), *(g for g in found if g not in GROUPS)]
    colours: dict[str, str] = dict(zip(GROUPS, ("c2", "c6", "c3", "c4", "c5"), strict=True))
    blocks = iter(("c7", "c8"))
    return [
        series_of(name, colours.get(name) or next(blocks, "c7"), "line", metric(records, prefix + name))
        for name in names
    ]


def series_of(label: str, colour: str, style: str, pairs: Pairs, *, percent: bool = False) -> Json:
    """Return a series as the page's script takes it, thinned."""
    kept = thin(np.array([value for _, value in pairs]))
    return {
        "label": label,
        "reading": label.removeprefix("training, ").removesuffix(" below 1"),
        "colour": colour,
        "style": style,
        "percent": percent,
        "sparse": style in ("dots", "diamonds"),
        # Spoken of at its own steps alone.
        "exact": style == "peaks" or label.startswith("left out"),
        "x": [pairs[i][0] for i in kept],
        "y": [wire(pairs[i][1]) for i in kept],
    }


def chart_of(
    name: str,
    title: str,
    unit: str,
    series: list[Json],
    *,
    rules: Sequence[Json] = (),
    log: bool = False,
    zero: bool = False,
) -> Json:
    """Return a chart as the page's script takes it; series without a point are left out."""
    filled = [s for s in series if s["x"]]
    return {
        "id": name,
        "title": title,
        "unit": unit,
        "log": log,
        "zero": zero,
        "rules": list(rules),
        "series": filled,
        "summary": _summary(title, filled),
    }


def _summary(title: str, series: Sequence[Json]) -> str:
    parts = []
    for s in series:
        finite = [y for y in s["y"] if not isinstance(y, str)]
        extent = f", least {min(finite)}, greatest {max(finite)}" if finite else ""
        ends = ", ".join(f"{s['y'][i]} at step {s['x'][i]}" for i in (0, -1))
        parts.append(f"{s['label']}: {ends}{extent}")
    return f"{title} by step. " + "; ".join(parts) + "."
