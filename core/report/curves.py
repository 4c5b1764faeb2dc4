"""Curves of a run as chart specifications: series by step, smoothed and thinned, never losing an extreme."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from core.names import GROUPS
from core.report.read import section

POINTS = 1500

Json = dict[str, Any]
Records = Sequence[Mapping[str, Any]]
Pairs = list[tuple[int, float]]


def charts(records: Records, config: Mapping[str, Any], entropies: Mapping[str, float]) -> list[Json]:
    """The charts in the order of the page: loss, learning rate, gradient norm, update ratio, throughput.

    entropies: horizontal lines of the loss chart by label, in nats. A chart without a point is left out.
    """
    loss = field(records, "loss")
    tau = smoothing_steps(len(loss))
    clip_norm = section(config, "optim").get("clip_norm")
    specs = [
        _chart(
            "loss",
            "Loss",
            "nats per token",
            [
                _series("training, every step", "c1", "thin", loss),
                _series(f"training, smoothed over {tau} steps", "c1", "line", smooth(loss, tau)),
                _series("validation", "c2", "dots", metric(records, "val/loss")),
                _series("FP32, on a slice", "c4", "diamonds", metric(records, "fp32/loss")),
                _series("training minus FP32", "c4", "readout", metric(records, "fp32/difference")),
                _series("validation top-1", "c2", "readout", metric(records, "val/top1"), percent=True),
            ],
            rules=[{"label": label, "y": wire(value)} for label, value in entropies.items()],
        ),
        _chart(
            "lr",
            "Learning rate",
            "",
            [_series("learning rate", "c1", "line", field(records, "lr"))],
            zero=True,
        ),
        _chart(
            "grad",
            "Gradient norm",
            "before clipping",
            [
                _series("global", "c1", "line", field(records, "grad_norm")),
                *_groups(records, "grad_norm/"),
                _series("clip coefficient below 1", "bad", "rug", field(records, "clip_coefficient")),
            ],
            rules=[{"label": "clip norm", "y": wire(float(clip_norm))}] if clip_norm else [],
            log=True,
        ),
        _chart("update", "Update-to-weight ratio", "by group", _groups(records, "update_ratio/"), log=True),
        _chart(
            "speed",
            "Throughput",
            "tokens per second",
            [
                _series("tokens per second", "c1", "line", field(records, "tokens_per_second")),
                *(
                    _series(f"MFU ({name})", "c1", "readout", mfu(records, name), percent=True)
                    for name in _keys(section(record, "mfu") for record in records)
                ),
            ],
            zero=True,
        ),
    ]
    return [spec for spec in specs if any(s["style"] != "readout" for s in spec["series"])]


def field(records: Records, name: str) -> Pairs:
    """(step, value) of a field of the records."""
    return [(r["step"], float(r[name])) for r in records if isinstance(r.get(name), int | float)]


def metric(records: Records, name: str) -> Pairs:
    """(step, value) of a metric, at the steps where it was due."""
    return _inner(records, "metrics", name)


def mfu(records: Records, name: str) -> Pairs:
    """(step, value) of the model FLOP utilisation under one convention."""
    return _inner(records, "mfu", name)


def smoothing_steps(count: int) -> int:
    """Time constant of the smoothed loss: a fiftieth of the run, at least 5 and at most 100 steps."""
    return min(max(count // 50, 5), 100)


def smooth(pairs: Pairs, tau: int) -> Pairs:
    """Exponential mean with a time constant of `tau` steps; non-finite values are passed over.

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
    """Indices of at most `limit` points: the ends, each bucket's least, greatest, first non-finite value."""
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
    """A number for the page's JSON: `digits` significant digits; NaN and infinities as strings."""
    if value is None:
        return None
    if not math.isfinite(value):
        return str(value)
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _inner(records: Records, outer: str, name: str) -> Pairs:
    pairs = ((record["step"], section(record, outer).get(name)) for record in records)
    return [(step, float(value)) for step, value in pairs if isinstance(value, int | float)]


def _keys(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _groups(records: Records, prefix: str) -> list[Json]:
    seen = _keys(section(record, "metrics") for record in records)
    found = [key.removeprefix(prefix) for key in seen if key.startswith(prefix)]
    names = [*(g for g in GROUPS if g in found), *(g for g in found if g not in GROUPS)]
    colours = dict(zip(GROUPS, ("c2", "c6", "c3", "c4", "c5"), strict=True))
    return [_series(name, colours.get(name, "c7"), "line", metric(records, prefix + name)) for name in names]


def _series(label: str, colour: str, style: str, pairs: Pairs, *, percent: bool = False) -> Json:
    kept = thin(np.array([value for _, value in pairs]))
    return {
        "label": label,
        "reading": label.removeprefix("training, ").removesuffix(" below 1"),
        "colour": colour,
        "style": style,
        "percent": percent,
        "sparse": style in ("dots", "diamonds"),
        "x": [pairs[i][0] for i in kept],
        "y": [wire(pairs[i][1]) for i in kept],
    }


def _chart(
    name: str,
    title: str,
    unit: str,
    series: list[Json],
    *,
    rules: Sequence[Json] = (),
    log: bool = False,
    zero: bool = False,
) -> Json:
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
