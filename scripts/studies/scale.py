"""Measure the cost of a check against the model's size: memory and time by layers, width, vocabulary and tokens.

Resumable.

    python -m lockstep.scripts.studies.scale                    run the missing rows, then write docs/results/scale.md
    python -m lockstep.scripts.studies.scale --page             only write the page and its plot
    python -m lockstep.scripts.studies.scale --beside           the 64.5M model checked while it trains
    python -m lockstep.scripts.studies.scale --before ../older  also the 64.5M model by another checkout
    python -m lockstep.scripts.studies.scale --llama            the 1.24B model alone, honest and with planted faults
    python -m lockstep.scripts.studies.scale --ranks            the 64.5M model over ranks, DDP and FSDP

The plot needs matplotlib (`pip install "lockstep[studies]"`).

Each row is two processes: `lockstep train` for two steps, whose peak is plain training's, and `lockstep parity --steps
1`. Peaks are of the proportional set size (PSS) of the whole process tree, mapped files included. It is sampled each
half second, or so often that sampling takes a tenth of a core. Rows are lines of docs/results/scale.jsonl.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from lockstep.core.config.schema import RunConfig
from lockstep.core.files.jsonl import JsonLines, read_lines
from lockstep.core.model.budget import parameter_count
from lockstep.core.plan.checks import TAPS, cost_of_check
from lockstep.scripts.studies.peaks import lockstep
from lockstep.scripts.studies.repository import ROOT

RESULTS, PAGE, PLOT = (ROOT / f"docs/results/scale.{ending}" for ending in ("jsonl", "md", "png"))
AXES = ("layers", "hidden", "vocabulary", "tokens")


@dataclass(frozen=True)
class Size:
    """A Llama with heads of 64 numbers, a third of them key-value heads; two micro-batches of [1, tokens] a step."""

    layers: int = 4
    hidden: int = 384
    vocabulary: int = 8192
    tokens: int = 256

    @property
    def settings(self) -> dict[str, str]:
        """The settings of `lockstep` for this size."""
        heads = self.hidden // 64
        return {
            "model.layers": str(self.layers),
            "model.hidden": str(self.hidden),
            "model.heads": str(heads),
            "model.kv_heads": str(max(1, heads // 3)),
            "model.ffn_hidden": str(self.hidden * 8 // 3),
            "train.sequence_length": str(self.tokens),
        }


BASE = Size()
# The model of 64.5M parameters of the first figures.
LARGE = Size(layers=6, hidden=768, vocabulary=16384)
SWEEPS = {
    "layers": [Size(layers=n) for n in (4, 8, 16, 32)],
    "hidden": [Size(hidden=n) for n in (192, 384, 768, 1152)],
    "vocabulary": [Size(vocabulary=n) for n in (4096, 8192, 16384, 32768)],
    "tokens": [Size(tokens=n) for n in (128, 256, 512, 1024)],
}
RUN_FILE = """
name = "scale"
[model]
vocab_size = {vocabulary}
[data]
path = "{folder}/data_{vocabulary}"
source = "{source}"
[train]
steps = 100
batch_size = 2
micro_batch_size = 1
[optim]
warmup_steps = 1
[compile]
enabled = false
"""


# Four micro-batches a step on any number of ranks; under FSDP no rank sums whole gradients.
OVER_RANKS = {
    f"64.5M, {words}": {"train.batch_size": "4", "train.ranks": str(ranks), "parallel.strategy": strategy, **more}
    for words, ranks, strategy, more in (
        ("1 rank", 1, "ddp", {}),
        ("DDP over 2 ranks", 2, "ddp", {}),
        ("DDP over 4 ranks", 4, "ddp", {}),
        ("FSDP over 2 ranks", 2, "fsdp", {"parallel.reduce_every_micro_batch": "true"}),
        ("FSDP over 4 ranks", 4, "fsdp", {"parallel.reduce_every_micro_batch": "true"}),
    )
}


BESIDE = "64.5M, checked while it trains"


@dataclass(frozen=True)
class Scale:
    """Choose the rows to measure."""

    page: bool = False
    """only write the page from the finished rows"""
    llama: bool = False
    """check configs/llama-1b.toml: 24 GB of memory, 60 GB of disk, and 50 minutes for each of three checks"""
    ranks: bool = False
    """the 64.5M model over 1, 2 and 4 ranks of this machine"""
    beside: bool = False
    """train the 64.5M model for 6 steps, 4 of them checked by the worker beside it"""
    before: Path | None = None
    """another checkout that checks the 64.5M model too"""
    source: Path = Path(os.__file__).parent
    """folder of the training text"""


def main() -> None:
    """Measure the rows that are missing, then write the page."""
    options = tyro.cli(Scale)
    if not options.page:
        seen = [row["what"] for row in read_lines(RESULTS)]
        with tempfile.TemporaryDirectory() as folder, closing(JsonLines(RESULTS)) as rows:
            for what in LLAMA_CANDIDATES if options.llama else ():
                if what not in seen:
                    rows.append(checked_llama(what, Path(folder), options.source))
            for what, over in OVER_RANKS.items() if options.ranks else ():
                if what not in seen:
                    rows.append(measured(what, LARGE, ROOT, Path(folder), options.source, over))
            if options.beside and BESIDE not in seen:
                rows.append(checked_beside(Path(folder), options.source))
            alone = options.llama or options.ranks or options.beside
            for what, size, root in () if alone else wanted(options):
                if what not in seen:
                    seen.append(what)
                    rows.append(measured(what, size, root, Path(folder), options.source))
    found = {row["what"]: row for row in read_lines(RESULTS)}
    PAGE.write_text(page(found))
    plot(found)


# The 1.24B model: honest, and with a fault in one block.
ONE_BLOCK = ROOT / "parity_tests/faults/one_block.py"
LLAMA_CANDIDATES = {
    "1.24B, honest": "torch",
    "1.24B, RoPE in bf16 in block 11": f"{ONE_BLOCK}:RopeInBf16InBlock11",
    "1.24B, SwiGLU's backward in bf16 in block 3": f"{ONE_BLOCK}:SwiGLUBackwardInBlock3",
}
LLAMA = {
    "optim.name": "adamw8bit",
    "train.batch-size": "2",
    "train.micro-batch-size": "1",
    "train.sequence-length": "256",
    "train.curriculum": "",
    # In eager mode torchao's update of 8-bit moments takes two minutes of a step's two and a half.
    "compile.enabled": "true",
    "compile.scope": "blocks",
}


def checked_llama(what: str, folder: Path, source: Path) -> dict[str, Any]:
    """Make one row: a check of configs/llama-1b.toml with one candidate, its verdict and its origin."""
    config, verdict = str(ROOT / "configs/llama-1b.toml"), folder / "verdict.json"
    data = ["--data.path", str(folder / "data_llama"), "--data.source", str(source)]
    if not (folder / "data_llama").exists():
        lockstep(ROOT, folder, "data", "prepare", config, *data)
    settings = [word for key, value in LLAMA.items() for word in (f"--{key}", value)]
    words = [config, *data, *settings, "--steps", "1", "--quick", "--json", str(verdict)]
    words += ["--candidate", LLAMA_CANDIDATES[what]]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        cost = lockstep(ROOT, Path(place), "parity", *words, ends=(0, 1))
    found = json.loads(verdict.read_text())
    row = {"what": what, "parity": cost, "verdict": found["verdict"], "origin": found["origin"]}
    print(f"{what}: {row}", file=sys.stderr, flush=True)
    return {**row, "cores": os.cpu_count(), **of_this_machine()}


def checked_beside(folder: Path, source: Path) -> dict[str, Any]:
    """Make one row: training with checks, and training alone.

    The memory of trainer and worker is measured separately.
    """
    words = prepared(folder, LARGE, ROOT, source, {"train.steps": "6", "parity.queue": "4"})
    with tempfile.TemporaryDirectory(dir=folder) as place:
        alone = lockstep(ROOT, Path(place), "train", *words, "--out", str(folder / "alone"))
        checked = lockstep(ROOT, Path(place), "train", *words, "--out", str(folder / "checked"), "--parity.every", "2")
    verdicts = [line["verdict"] for line in read_lines(folder / "checked/scale/parity.jsonl")]
    row = {"what": BESIDE, "alone": alone, "checked": checked, "verdicts": verdicts}
    print(f"{BESIDE}: {row}", file=sys.stderr, flush=True)
    return {**row, "cores": os.cpu_count(), **of_this_machine()}


def of_this_machine() -> dict[str, Any]:
    """Return machine and versions, for a row."""
    versions = {name: version(name) for name in ("torch", "jax", "numpy")}
    return {"machine": platform.machine(), "versions": {**versions, "python": platform.python_version()}}


def wanted(options: Scale) -> Iterator[tuple[str, Size, Path]]:
    """Return name, size and checkout of each row, in the order of the runs."""
    yield "64.5M", LARGE, ROOT
    if options.before:
        yield "64.5M, before", LARGE, options.before.resolve()
    for axis in AXES:
        for size in SWEEPS[axis]:
            yield named(size), size, ROOT


def named(size: Size) -> str:
    """Name a row by its differences from BASE."""
    others = {axis: value for axis, value in asdict(size).items() if value != getattr(BASE, axis)}
    return ", ".join(f"{axis} {value:,}" for axis, value in others.items()) or "base"


def measured(
    what: str, size: Size, root: Path, folder: Path, source: Path, over: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Make one row: plain training, then a check, each in a process of its own. over: settings of ranks."""
    words = prepared(folder, size, root, source, over or {})
    with tempfile.TemporaryDirectory(dir=folder) as place:
        trained = lockstep(root, Path(place), "train", *words, "--train.steps", "2")
        checked = lockstep(root, Path(place), "parity", *words, "--steps", "1")
    row = {"what": what, **asdict(size), "train": trained, "parity": checked, "cores": os.cpu_count()}
    print(f"{what}: {row}", file=sys.stderr, flush=True)
    return {**row, **of_this_machine()}


def prepared(folder: Path, size: Size, root: Path, source: Path, more: Mapping[str, str]) -> list[str]:
    """Return the words of a command for a model of this size, after preparing its data. more: settings."""
    file = folder / f"{size.vocabulary}.toml"
    file.write_text(RUN_FILE.format(folder=folder, vocabulary=size.vocabulary, source=source))
    lockstep(root, folder, "data", "prepare", str(file))
    return [str(file), *(word for key, value in {**size.settings, **more}.items() for word in (f"--{key}", value))]


def exponent(sizes: list[float], values: list[float]) -> float:
    """Return the slope of log value against log size, by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def above(row: Mapping[str, Any]) -> float:
    """Return a check's peak above plain training's, in bytes; it may be negative."""
    return float(row["parity"]["peak"] - row["train"]["peak"])


def along(axis: str, rows: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the measured rows of an axis, the smallest first."""
    return [rows[named(size)] for size in SWEEPS[axis] if named(size) in rows]


def plot(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw docs/results/scale.png: peaks and seconds along each axis, both scales logarithmic."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(12, 5.5), layout="constrained")
    panels = figure.subplots(2, len(AXES), sharey="row", squeeze=False)
    for column, axis in enumerate(AXES):
        of_axis = along(axis, rows)
        sizes = [row[axis] for row in of_axis]
        memory, time_taken = panels[0][column], panels[1][column]
        for command, label in (("parity", "lockstep parity --steps 1"), ("train", "lockstep train, 2 steps")):
            memory.loglog(sizes, [row[command]["peak"] / 1e9 for row in of_axis], marker="o", label=label)
            time_taken.loglog(sizes, [row[command]["seconds"] for row in of_axis], marker="o", label=label)
        for panel in (memory, time_taken):
            panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter("{x:g}")
            panel.minorticks_off()
            panel.grid(alpha=0.3)
        time_taken.set_xlabel(axis)
    panels[0][0].set_ylabel("peak, GB")
    panels[1][0].set_ylabel("seconds")
    panels[0][0].legend()
    figure.savefig(PLOT, dpi=100)


# The rows are of one day. A check does more now; the checkout for comparison is measured with it.
SINCE = (
    "*Before* is the checkout ea75eb4, the last one whose reference was whole models and whose evidence lay in "
    "memory. The rows are of before a check judged the step itself, with its own weights, repeated it, evaluated,"
    " sampled and made what follows it: 1,149 comparisons of the 64.5M model now, 891 before. On two cores of an "
    "AMD EPYC (2026-11-26), caches warm, in turns: before 62 and 69 s and 14.9 GB, now 61 and 62 s and 3.2 GB "
    "(`lockstep parity` alone, largest resident set); some hours earlier before 93 and 79 s, the parent of now 65"
    " s. So a check takes a fifth of the memory, and no half of the time.",
)


def page(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return docs/results/scale.md."""
    others = {*LLAMA_CANDIDATES, *OVER_RANKS, BESIDE}
    rows = {what: row for what, row in found.items() if what not in others}
    first = next(iter(rows.values()))
    versions = ", ".join(f"{name} {of}" for name, of in first["versions"].items())
    lines = [
        "# The cost of a check as the model grows",
        "",
        "Made by `python -m lockstep.scripts.studies.scale` (resumable; rows in [scale.jsonl](scale.jsonl)); "
        f"{first['cores']} cores, {first['machine']}, {versions}. Every row is `lockstep train --train.steps 2` and "
        "`lockstep parity --steps 1`, eager, bf16, AdamW, two micro-batches of one sequence, one run each. Peaks are "
        "those of PSS over the whole tree of processes.",
        "",
        *SINCE,
        "",
        "| model | layers | hidden | vocabulary | tokens | training, GB | check, GB | above training, GB | check, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for what, row in rows.items():
        sizes = " | ".join(f"{row[axis]:,}" for axis in AXES)
        peaks = f"{row['train']['peak'] / 1e9:.2f} | {row['parity']['peak'] / 1e9:.2f} | {above(row) / 1e9:+.2f}"
        lines.append(f"| {what} | {sizes} | {peaks} | {row['parity']['seconds']:.0f} |")
    lines += ["", "Fitted exponents (log against log, least squares), the peak of a check and its seconds:", ""]
    lines += ["| along | peak of the check | peak of training | seconds |", "|---|---|---|---|"]
    for axis in AXES:
        of_axis = along(axis, rows)
        if len(of_axis) > 2:
            sizes_along = [float(row[axis]) for row in of_axis]
            fits = [
                exponent(sizes_along, [row[command][key] for row in of_axis])
                for command, key in (("parity", "peak"), ("train", "peak"), ("parity", "seconds"))
            ]
            lines.append(f"| {axis} | " + " | ".join(f"{fit:.2f}" for fit in fits) + " |")
    lines += ["", "![peaks and seconds along each axis](scale.png)", ""]
    return "\n".join([*lines, *of_llama(found), *of_training(found), *of_ranks(found), *on_paper(), ""])


def of_llama(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of the checks of the 1.24B model that were made."""
    made = [rows[what] for what in LLAMA_CANDIDATES if what in rows]
    if not made:
        return []
    settings = " ".join(f"--{key} {value or chr(34) * 2}" for key, value in LLAMA.items())
    lines = [
        "## The 1.24B model on two cores and 24 GB",
        "",
        f"`lockstep parity configs/llama-1b.toml {settings} --steps 1 --quick`, with `--candidate` for the planted "
        "faults (`--llama` of the study). Peaks of PSS as above.",
        "",
        "| candidate | verdict | origin | peak, GB | seconds |",
        "|---|---|---|---|---|",
    ]
    for row in made:
        origin = row["origin"]
        named = f"`{origin['stage']} {origin['phase']} {origin['layer']}`" if origin else ""
        cost = f"{row['parity']['peak'] / 1e9:.2f} | {row['parity']['seconds']:,.0f}"
        lines.append(f"| {row['what']} | {row['verdict']} | {named} | {cost} |")
    return [*lines, "", *sorted({row["note"] for row in made if "note" in row}), ""]


def of_training(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of the checks beside training, if they were made."""
    if (row := rows.get(BESIDE)) is None:
        return []
    alone, checked, verdicts = row["alone"], row["checked"], row["verdicts"]
    trainer, both = checked["own"], checked["peak"]
    return [
        "## While it trains",
        "",
        "`lockstep train` of the 64.5M model, 6 steps, with `--parity.every 2` (`--beside` of the study): "
        f"{len(verdicts)} checks came back, {verdicts.count('agreed')} agreed. The trainer's peak is "
        f"{trainer / 1e9:.2f} GB, {alone['own'] / 1e9:.2f} GB without checks; trainer and worker together take "
        f"{both / 1e9:.2f} GB at most.",
        "",
    ]


def of_ranks(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of the checks over ranks that were made."""
    made = [rows[what] for what in OVER_RANKS if what in rows]
    if not made:
        return []
    lines = [
        "## Over ranks",
        "",
        "The 64.5M model, four micro-batches of one sequence a step, gloo on the CPU (`--ranks` of the study): "
        "`lockstep parity --steps 1`, of each rank the peak of PSS, rank 0 judging; and of plain training. Under FSDP "
        "with `parallel.reduce_every_micro_batch`.",
        "",
        "| ranks | training, GB a rank | check, rank 0, GB | check, other ranks, GB | check, all ranks, GB | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for row in made:
        train, check = row["train"].get("ranks", [row["train"]["peak"]]), row["parity"].get("ranks", [])
        others = ", ".join(f"{size / 1e9:.2f}" for size in check[1:])
        first = (check or [row["parity"]["peak"]])[0]
        lines.append(
            f"| {row['what'].removeprefix('64.5M, ')} | {max(train) / 1e9:.2f} | {first / 1e9:.2f} | {others} | "
            f"{row['parity']['peak'] / 1e9:.2f} | {row['parity']['seconds']:.0f} |"
        )
    return [*lines, ""]


# Llama 3 (Grattafiori et al. 2024, table 3), untied.
PUBLISHED = {
    "8B": {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336},
    "70B": {"hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn_hidden": 28672},
}
RANKS = (8, 64, 1024)
ASSUMED_FLOPS = 1e12


def on_paper() -> list[str]:
    """Return the lines of the estimate for models that were not run, from core/plan/checks.py."""
    lines = [
        "## 8B and 70B under FSDP, on paper",
        "",
        "Nothing here was run. One check during training, two sequences of 4,096 tokens looked at, AdamW, bf16, by the "
        "formulas of `lockstep plan` (core/plan/checks.py), which the table above holds on a small scale.",
        "",
        "| model | evidence, GB | of it taps, GB | judge's memory, GB | judging, hours | "
        + " | ".join(f"a rank's share on {ranks:,}, GB" for ranks in RANKS)
        + " |",
        "|---|---|---|---|---|" + "---|" * len(RANKS),
    ]
    for name, shape in PUBLISHED.items():
        config = RunConfig.model_validate(
            {
                "model": {**shape, "vocab_size": 128256, "tied": False},
                "train": {"batch_size": 2, "micro_batch_size": 2, "sequence_length": 4096},
            }
        )
        cost = cost_of_check(config, thorough=False)
        weights = 4 * parameter_count(config.model)
        taps = cost.evidence[TAPS] - weights
        hours = cost.teraflops * 1e12 / ASSUMED_FLOPS / 3600
        shares = " | ".join(f"{(cost.kept - taps) / ranks / 1e9:,.1f}" for ranks in RANKS)
        sizes = " | ".join(f"{size / 1e9:,.0f}" for size in (cost.kept, taps, cost.judging))
        lines.append(f"| {name} | {sizes} | {hours:,.1f} | {shares} |")
    return [
        *lines,
        "",
        "Assumed: an FP64 and FP32 rate of 10¹² FLOP/s for the reference (a server's CPU; on a GPU not measured); each "
        "rank writes its own parts of weights, moments and gradients, as it does today; rank 0 judges alone, and its "
        "hours do not fall with ranks. Taps are those of one micro-batch, and rank 0 writes them.",
    ]


if __name__ == "__main__":
    main()
