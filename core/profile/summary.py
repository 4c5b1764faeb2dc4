"""Summarize a trace of a step: the time of each part, and the time in which the device stood still or waited.

All seconds are of one step: the mean over those that were recorded.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lockstep.core.profile.intervals import Span, difference, gaps, intersection, length, union
from lockstep.core.profile.trace import CALLS, COPIES, KERNEL, OPERATOR, PART, RANGE, STEP, Event

SCHEMA = 1
MICROSECOND = 1e-6
# The first pattern that matches the lower-case name of a kernel or operator. cuBLAS's on Hopper are nvjet_….
KINDS = (
    ("communication", r"nccl|gloo|c10d::|all_?reduce|all_?gather|reduce_?scatter"),
    ("attention", r"fmha|flash|attention|sdpa"),
    ("product", r"gemm|cutlass|cublas|xmma|nvjet|::b?a?d?d?b?mm\b|::_scaled_mm|::linear\b|::matmul|mkldnn|wgmma"),
    ("optimizer", r"adam|multi_tensor|_foreach_"),
    ("copy", r"memcpy|memset|::copy_|::_to_copy|::clone|::zero_|::fill_"),
    ("compiled", r"triton|compiledf|torch-compiled|compiled region|cpp_fused"),
)
OTHER = "other"
# On the CPU: Python, and what the runtime does by itself.
OUTSIDE = "outside operators"
# Ranges that hold others: what is only in them is the rest.
WHOLE = ("step", "micro-batch")
REST = "the rest"
# Gaps between kernels up to this many seconds.
SIZES = (1e-5, 1e-4, 1e-3)


def kind_of(name: str) -> str:
    """Return the kind of a kernel or an operator, by its name."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name.lower())), OTHER)


def summarize(events: Sequence[Event], top: int = 20) -> dict[str, Any]:
    """Summarize a trace (docs/guide/profile.md lists the entries). `events` are by start, as `read_trace` gives.

    Without steps of the profiler's, the whole trace counts as one.
    """
    steps = [e.span for e in events if e.category == RANGE and e.name.startswith(STEP)]
    spans = union(steps) or [(events[0].start, max(e.stop for e in events))]
    window = spans[0][0], spans[-1][1]
    count = max(len(steps), 1)
    parts = _parts(events, window)
    on_gpu = any(e.category == KERNEL for e in events)
    work = _on_gpu(events, window) if on_gpu else _operators(events, window)
    per_step = MICROSECOND / count
    step = length(spans) * per_step
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "steps": len(steps),
        "device": "cuda" if on_gpu else "cpu",
        "profiled_seconds": step,
        "parts": {name: length(there) * per_step for name, there in parts.items()},
        "by_kind": _by_kind(work, per_step) | ({} if on_gpu else {OUTSIDE: _outside(events, window) * per_step}),
        "top": _top(work, parts, per_step, step)[:top],
    }
    return found | (_gpu(events, work, parts, window, per_step) if on_gpu else {"gpu": None})


def _parts(events: Sequence[Event], window: Span) -> dict[str, list[Span]]:
    """Return the spans of each part of a step, and of none of them; nothing if the trace has no such ranges."""
    by_name: dict[str, list[Span]] = defaultdict(list)
    for event in events:
        if event.category == RANGE and event.name.startswith(PART):
            by_name[event.name.removeprefix(PART)].append(event.span)
    if not by_name:
        return {}
    found = {name: intersection(union(spans), [window]) for name, spans in by_name.items() if name not in WHOLE}
    found[REST] = gaps(union(span for spans in found.values() for span in spans), window)
    return {name: spans for name, spans in found.items() if spans}


# The work that took time: (name, kind, when, how long by itself, when it was asked for)
_Work = list[tuple[Event, str, float, float]]


def _on_gpu(events: Sequence[Event], window: Span) -> _Work:
    """Return kernels and copies launched in the window, each with the time of its launch."""
    asked = {e.arguments.get("correlation"): e.start for e in events if e.category in CALLS}
    work: _Work = []
    for event in events:
        if event.category != KERNEL and event.category not in COPIES:
            continue
        at = asked.get(event.arguments.get("correlation"), event.start)
        if window[0] <= at < window[1]:
            kind = "copy" if event.category in COPIES else kind_of(event.name)
            work.append((event, kind, event.stop - event.start, at))
    return work


def _operators(events: Sequence[Event], window: Span) -> _Work:
    """Return operators that began in the window, each with its own time, without the operators inside it."""
    inside: dict[tuple[Any, Any], list[tuple[Event, list[float]]]] = defaultdict(list)
    work: list[tuple[Event, list[float]]] = []
    for event in events:
        if event.category != OPERATOR or not window[0] <= event.start < window[1]:
            continue
        open_ = inside[event.lane]
        while open_ and open_[-1][0].stop <= event.start:
            open_.pop()
        if open_:
            open_[-1][1].append(event.stop - event.start)
        open_.append((event, []))
        work.append(open_[-1])
    return [(e, kind_of(e.name), max(e.stop - e.start - sum(inner), 0.0), e.start) for e, inner in work]


def _outside(events: Sequence[Event], window: Span) -> float:
    """Return the time in the window in which no thread was in an operator."""
    return length(gaps(union(event.span for event in events if event.category == OPERATOR), window))


def _by_kind(work: _Work, per_step: float) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for _, kind, own, _ in work:
        found[kind] += own * per_step
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _top(work: _Work, parts: Mapping[str, list[Span]], per_step: float, step: float) -> list[dict[str, Any]]:
    """Return rows by name and part, the longest first. share: of the step's time; streams run beside each other."""
    own_of: dict[tuple[str, str], list[float]] = defaultdict(list)
    kinds: dict[str, str] = {}
    for (event, kind, own, _), part in zip(work, _part_at([at for *_, at in work], parts), strict=True):
        own_of[event.name, part].append(own)
        kinds[event.name] = kind
    rows = [
        {
            "name": name,
            "kind": kinds[name],
            "part": part,
            "calls": len(own) * per_step / MICROSECOND,
            "seconds": sum(own) * per_step,
            "share": sum(own) * per_step / step if step else 0.0,
        }
        for (name, part), own in own_of.items()
    ]
    return sorted(rows, key=lambda row: (-row["seconds"], row["name"], row["part"]))


def _part_at(times: Sequence[float], parts: Mapping[str, list[Span]]) -> list[str]:
    """Return the part of the step in which each instant lies, empty if there is none."""
    edges = sorted((start, stop, name) for name, spans in parts.items() for start, stop in spans)
    found = [""] * len(times)
    number = 0
    for at, index in sorted((at, index) for index, at in enumerate(times)):
        while number < len(edges) and edges[number][1] <= at:
            number += 1
        if number < len(edges) and edges[number][0] <= at:
            found[index] = edges[number][2]
    return found


def _gpu(
    events: Sequence[Event], work: _Work, parts: Mapping[str, list[Span]], window: Span, per_step: float
) -> dict[str, Any]:
    """Return a GPU's own figures: time without a kernel, kernels outside graphs, exposed communication."""
    graphs = {
        e.arguments.get("correlation") for e in events if e.category in CALLS and e.name.startswith("cudaGraphLaunch")
    }
    launched = [
        own
        for event, _, own, _ in work
        if event.category == KERNEL
        and (event.arguments.get("correlation") in graphs or event.arguments.get("graph node id"))
    ]
    kernels = sum(own for event, _, own, _ in work if event.category == KERNEL)
    sent = _when(work, {"communication"})
    computing = union(event.span for event, kind, _, _ in work if event.category == KERNEL and kind != "communication")
    copying = _when(work, {"copy"})
    busy = union([*sent, *computing, *copying])
    # Steps are waited for: the device begins after the first has begun, and may end after the last.
    idle = gaps(busy, (window[0], max(window[1], busy[-1][1]))) if busy else [window]
    return {
        "gpu": {
            "busy_seconds": length(busy) * per_step,
            "idle_seconds": length(idle) * per_step,
            "idle_by_part": {
                name: found * per_step for name, spans in parts.items() if (found := length(intersection(idle, spans)))
            },
            "gaps": _gaps(idle, per_step),
            "launches": sum(event.category == KERNEL for event, *_ in work) * per_step / MICROSECOND,
            "graph_share": sum(launched) / kernels if kernels else 0.0,
            "compute_seconds": length(computing) * per_step,
            "communication_seconds": length(sent) * per_step,
            "exposed_communication_seconds": length(difference(sent, computing)) * per_step,
            "exposed_copy_seconds": length(difference(difference(copying, computing), sent)) * per_step,
        }
    }


def _when(work: _Work, kinds: Iterable[str]) -> list[Span]:
    return union(event.span for event, kind, _, _ in work if kind in kinds)


def _gaps(idle: Sequence[Span], per_step: float) -> list[dict[str, float]]:
    """Count and time the gaps by size: up to 10 µs, 100 µs, 1 ms, and longer."""
    rows = []
    for least, most in zip((0.0, *SIZES), (*SIZES, float("inf")), strict=True):
        own = [t for start, stop in idle if least < (t := (stop - start) * MICROSECOND) <= most]
        each = per_step / MICROSECOND
        rows.append({"over": least, "count": len(own) * each, "seconds": sum(own) * each})
    return rows
