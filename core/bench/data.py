"""`lockstep bench data`: contenders, sizes of batches, and the page with its picture.

The JSON:
```
{"schema": 1, "suite": "data", "device": {…}, "versions": {…}, "tokens": of the data set, "rows": [
  {"row": "64x1024", "status": "measured" | "failed", "reason": … or null,
   "contenders": {NAME: {"seconds": [a batch, by turn], "median": …, "tokens_per_second": …, "batches": of a turn}},
   "ratios": {PEER: {OURS: {"median": …, "low": …, "high": …}}}, "parts": {PART: seconds of a batch}}],
 "first": {NAME: {"seconds": [from opening to the first batch], "opened": [of it, opening]}},
 "resume": {"samples": of a data set on paper, "at": {SAMPLE: [seconds from its opening to its first batch]}}
           or {"reason": why it was not measured}}
```
A ratio is Lockstep's tokens a second / the peer's.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.core.bench.bars import Bar, Panel, picture
from lockstep.core.bench.intervals import interval, ratio
from lockstep.core.bench.peers import Contender

SCHEMA, SUITE = 1, "data"
_OURS, _THEIRS = "lockstep.core.bench.loaders", "lockstep.torch_backend.tools.peers.loaders"
# By name: scripts/shared/bench_loader.py imports each contender in a process of its own.
CONTENDERS = (
    Contender("lockstep", "Lockstep, tokens in memory", f"{_OURS}:InMemory", ours=True),
    Contender("lockstep-ahead", "Lockstep, by its thread", f"{_OURS}:Ahead", ours=True),
    Contender("lockstep-mapped", "Lockstep, shards mapped", f"{_OURS}:Mapped", ours=True),
    Contender("lockstep-mixture", "Lockstep, a mixture of three", f"{_OURS}:Mixture", ours=True),
    Contender("mmap", "mmap slices, NumPy alone", f"{_THEIRS}:Slices"),
    Contender("nanogpt", "nanoGPT's get_batch", f"{_THEIRS}:NanoGPT"),
    Contender("dataloader", "torch DataLoader, 8 workers", f"{_THEIRS}:TorchLoader"),
)
# Sequences of this many tokens.
ROWS = {"16x128": (16, 128), "64x1024": (64, 1024), "512x1024": (512, 1024)}
# First batches are of this size.
FIRST = "64x1024"
# A virtual data set: larger than the sample at which a run resumes, and not a power of four, which is easiest to
# permute.
PAPER_SAMPLES, RESUMED_AT = 1_200_000_000, (0, 1_000, 1_000_000, 1_000_000_000)


def result(row: str, said: Mapping[str, Sequence[Mapping[str, Any]]], parts: Mapping[str, float]) -> dict[str, Any]:
    """Return a row's result from the counted answers of each contender."""
    sequences, length = ROWS[row]
    taken = {name: [float(answer["seconds"]) for answer in answers] for name, answers in said.items()}
    contenders = {
        name: {
            "seconds": seconds,
            "median": statistics.median(seconds),
            "tokens_per_second": sequences * length / statistics.median(seconds),
            "batches": said[name][-1]["batches"],
        }
        for name, seconds in taken.items()
    }
    ours, peers = ([one.name for one in CONTENDERS if one.name in taken and one.ours is own] for own in (True, False))
    ratios = {peer: {own: ratio(taken[own], taken[peer]) for own in ours} for peer in peers}
    found = {"row": row, "status": "measured", "reason": None}
    return {**found, "contenders": contenders, "ratios": ratios, "parts": dict(parts)}


def answers(found: Mapping[str, Any]) -> list[str]:
    """Return the comparisons of a row: each of Lockstep's ways beside each peer."""
    if found["status"] != "measured":
        return [f"{found['status']}: {found['reason']}"]
    lines = []
    for own in (one.name for one in CONTENDERS if one.ours and one.name in found["contenders"]):
        said = (f"{_ratio(ratios[own])} of {peer}" for peer, ratios in found["ratios"].items())
        lines += [f"{own}: {', '.join(said)}"] if found["ratios"] else []
    return lines


def _ratio(value: Mapping[str, float]) -> str:
    return f"{_short(value['median'])}× ({_short(value['low'])} to {_short(value['high'])})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


HEADERS = ("contender", "tokens/s", "a batch", "turns × batches")


def cells(found: Mapping[str, Any]) -> list[list[str]]:
    """Return a row's contenders under HEADERS."""
    lines = []
    for one in CONTENDERS:
        if (of := found["contenders"].get(one.name)) is None:
            continue
        spread = f"{1e6 * min(of['seconds']):,.0f} to {1e6 * max(of['seconds']):,.0f}"
        batch = f"{1e6 * of['median']:,.0f} µs ({spread})"
        lines.append([one.about, _rate(of["tokens_per_second"]), batch, f"{len(of['seconds'])} × {of['batches']:,}"])
    return lines


def _rate(tokens: float) -> str:
    return f"{tokens / 1e6:,.1f}M" if tokens < 1e8 else f"{tokens / 1e6:,.0f}M"


def figure(results: Mapping[str, Any]) -> str:
    """Return docs/results/bench_data.svg: tokens a second by size, first batches, and resumed runs."""
    panels = [_speed(found) for found in results["rows"] if found["status"] == "measured"]
    if results["first"]:
        bars = [_first_bar(one, results["first"][one.name]["seconds"]) for one in _present(results["first"])]
        panels.append(
            Panel(
                f"To the first batch of {_size(FIRST)}: shorter is better; in memory, all bytes are checked before it",
                bars,
            )
        )
    if at := results["resume"].get("at"):
        bars = [_resume_bar(int(sample), seconds) for sample, seconds in at.items()]
        panels.append(Panel("Lockstep, to the first batch after a resume at sample …: shorter is better", bars))
    below = f"Blue: Lockstep. Grey: others. {results['tokens']:,} tokens in files; all in turns on one core"
    return picture("Batches of tokens: how fast they are made", below, panels)


def _present(names: Mapping[str, Any]) -> Iterator[Contender]:
    return (one for one in CONTENDERS if one.name in names)


def _size(row: str) -> str:
    return "[{}, {:,}]".format(*ROWS[row])


def _speed(found: Mapping[str, Any]) -> Panel:
    tokens = float(np.prod(ROWS[found["row"]]))
    bars = []
    for one in _present(found["contenders"]):
        slow, fast = interval(found["contenders"][one.name]["seconds"])[::-1]
        rate = found["contenders"][one.name]["tokens_per_second"]
        text = f"{_rate(rate)} tokens/s"
        bars.append(Bar(one.about, rate, text, one.ours, low=tokens / slow, high=tokens / fast))
    return Panel(f"Batches of {_size(found['row'])}: longer is better", bars)


def _first_bar(one: Contender, seconds: Sequence[float]) -> Bar:
    median, (low, high) = statistics.median(seconds), interval(seconds)
    return Bar(one.about, median, milliseconds(median), one.ours, low, high)


def _resume_bar(sample: int, seconds: Sequence[float]) -> Bar:
    median, (low, high) = statistics.median(seconds), interval(seconds)
    return Bar(f"{sample:,}", median, milliseconds(median), True, low, high)


def milliseconds(seconds: float) -> str:
    """Return a time in words."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


SHOWS = "Bars: tokens a second of each contender at three sizes, time to the first batch, time to resume"


def page(results: Mapping[str, Any]) -> str:
    """Return docs/results/bench_data.md, without its picture."""
    device, tokens = results["device"], results["tokens"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        "# How fast batches are made",
        "",
        "Made from [bench_data.json](bench_data.json) by `lockstep bench data --page docs/results/bench_data.md`; "
        f"measured by `lockstep bench data`. {device['name']}, {device['cores']} cores, one of which all contenders "
        f"share; {versions}. {tokens:,} made-up tokens of 2 bytes, all in the page cache.",
        "",
        "The contenders' processes are alive side by side and take turns on one core, round by round. A turn is as "
        "many batches as fill a quarter of a second. A ratio is Lockstep's tokens a second over a peer's: the median "
        "over rounds, with its 95 % interval by bootstrap.",
        "",
        "They do not do the same work. Lockstep's batch is a function of the step: every epoch visits every block once "
        "in an order that any run and any number of ranks can compute. It has tokens and targets (int32) and loss "
        "weights (FP32). nanoGPT's `get_batch` and the slices draw starts independently and make no weights; "
        "`get_batch` maps its file anew for each batch and makes int64. A worker of the DataLoader makes int64 rows, "
        "and its batch is copied to the trainer through shared memory; all 8 share the one core.",
        "",
    ]
    for found in results["rows"]:
        lines += [f"## {_size(found['row'])}", ""]
        if found["status"] == "measured":
            lines += [f"| {' | '.join(HEADERS)} |", f"|{'---|' * len(HEADERS)}"]
            lines += [f"| {' | '.join(line)} |" for line in cells(found)]
            lines.append("")
        lines += [*(f"- {line}" for line in answers(found)), ""]
    return "\n".join([*lines, *_where_time_goes(results["rows"]), *_first_words(results), *_resume_words(results)])


def _where_time_goes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    measured = [found for found in rows if found["status"] == "measured" and found["parts"]]
    if not measured:
        return []
    names = list(measured[0]["parts"])
    lines = [
        "## Where the time of a batch goes",
        "",
        "Lockstep, tokens in memory. Order: which windows the step has. Copy: the windows, as they are stored. The "
        "rest: tokens and targets as int32, weights, and the batch's own checks.",
        "",
        f"| size | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for found in measured:
        parts = (f"{1e6 * found['parts'][name]:,.1f} µs" for name in names)
        lines.append(f"| {_size(found['row'])} | {' | '.join(parts)} |")
    return [*lines, ""]


def _first_words(results: Mapping[str, Any]) -> list[str]:
    if not results["first"]:
        return []
    lines = [
        "## To the first batch",
        "",
        f"From opening the data to the first batch of {_size(FIRST)}, in a process that has imported everything and "
        "with warm files. Lockstep in memory reads and checks every byte before a run begins, which takes as long as "
        "there are bytes; mapped, it is shown without that check (`verify=False`), which leaves one of sizes, headers "
        "and the tokenizer. The DataLoader starts its workers.",
        "",
        "| contender | to the first batch | of it opening |",
        "|---|---|---|",
    ]
    for one in _present(results["first"]):
        of = results["first"][one.name]
        seconds, opened = statistics.median(of["seconds"]), statistics.median(of["opened"])
        spread = f"{milliseconds(min(of['seconds']))} to {milliseconds(max(of['seconds']))}"
        lines.append(f"| {one.about} | {milliseconds(seconds)} ({spread}) | {milliseconds(opened)} |")
    return [*lines, ""]


def _resume_words(results: Mapping[str, Any]) -> list[str]:
    resume = results["resume"]
    if "at" not in resume:
        return ["## Resume", "", f"Not measured: {resume['reason']}", ""]
    lines = [
        "## Resume",
        "",
        f"A data set of {resume['samples']:,} samples of 1,024 tokens "
        f"({2 * 1024 * resume['samples'] / 1e12:.2f} TB), which is on paper: its shard is a hole in the file system. "
        f"From opening it, unverified, to the first batch of {_size(FIRST)}, in turns, each time in another order. A "
        "loader without such an order makes and drops all samples before.",
        "",
        "| resumed at sample | to the first batch |",
        "|---|---|",
    ]
    for sample, seconds in resume["at"].items():
        low, high = interval(seconds)
        spread = f"{milliseconds(low)} to {milliseconds(high)}"
        lines.append(f"| {int(sample):,} | {milliseconds(statistics.median(seconds))} ({spread}) |")
    return [*lines, ""]
