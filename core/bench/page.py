"""The table of the bench, for the console and for docs/results/bench_step.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lockstep.core.bench.results import STATUSES, Series, result_of
from lockstep.core.bench.rows import ROWS, Row

GB = 1e9
NOT_MEASURED = "not measured"
HEADERS = (
    "row",
    "what",
    "tokens",
    "published",
    "step",
    "tokens/s",
    "MFU",
    "HFU",
    "peak",
    "floor",
    "published reserved",
    "reserved",
    "most allocated",
    "allocated",
)
LEGEND = (
    "Step: median in seconds (least; spread = (most − least) / median) of the repetitions, each a whole `session.step` "
    "on a batch that is ready, the device waited for. MFU and HFU in percent, by 6N / causal / full FLOPs, against "
    "the dense peak that `peak` names, in TFLOP/s; HFU counts what is computed again. Floor: FLOPs at the measured "
    "rate of a large product + the optimizer's bytes at the measured bandwidth. Memory in GB (10⁹ bytes): reserved and "
    "most allocated during the timed steps, allocated between steps without gradients; on a CPU the largest resident "
    "set of the process (RSS)."
)


def cells(row: Row, result: Mapping[str, Any] | None, length: int) -> list[str]:
    """Return a row's cells under HEADERS. length: tokens a sequence."""
    published = row.published
    batch = row.sequences * row.accumulation
    cut = f" = {row.accumulation} × {row.sequences}" if row.accumulation > 1 else ""
    left = [row.name, row.about, f"[{batch}, {length}]{cut}", _figure(published.seconds, "s")]
    if row.published.note:
        left[3] += "*"
    reserved = _figure(published.reserved, "")
    if result is None or result["status"] != "measured":
        status = result["status"] if result else ""
        return [*left, STATUSES.get(status, NOT_MEASURED), *[""] * 5, reserved, "", "", ""]
    step = f"{result['median']:.4g} ({result['min']:.4g}; {100 * result['spread']:.1f} %)"
    memory, peak = result["memory"], result["peak"]
    used = [
        f"{memory[kind] / GB:.1f}" if kind in memory else "" for kind in ("reserved", "peak_allocated", "allocated")
    ]
    if "peak_rss" in memory:
        used[0] = f"RSS {memory['peak_rss'] / GB:.2f}"
    return [
        *left,
        step,
        f"{result['tokens_per_second']:,.0f}",
        _shares(result["mfu"]),
        _shares(result["hfu"]),
        f"{peak['precision']} {peak['flops'] / 1e12:.4g}" if peak else "not known",
        _figure(result["floor_seconds"], "s"),
        reserved,
        *used,
    ]


def _figure(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.4g} {unit}".strip()


def _shares(shares: Mapping[str, float]) -> str:
    return " / ".join(f"{100 * share:.1f}" for share in shares.values())


def remarks(rows: Iterable[Row], series: Series | None) -> list[str]:
    """Explain why rows have no figure, one line each."""
    found = []
    for row in rows:
        result = result_of(series, row.name) if series else None
        reason = (result or {}).get("reason")
        if reason:
            found.append(f"{row.name}: {reason}")
    return found


def about(series: Series) -> list[str]:
    """Return the device, versions, model and measured rates, a line each."""
    device, floor = series["device"], series["floor"]
    told = {"driver": "driver {}", "power_limit_w": "power limit {:g} W", "sm_mhz": "SM clock up to {:g} MHz"}
    told |= {"memory_mhz": "memory clock up to {:g} MHz", "memory_mib": "{:,g} MiB"}
    told |= {"cores": "{} cores", "threads": "{} threads"}
    facts = [text.format(device[name]) for name, text in told.items() if device.get(name) is not None]
    model = series["config"]["model"]
    lines = [
        ", ".join([device["name"], *facts]),
        ", ".join(f"{name} {version}" for name, version in series["versions"].items()),
        f"model: {model['layers']} layers of {model['hidden']}, vocabulary {model['vocab_size']:,}, "
        f"sequences of {series['config']['sequence_length']:,} tokens",
    ]
    if floor:
        rates = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in floor["rates"].items())
        copied = f"{floor['bandwidth'] / GB:,.4g}"
        lines.append(f"measured: products of side {floor['side']:,} in TFLOP/s: {rates}; copy {copied} GB/s")
    return lines


def page(results: Mapping[str, Any]) -> str:
    """Return docs/results/bench_step.md: a table for each series; only the published one where nothing was measured."""
    lines = [
        "# Whole steps, beside the published figures",
        "",
        "Made from [bench_step.json](bench_step.json) by `lockstep bench step --page docs/results/bench_step.md`; "
        "measured by "
        "`lockstep bench step`. The published figures are of one H100 and the 1.24B model "
        "([configs/llama-1b.toml](../../configs/llama-1b.toml)): Omkaar Kamath, “How to Train an LLM” (2025–26).",
        "",
        LEGEND,
    ]
    for series in results["series"]:
        lines += ["", f"## {series['device']['name']}", "", *(f"- {line}" for line in about(series)), ""]
        lines += _table(series)
    if not results["series"]:
        lines += ["", "## Not measured yet", ""]
        lines += ["No device has been measured. The rows below are to be run on one NVIDIA H100 80GB (SXM).", ""]
        lines += _table(None)
    notes = [f"{row.name}: {row.published.note}" for row in ROWS if row.published.note]
    return "\n".join([*lines, "", "\\* Published under other conditions:", "", *(f"- {note}" for note in notes), ""])


def _table(series: Series | None) -> list[str]:
    length = series["config"]["sequence_length"] if series else 2048
    rows = [cells(row, result_of(series, row.name) if series else None, length) for row in ROWS]
    lines = [_line(HEADERS), _line(["---"] * len(HEADERS)), *map(_line, rows)]
    why = remarks(ROWS, series)
    return [*lines, "", "Rows without a figure:", "", *(f"- {line}" for line in why)] if why else lines


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace('*', chr(92) + '*') for cell in cells)} |"
