"""Study mixtures of data sets and training while data is prepared. Some minutes on two cores.

    python -m lockstep.scripts.studies.mixture           measures; writes docs/results/mixture.json and .md
    python -m lockstep.scripts.studies.mixture --parts windows rows     measures these, and keeps the others' results
    python -m lockstep.scripts.studies.mixture --page    the page alone

Windows: every window of 2**20 samples that begins in the first 70 periods, and in periods of very long runs, counted.
Rows: shares of sources at each row of batches. Resume: seconds from opened files to the first batch. Speed: samples a
second, a mixture of three beside one data set of as many tokens, in turns. Runs: `lockstep train` on one rank and two,
on torch and JAX, and while the data is prepared and afterwards; the digests of their batches are compared.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import platform
import statistics
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from lockstep.core.bench.made_up import write_made_up
from lockstep.core.data import mixture_order, workers
from lockstep.core.data.batches import train_batch
from lockstep.core.data.dataset import TokenDataset
from lockstep.core.data.encode import encode_shard
from lockstep.core.data.index import INDEX_NAME, TOKENIZER_NAME
from lockstep.core.data.mixed import JoinedSplit, MixedSampler
from lockstep.core.data.mixture_order import PERIOD, REGIONS, MixtureOrder
from lockstep.core.data.prepare import PrepareSettings, prepare
from lockstep.core.data.sampler import BlockSampler, Sampler
from lockstep.core.data.split import Split
from lockstep.core.files.atomic import write_atomically
from lockstep.core.files.jsonl import read_lines
from lockstep.core.versions import version_of
from lockstep.scripts import cli
from lockstep.scripts.studies.repository import ROOT

FILE = ROOT / "docs/results/mixture.json"

MIXTURES: dict[str, tuple[str, ...]] = {
    "2: 0.7, 0.3": ("0.7", "0.3"),
    "3: 1/3, 0.123456789, 5": ("1/3", "0.123456789", "5"),
    "5: 3, 5, 7, 11, 13": ("3", "5", "7", "11", "13"),
    "10: 1, 2, 3, 5, 7, 11, 13, 17, 19, 23": ("1", "2", "3", "5", "7", "11", "13", "17", "19", "23"),
    "2: 1, 1/4000": ("1", "1/4000"),
}
NEAR, FAR = 70, (953, 10**4, 10**6, 10**9)
RESUMED_AT = (0, 10**6, 10**9, 10**12)
SIZES = {"16x128": (16, 128), "64x1024": (64, 1024), "512x1024": (512, 1024)}
TURNS = 9
RUN = ["--model.vocab-size", "300", "--model.hidden", "64", "--model.layers", "2", "--model.heads", "4"]
RUN += ["--model.kv-heads", "2", "--model.ffn-hidden", "128", "--train.steps", "12", "--train.batch-size", "8"]
RUN += ["--train.micro-batch-size", "2", "--train.sequence-length", "32", "--optim.warmup-steps", "3"]
RUN += ["--compile.enabled", "false", "--device", "cpu", "--eval.every", "0", "--log.fp32-loss-every", "0"]


def windows(weights: tuple[str, ...]) -> dict[str, Any]:
    """Count every window; return the largest distances from share · 2**20, and from share · samples in the long run."""
    order = MixtureOrder(tuple(map(Fraction, weights)), 0)
    worst, given, long_run = Fraction(0), 0, Fraction(0)
    last: tuple[int, np.ndarray] = (-1, np.empty(0))
    periods = [*range(NEAR), *FAR]
    for period in periods:
        here = last[1] if last[0] == period else order.places(period * PERIOD, PERIOD)[0]
        there = order.places((period + 1) * PERIOD, PERIOD)[0]
        last = (period + 1, there)
        given += len(order.given(period))
        for source, share in enumerate(order.shares):
            changes = (there == source).astype(np.int8) - (here == source).astype(np.int8)
            counts = int((here == source).sum()) + np.cumsum(changes, dtype=np.int64)
            worst = max(worst, *(abs(int(c) - share * PERIOD) for c in (counts.min(), counts.max())))
        before = order.before(period)
        apart = (abs(n - share * period * PERIOD) for n, share in zip(before, order.shares, strict=True))
        long_run = max(long_run, *apart)
    return {"windows": len(periods) * PERIOD, "worst": float(worst), "given": given, "long_run": float(long_run)}


def planted(weights: tuple[str, ...]) -> float:
    """Return the worst window where regions run backwards, the fault of a slot that comes back too late."""
    honest = mixture_order._Pattern.slot_in_region

    def backwards(pattern: Any, source: int, region: int) -> int:
        return honest(pattern, source, REGIONS - 1 - region)

    mixture_order._Pattern.slot_in_region = backwards  # type: ignore[method-assign, assignment]
    mixture_order._given_in.cache_clear()
    try:
        return float(windows(weights)["worst"])
    finally:
        mixture_order._Pattern.slot_in_region = honest  # type: ignore[method-assign]
        mixture_order._given_in.cache_clear()


def rows() -> dict[str, Any]:
    """Return the least and the greatest share of each source at a row of batches of 512, and in one batch."""
    order = MixtureOrder(tuple(map(Fraction, ("0.5", "0.25", "0.125", "0.125"))), 0)
    sources = order.places(0, 2000 * 512)[0].reshape(2000, 512)
    found = {}
    for source, share in enumerate(order.shares):
        of = sources == source
        row, batch = of.mean(axis=0), of.sum(axis=1)
        found[f"{source + 1}: {float(share)}"] = [
            *(float(value) for value in (row.min(), row.max())),
            *(int(value) for value in (batch.min(), batch.max())),
        ]
    return found


def _mixture_of(folders: list[Path], length: int, seed: int = 0) -> tuple[Split, Sampler]:
    splits = [TokenDataset.open(folder, verify=False, memory_limit_bytes=1 << 40).split("train") for folder in folders]
    if len(splits) == 1:
        return splits[0], BlockSampler(seed, splits[0].num_tokens, length)
    samplers = tuple(BlockSampler(seed, split.num_tokens, length) for split in splits)
    weights = (Fraction("0.5"), Fraction("0.31"), Fraction("0.19"))
    return JoinedSplit(splits), MixedSampler(MixtureOrder(weights, seed), samplers)


def resume(folders: list[Path]) -> dict[str, Any]:
    """Return seconds from opened files to the first batch of 64 x 1024, by the sample that a run goes on at."""
    found: dict[str, list[float]] = {str(sample): [] for sample in RESUMED_AT}
    for turn in range(TURNS):
        for sample in RESUMED_AT:
            split, sampler = _mixture_of(folders, 1024, seed=1 + turn * len(RESUMED_AT) + RESUMED_AT.index(sample))
            began = time.perf_counter()
            train_batch(split, sampler, sample * 1024, 64, 1024)
            found[str(sample)].append(time.perf_counter() - began)
    return {sample: [statistics.median(of), min(of), max(of)] for sample, of in found.items()}


def speed(single: Path, folders: list[Path]) -> dict[str, Any]:
    """Return samples a second of one data set and of a mixture of three, in turns on one core."""
    found: dict[str, Any] = {}
    for size, (batch, length) in SIZES.items():
        sides = {"one data set": _mixture_of([single], length), "mixture of three": _mixture_of(folders, length)}
        rates: dict[str, list[float]] = {name: [] for name in sides}
        batches = max(20, 60_000 // (batch * length // 128))
        for turn in range(1 + TURNS):
            for name, (split, sampler) in sides.items():
                began = time.perf_counter()
                for step in range(batches):
                    train_batch(split, sampler, (turn * batches + step) * batch * length, batch, length)
                if turn:
                    rates[name].append(batches * batch / (time.perf_counter() - began))
        found[size] = {name: [statistics.median(of), min(of), max(of)] for name, of in rates.items()}
    return found


def _slow_preparation(settings: PrepareSettings, seconds: float) -> None:
    write = encode_shard

    def slow(task: Any) -> Any:
        time.sleep(seconds)
        return write(task)

    workers.encode_shard = slow  # type: ignore[attr-defined]
    prepare(settings)


def runs(place: Path) -> dict[str, Any]:
    """Train on mixtures and on data that is being prepared; return whether the batches' digests are equal."""
    texts = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    for name, part in {"code": texts[:60], "web": texts[60:100], "math": texts[100:120]}.items():
        (place / "text" / name).mkdir(parents=True)
        for file in part:
            text = file.read_bytes()[:8000].decode(errors="ignore")
            (place / "text" / name / f"{file.stem}.txt").write_text(text)
    first = place / "code"
    prepare(PrepareSettings(first, str(place / "text/code"), vocab_size=300, val_fraction=0.2))
    for name in ("web", "math"):
        prepare(
            PrepareSettings(
                place / name, str(place / "text" / name), tokenizer=first / TOKENIZER_NAME, val_fraction=0.2
            )
        )
    mixture = ["--data.mixture", f"{first}: 0.5, {place / 'web'}: 0.31, {place / 'math'}: 0.19"]
    one = _train(place, "one_rank", mixture)
    found: dict[str, Any] = {"steps": len(one)}
    for name, more in {
        "two_ranks": ["--train.ranks", "2"],
        "other_micro_batch": ["--train.micro-batch-size", "4"],
        "jax": ["--backend", "jax"],
    }.items():
        found[name] = _same(one, _train(place, name, [*mixture, *more]))
    found["another seed"] = _same(one, _train(place, "other", [*mixture, "--data.seed", "1"]))
    growing = place / "growing"
    settings = PrepareSettings(growing, str(place / "text/code"), vocab_size=300, val_fraction=0.2, shard_tokens=1500)
    preparing = multiprocessing.get_context("spawn").Process(target=_slow_preparation, args=(settings, 0.5))
    preparing.start()
    while not (growing / ".lock").exists():
        time.sleep(0.05)
    windows_of = ["--data.path", str(growing), "--data.window-shards", "2", "--train.steps", "60"]
    during = _train(place, "during", [*windows_of, "--data.wait-minutes", "5"])
    found["prepared when that run had ended"] = (growing / INDEX_NAME).exists()
    preparing.join()
    found["while prepared"] = _same(during, _train(place, "afterwards", windows_of))
    found["steps while prepared"] = len(during)
    return found


def _train(place: Path, name: str, words: list[str]) -> list[dict[str, Any]]:
    file = place / "run.toml"
    file.write_text("")
    with contextlib.redirect_stdout(io.StringIO()):
        code = cli.run(["train", str(file), *RUN, "--name", name, "--out", str(place / "runs"), *words])
    if code:
        raise SystemExit(f"{name} ended with {code}")
    return read_lines(place / "runs" / name / "records.jsonl")


def _same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return [record["digest"] for record in one] == [record["digest"] for record in other]


def _made_up(place: Path) -> tuple[Path, list[Path]]:
    """Return one data set of 48M made-up tokens, and three of 16M; they are written once."""
    single, several = place / "single", [place / f"part{number}" for number in range(3)]
    for folder in (single, *several):
        if not folder.exists():
            folder.mkdir()
            write_made_up(folder, (48 if folder is single else 16) * (1 << 20))
    return single, several


PARTS = ("windows", "rows", "resume", "speed", "runs")


def measure(parts: tuple[str, ...]) -> dict[str, Any]:
    """Measure these parts, each with the load of the machine at its start."""
    results: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"python": platform.python_version(), **{n: version_of(n) for n in ("numpy", "torch", "jax")}},
        "load": {},
    }
    with tempfile.TemporaryDirectory(prefix="lockstep-") as place:
        for part in parts:
            results["load"][part] = round(os.getloadavg()[0])
            if part == "windows":
                results[part] = {name: windows(weights) for name, weights in MIXTURES.items()}
                results["planted"] = planted(MIXTURES["3: 1/3, 0.123456789, 5"])
            elif part == "rows":
                results[part] = rows()
            elif part == "runs":
                results[part] = runs(Path(place))
            else:
                single, several = _made_up(Path(place))
                results[part] = resume(several) if part == "resume" else speed(single, several)
    return results


def page(results: dict[str, Any]) -> str:
    """Return the results as Markdown, without the parts that were not measured."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    load = ", ".join(f"{part} {value}" for part, value in results["load"].items())
    lines = [
        "# Mixtures of data sets",
        "",
        "Made from [mixture.json](mixture.json) by `python -m lockstep.scripts.studies.mixture`. "
        "How to use mixtures: [the guide](../guide/data_mixtures.md).",
        f"Measured on {results['machine']}: {versions}.",
        f"Other work ran beside; the machine's load at the start of each part: {load}.",
        "",
    ]
    sections = {"windows": _windows_page, "rows": _rows_page, "resume": _resume_page, "speed": _speed_page}
    for part, section in {**sections, "runs": _runs_page}.items():
        if part in results:
            lines += [*section(results), ""]
    return "\n".join(lines)


def _windows_page(results: dict[str, Any]) -> list[str]:
    return [
        "## Windows of 2²⁰ samples",
        "",
        f"Every window that begins in the first {NEAR} periods of 2²⁰ samples, or in one of {len(FAR)} periods of runs "
        "of 10⁹ to 10¹⁵ samples, counted.",
        "**Worst**: the largest |samples − share · 2²⁰| of any source; the bound is 1, proven in "
        "core/data/mixture_order.py. **Long run**: the largest",
        "|samples − share · all samples| at the beginning of a period; the bound is 1 + ⌈log₂ k⌉ / 2.",
        "",
        "| sources: weights | windows | worst | slots that changed hands | long run |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {of['windows']:,} | {of['worst']:.4f} | {of['given']} | {of['long_run']:.3f} |"
            for name, of in results["windows"].items()
        ),
        "",
        "Planted fault: regions that run backwards, so that a slot comes back too late. Worst, of three sources: "
        f"{results['planted']:.4f}.",
    ]


def _rows_page(results: dict[str, Any]) -> list[str]:
    return [
        "## Rows of a batch",
        "",
        "2,000 batches of 512. A source that stayed at its rows would have shares of 0 and 1.",
        "",
        "| source: share | least share at a row | greatest | fewest in a batch | most |",
        "|---|---|---|---|---|",
        *(f"| {name} | {of[0]:.3f} | {of[1]:.3f} | {of[2]} | {of[3]} |" for name, of in results["rows"].items()),
    ]


def _resume_page(results: dict[str, Any]) -> list[str]:
    return [
        "## Resume",
        "",
        "Milliseconds from opened files to the first batch of 64 × 1,024 of a mixture of three, by the sample at which "
        f"the run goes on: median of {TURNS}, least",
        "and most. Making the table of a period's slots is a part of it, and the same for all.",
        "",
        "| sample | median | least | most |",
        "|---|---|---|---|",
        *(
            f"| {int(sample):,} | {1e3 * of[0]:.0f} | {1e3 * of[1]:.0f} | {1e3 * of[2]:.0f} |"
            for sample, of in results["resume"].items()
        ),
    ]


def _speed_page(results: dict[str, Any]) -> list[str]:
    return [
        "## Speed",
        "",
        f"Samples a second that one thread makes from tokens in memory, in turns: median of {TURNS}, least and most. "
        "48M tokens in one data set, and in three.",
        "",
        "| sequences × tokens | one data set | mixture of three | mixture / one |",
        "|---|---|---|---|",
        *(_speed_row(size, of) for size, of in results["speed"].items()),
    ]


def _runs_page(results: dict[str, Any]) -> list[str]:
    found = results["runs"]
    which = "the batches" if found["while prepared"] else "OTHER batches than those"
    ended = "" if found["prepared when that run had ended"] else "not "
    return [
        "## Runs",
        "",
        f"`lockstep train` of a two-block model on a mixture of three, {found['steps']} steps: are the digests of its "
        "batches those of the run on one rank of torch?",
        "",
        "| run | the same batches |",
        "|---|---|",
        *(f"| {name.replace('_', ' ')} | {'yes' if found[name] else 'no'} |" for name in _COMPARED),
        "",
        f"While its data was prepared, a shard each half second, a run of {found['steps while prepared']} steps with "
        "`--data.window-shards 2 --data.wait-minutes 5`",
        f"made {which} of the run that began afterwards. The preparation had {ended}ended when the first run had.",
    ]


_COMPARED = ("two_ranks", "other_micro_batch", "jax", "another seed")


def _speed_row(size: str, of: dict[str, list[float]]) -> str:
    cells = [f"{rate[0]:,.0f} ({rate[1]:,.0f} … {rate[2]:,.0f})" for rate in of.values()]
    one, several = (rate[0] for rate in of.values())
    return f"| {size} | {cells[0]} | {cells[1]} | {several / one:.2f} |"


@dataclass
class Options:
    """Measure mixtures, or write the page of what was measured."""

    parts: tuple[str, ...] = PARTS
    """of windows, rows, resume, speed and runs"""
    page: bool = False
    """measure nothing: write docs/results/mixture.md from mixture.json"""


def main() -> None:
    """Measure, and write the page."""
    options = tyro.cli(Options)
    if not options.page:
        before = json.loads(FILE.read_text()) if FILE.exists() else {}
        now = measure(options.parts)
        now["load"] = before.get("load", {}) | now["load"]
        write_atomically(FILE, [(json.dumps(before | now, indent=1) + "\n").encode()])
    FILE.with_suffix(".md").write_text(page(json.loads(FILE.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
