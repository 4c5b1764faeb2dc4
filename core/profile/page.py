"""The summary of a profile in words: Markdown for a file, and lines that fit a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.core.sinks.tables import stacked

# Characters of a kernel's name.
NAME = 70
LEAST_SHARE = 0.001


def page(title: str, found: Mapping[str, Any], width: int | None = None) -> str:
    """Write the summary of core/profile/summary.py, with the additions of scripts/commands/profile.py, as Markdown.

    width: columns of a terminal, on which the rows of a wider table stand below each other; None for a file.
    """

    def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
        lines = _table(headers, rows)
        return lines if width is None or len(lines[0]) <= width else stacked("", headers, rows, width)[1:]

    step = found["profiled_seconds"]
    lines = [f"# {title}", "", *_facts(found), "", f"## Where {seconds(step)} of a recorded step go", ""]
    if found["gpu"]:
        lines += table(("", "a step", "share"), _device_rows(found["gpu"], step))
        lines += ["", *_gpu_words(found["gpu"]), "", "## By kind (streams run beside each other)", ""]
        lines += table(("kind", "a step", "share"), _rows(found["by_kind"], step))
    else:
        lines += table(("operators", "a step", "share"), _rows(found["by_kind"], step))
        lines += ["", "No GPU, so no launches, CUDA graphs or gaps between kernels."]
    if found["parts"]:
        lines += ["", "## By part of the step (time of the program)", ""]
        lines += table(("part", "a step", "share"), _rows(found["parts"], step))
    what = "kernels and copies" if found["gpu"] else "operators, by their own time"
    lines += ["", f"## The longest {what}", ""]
    lines += table(("name", "kind", "part", "calls", "a step", "share"), [_top(row) for row in found["top"]])
    return "\n".join([*lines, ""])


def seconds(value: float) -> str:
    """Write a time with four figures, in the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value / 1e-6:.4g} µs"


def _facts(found: Mapping[str, Any]) -> list[str]:
    lines = [f"- {name}: {value}" for name, value in found.get("about", {}).items()]
    lines.append(
        f"- recorded: {found['steps'] or 'no'} steps of the profiler, {seconds(found['profiled_seconds'])} each"
    )
    if "step_seconds" in found:
        lines.append(f"- without the profiler: {seconds(found['step_seconds'])} a step")
    if "memory" in found:
        said = ", ".join(f"{name} {value / 1e9:.3g} GB" for name, value in found["memory"].items())
        lines.append(f"- memory: {said}")
    floor = found.get("floor_seconds")
    if floor:
        products = sum(found["by_kind"].get(kind, 0.0) for kind in ("product", "attention"))
        lines.append(
            f"- floor: {seconds(floor)} (FLOPs at the measured rate of a large product + the optimizer's bytes at the "
            f"measured bandwidth); a step takes {found['step_seconds'] / floor:.3g} times as long, its products and "
            f"attention alone {products / floor:.3g} times"
        )
    return lines


def _device_rows(gpu: Mapping[str, Any], step: float) -> list[list[str]]:
    rows = {
        "computing": gpu["compute_seconds"],
        "communication that no kernel hides": gpu["exposed_communication_seconds"],
        "copies that nothing hides": gpu["exposed_copy_seconds"],
        "idle": gpu["idle_seconds"],
    }
    return [[name, seconds(value), _share(value, step)] for name, value in rows.items()]


def _gpu_words(gpu: Mapping[str, Any]) -> list[str]:
    words = [
        f"- {gpu['launches']:,.0f} kernels a step, {100 * gpu['graph_share']:.1f} % of their time out of CUDA graphs",
        f"- communication: {seconds(gpu['communication_seconds'])}, of which "
        f"{seconds(gpu['exposed_communication_seconds'])} beside no other kernel",
    ]
    sizes = ["up to 10 µs", "up to 100 µs", "up to 1 ms", "over 1 ms"]
    still = [
        f"{row['count']:,.0f} {size} ({seconds(row['seconds'])})"
        for size, row in zip(sizes, gpu["gaps"], strict=True)
        if row["count"]
    ]
    words.append(f"- gaps between kernels: {', '.join(still) or 'none'}")
    if gpu["idle_by_part"]:
        by_part = sorted(gpu["idle_by_part"].items(), key=lambda item: -item[1])
        words.append("- the program was meanwhile in: " + ", ".join(f"{name} {seconds(t)}" for name, t in by_part))
    return words


def _rows(by_name: Mapping[str, float], step: float) -> list[list[str]]:
    longest = sorted(by_name.items(), key=lambda item: -item[1])
    return [[name, seconds(t), _share(t, step)] for name, t in longest if t > LEAST_SHARE * step]


def _top(row: Mapping[str, Any]) -> list[str]:
    name = row["name"] if len(row["name"]) <= NAME else row["name"][: NAME - 1] + "…"
    calls = f"{row['calls']:,.4g}"
    return [name, row["kind"], row["part"], calls, seconds(row["seconds"]), f"{100 * row['share']:.1f} %"]


def _share(value: float, step: float) -> str:
    return f"{100 * value / step:.1f} %" if step else ""


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Write a table of Markdown with aligned columns."""
    cells = [headers, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    lines = ["| " + " | ".join(row) + " |" for row in padded]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
