"""Show the results of `lockstep bench ladder`: lines and tables for the console, the page and its picture."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.core.bench.bars import Bar, Panel, picture
from lockstep.core.bench.intervals import ratio
from lockstep.core.bench.ladder import EXPECTED, NUMBER, RUNGS, Rung
from lockstep.core.bench.peers import COMPARED

SOURCE = "“GPT-2 from scratch: training optimizations, a deep dive” (February 2026)"
# The published batch: 64 sequences of 512 tokens.
PUBLISHED_TOKENS = 64 * 512
# Fewest rounds for a verdict.
FEWEST = 6


def answers(found: Mapping[str, Any]) -> list[str]:
    """Describe the result of each rung of a row, or why it has no figure."""
    if not found["rungs"]:
        return [f"{found['row']}: failed: {found['reason']}"]
    lines = []
    for rung in RUNGS:
        one = found["rungs"][rung.name]
        what = f"{NUMBER[rung.name]} {rung.adds}"
        if one["status"] != "measured":
            lines.append(f"{what}: {one['status'].replace('_', ' ')}: {one['reason']}")
        elif NUMBER[rung.name] > 1:
            over, first = one["over_previous"], one["over_first"]
            below = (
                "not compared with the rung below"
                if over is None
                else f"{_ratio(over)} of the rung below, {gain(over, len(one['seconds']))}"
            )
            whole = f"; {_ratio(first)} of rung 1" if first is not None and NUMBER[rung.name] > 2 else ""
            lines.append(f"{what}: {below}{whole}")
    return lines


def gain(over: Mapping[str, float], rounds: int) -> str:
    """Return, in words, whether a factor is a gain.

    A median lies outside all of n values with probability 2 · 2⁻ⁿ: fewer than FEWEST have no interval of 95 %.
    """
    if rounds < FEWEST:
        return f"of {rounds} rounds, which are too few to tell"
    if over["low"] > 1:
        return "faster"
    return "slower" if over["high"] < 1 else "no measurable difference"


def _ratio(value: Mapping[str, float]) -> str:
    return f"{value['median']:.2f}× ({value['low']:.2f} to {value['high']:.2f})"


HEADERS = (
    "rung",
    "tokens/s (95 %)",
    "over the rung below",
    "published",
    "over rung 1",
    "published",
    "step",
    "data",
    "memory",
    "loss, step 1",
    f"step {COMPARED}",
)


def cells(found: Mapping[str, Any]) -> list[list[str]]:
    """Return a row's rungs under HEADERS."""
    lines = []
    for rung in RUNGS:
        one, what = found["rungs"][rung.name], f"{NUMBER[rung.name]} {rung.adds}"
        if "seconds" not in one:
            lines.append([what, one["status"], *[""] * (len(HEADERS) - 2)])
            continue
        low, high = one["interval"]
        spread = f"{min(one['seconds']):.4g} to {max(one['seconds']):.4g}"
        previous, first = ("" if one[key] is None else _ratio(one[key]) for key in ("over_previous", "over_first"))
        lines.append(
            [
                what,
                f"{one['tokens_per_second']:,.0f} ({low:,.0f} to {high:,.0f})",
                *(previous, _published_over(rung, NUMBER[rung.name] - 1)),
                *(first, _published_over(rung, 1)),
                f"{one['median']:.4g} s ({spread}; {len(one['seconds'])} steps)",
                f"{1e3 * statistics.median(one['data_seconds']):.3g} ms, {_percent(one['data_share'])}",
                "not known" if one["memory"] is None else f"{one['memory'] / 1e6:,.0f} MB",
                f"{one['losses'][0]:.6f}",
                f"{one['losses'][-1]:.6f}",
            ]
        )
    return lines


def _published_over(rung: Rung, number: int) -> str:
    """Return how many times as fast as rung `number` a rung is, as published; nothing for the first."""
    return f"{RUNGS[number - 1].published / rung.published:.2f}×" if 0 < number < NUMBER[rung.name] else ""


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


LOADER_HEADERS = ("loader alone, on one core", "batches/s (95 %)", "a batch", "over the one above")


def loader_cells(found: Mapping[str, Any]) -> list[list[str]]:
    """Return a row's loaders under LOADER_HEADERS."""
    lines: list[list[str]] = []
    before: Sequence[float] | None = None
    for rung in RUNGS:
        if (one := found["loaders"].get(rung.name)) is None:
            continue
        low, high = one["interval"]
        over = "" if before is None else _ratio(ratio(one["seconds"], before))
        rate = f"{one['batches_per_second']:,.0f} ({low:,.0f} to {high:,.0f})"
        lines.append([f"{NUMBER[rung.name]} {rung.adds}", rate, f"{1e6 / one['batches_per_second']:,.0f} µs", over])
        before = one["seconds"]
    return lines


SHOWS = "Bars: tokens a second of six rungs, each with one more optimisation, here and as published; loaders alone"


def figure(results: Mapping[str, Any]) -> str:
    """Return docs/results/bench_ladder.svg: the rungs of each row, the published ones, and the loaders alone."""
    panels = []
    for found in results["rows"]:
        if bars := list(_rung_bars(found)):
            panels.append(Panel(f"Here, steps of {_size(found)} tokens: tokens a second; × over the rung below", bars))
    published = "Published: one A100, GPT-2 of 134M parameters, steps of [64, 512] tokens"
    panels.append(Panel(published, list(_published_bars())))
    for found in results["rows"]:
        if found["loaders"]:
            panels.append(Panel(f"The loaders alone, batches of {_size(found)}", list(_loader_bars(found))))
    below = f"Longer is faster. Blue: parts of Lockstep. Grey: naive loaders; as published. Here: {where(results)}"
    return picture("The ladder: what each optimisation of a training step gives", below, panels)


def where(results: Mapping[str, Any]) -> str:
    """Name the device in a few words."""
    device = results["device"]
    return f"{device['name']}, {device['threads']} threads" if device["kind"] == "cpu" else str(device["name"])


def _size(found: Mapping[str, Any]) -> str:
    sequences, _, length = found["row"].partition("x")
    return f"[{int(sequences)}, {int(length):,}]"


def _rung_bars(found: Mapping[str, Any]) -> Iterator[Bar]:
    for rung in RUNGS:
        one = found["rungs"].get(rung.name)
        if one is None or one["status"] != "measured":
            continue
        over = f" ({one['over_previous']['median']:.2f}×)" if one["over_previous"] else ""
        text = f"{one['tokens_per_second']:,.0f} tok/s{over}"
        yield Bar(f"{NUMBER[rung.name]} {rung.adds}", one["tokens_per_second"], text, rung.ours, *one["interval"])


def _published_bars() -> Iterator[Bar]:
    for number, rung in enumerate(RUNGS, 1):
        rate, over = PUBLISHED_TOKENS / rung.published, _published_over(rung, number - 1)
        text = f"{rate:,.0f} tok/s" + (f" ({over})" if over else "")
        yield Bar(f"{number} {rung.adds}", rate, text)


def _loader_bars(found: Mapping[str, Any]) -> Iterator[Bar]:
    for rung in RUNGS:
        if (one := found["loaders"].get(rung.name)) is not None:
            text = f"{one['batches_per_second']:,.0f} batches/s"
            name = f"{NUMBER[rung.name]} {rung.adds}"
            yield Bar(name, one["batches_per_second"], text, rung.ours, *one["interval"])


def page(results: Mapping[str, Any]) -> str:
    """Return docs/results/bench_ladder.md, without its picture."""
    device, config = results["device"], results["config"]
    model, train = config["model"], config["train"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        "# The ladder: six optimisations, one after the other",
        "",
        "Made from [bench_ladder.json](bench_ladder.json) by `lockstep bench ladder --page "
        "docs/results/bench_ladder.md`; measured by `lockstep bench ladder"
        + "".join(f" --lengths {' '.join(lengths)}" for lengths in [_lengths(results)] if len(lengths) > 1)
        + f"`. {where(results)}"
        + (f" ({', '.join(device['instructions'])})" if device.get("instructions") else "")
        + f"; {versions}. Run file {config['name']}: {model['layers']} layers of {model['hidden']}, vocabulary "
        f"{model['vocab_size']:,}, {train['batch_size'] * train['sequence_length']:,} tokens a step, AdamW.",
        "",
        "Every rung is a whole training step of the same model on the same batches, from the same weights. It keeps "
        "what the rungs below have. Batches are compared bit for bit, and the losses of the first "
        f"{COMPARED} steps with those of rung {NUMBER[EXPECTED]}; a rung that differs by more than rounding explains "
        "is no rung and has no factor. The processes of all rungs are alive side by side and make one step in turn, "
        "round by round. A factor is the median over rounds, with its 95 % interval by bootstrap. Data: time from "
        "the step's beginning until its batch is made, and its share of the step. Memory: on a CPU the largest "
        "resident set above what the process held after its imports, with the tokens and the compiler in it; on CUDA "
        "the most that was allocated.",
        "",
        f"Tokens are made up: {results['tokens']:,} of them, in a file that the page cache holds, so that mmap never "
        "waits for a disk. Rungs 1 and 2 take token after token in Python, which the published ladder does not say of "
        "itself in such detail; rung 3 is Lockstep's loader, without the thread by which a run makes batches ahead. "
        'Rungs 4 to 6 are the settings `compile.enabled`, `precision.policy = "bf16"` and `attention.kernel`: '
        '"math", attention written out, below rung 6, and "flash" there.',
        "",
    ]
    for found in results["rows"]:
        lines += [f"## Steps of {_size(found)} tokens", ""]
        if found["rungs"]:
            lines += [*_table(HEADERS, cells(found)), ""]
        lines += [*(f"- {line}" for line in answers(found)), ""]
        if found["loaders"]:
            lines += [*_table(LOADER_HEADERS, loader_cells(found)), ""]
    return "\n".join([*lines, *_published_words()])


def _lengths(results: Mapping[str, Any]) -> list[str]:
    return [found["row"].partition("x")[2] for found in results["rows"]]


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(headers)} |", f"|{'---|' * len(headers)}", *(f"| {' | '.join(row)} |" for row in rows)]


def _published_words() -> list[str]:
    lines = [
        "## As published",
        "",
        f"{SOURCE}: GPT-2 of 134M parameters, one A100, steps of [64, 512] tokens. Seconds of a step are the "
        "article's; the rest follows from them. Another model on another device: factors may be compared, not times.",
        "",
    ]
    headers = ("rung", "step", "tokens/s", "over the rung below", "over rung 1")
    rows = []
    for number, rung in enumerate(RUNGS, 1):
        rate = f"{PUBLISHED_TOKENS / rung.published:,.0f}"
        over = _published_over(rung, number - 1), _published_over(rung, 1)
        rows.append([f"{number} {rung.adds}", f"{rung.published:g} s", rate, *over])
    return [*lines, *_table(headers, rows), ""]
