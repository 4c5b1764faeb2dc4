"""A pairwise design of runs over all levers, each through `lockstep parity`. Writes parity_matrix.md.

    python -m lockstep.scripts.studies.parity_matrix            the missing cells, then the page
    python -m lockstep.scripts.studies.parity_matrix --page     the page alone

In the design every pair of values of two levers meets in some run. It is found greedily (Cohen et al. 1997, The AETG
system). Published bugs are interactions of two levers, and all combinations would take days.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import tyro

from lockstep.core.components.precision import POLICIES
from lockstep.scripts.studies.repository import ROOT

ROWS, PAGE = ROOT / ".cache/parity_matrix.json", ROOT / "docs/results/parity_matrix.md"
CONFIG, STEPS = "configs/quickstart.toml", 2

LEVERS: dict[str, tuple[str, ...]] = {
    "program": ("eager", "compiled"),
    "precision": ("fp32", "bf16", "fp16", "fp8_tensorwise", "fp8_rowwise", "fp8_delayed"),
    "casts": ("lockstep", "autocast", "residual"),
    "head": ("full", "chunked", "torch"),
    "recomputed": ("none", "mlp", "block"),
    "micro-batches": ("1", "4"),
    "ranks": ("1", "2, DDP", "2, FSDP"),
    "optimizer": ("adamw", "adamw8bit", "muon"),
}
# The plan of the third value of `casts`, in the format of the operands.
RESIDUAL = "residual={0}, norm={0}, rope=after rotation, act=after product"
# A model of two blocks in which every lever has an effect: several chunks, and 8-bit blocks of 256 numbers on each of
# two ranks too.
SMALL = {
    "model.layers": "2",
    "model.hidden": "128",
    "model.heads": "4",
    "model.kv_heads": "2",
    "model.ffn_hidden": "256",
    "train.sequence_length": "64",
    "train.batch_size": "16",
    "loss.chunk": "100",
    "device": "cpu",
}

Cell = tuple[str, ...]


def pairs(cell: Sequence[str]) -> set[tuple[int, str, int, str]]:
    """Return the pairs of values that meet in a cell, each with the positions of its levers."""
    return {(i, cell[i], j, cell[j]) for i, j in itertools.combinations(range(len(cell)), 2)}


def design(levers: Mapping[str, Sequence[str]]) -> list[Cell]:
    """Choose cells until every pair of values of two levers meets; each time take the cell with the most new pairs."""
    every = [cell for cell in itertools.product(*levers.values()) if is_allowed(cell, tuple(levers))]
    missing = set().union(*map(pairs, every))
    found: list[Cell] = []
    while missing:
        best = max(every, key=lambda cell: len(pairs(cell) & missing))
        found.append(best)
        missing -= pairs(best)
    for cell in list(found):  # later cells may cover all pairs of an early one
        others = [other for other in found if other != cell]
        if pairs(cell) <= set().union(*map(pairs, others)):
            found = others
    return found


def is_allowed(cell: Cell, levers: Sequence[str]) -> bool:
    """Return whether a configuration may combine these values.

    FP32 has no narrower format to round to, and a library's head has casts of its own.
    """
    of = dict(zip(levers, cell, strict=True))
    casts = of.get("casts", "lockstep")
    return casts == "lockstep" or (of["precision"] != "fp32" and not (casts == "autocast" and of["head"] == "torch"))


def settings(cell: Cell) -> dict[str, str]:
    """Return the settings of a cell, as on the command line."""
    of = dict(zip(LEVERS, cell, strict=True))
    ranks, _, strategy = of["ranks"].partition(", ")
    size = int(SMALL["train.batch_size"]) // int(of["micro-batches"]) // int(ranks)
    of_ranks = {"train.ranks": ranks} | ({"parallel.strategy": strategy.lower()} if strategy else {})
    # Weights that are gathered block by block are compiled block by block.
    scope = {"compile.scope": "blocks" if strategy == "FSDP" else "model"}
    return (
        SMALL
        | of_ranks
        | scope
        | {
            "compile.enabled": str(of["program"] == "compiled").lower(),
            "precision.policy": of["precision"],
            "precision.casts": RESIDUAL.format(POLICIES[of["precision"]].operand)
            if of["casts"] == "residual"
            else of["casts"],
            "loss.head": of["head"],
            "recompute.parts": "" if of["recomputed"] == "none" else of["recomputed"],
            "train.micro_batch_size": str(size),
            "optim.name": of["optimizer"],
        }
    )


def run(cell: Cell) -> dict[str, Any]:
    """Run one cell by the command line: verdict, comparisons, the comparison nearest to its bound, and the time."""
    file = ROWS.with_name(f"parity_matrix_{os.getpid()}.json")
    flags = [f"--{key.replace('_', '-')}={text}" for key, text in settings(cell).items()]
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "parity",
        CONFIG,
        f"--steps={STEPS}",
        "--quick",
        f"--json={file}",
    ]
    started = time.perf_counter()
    done = subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    row: dict[str, Any] = {"cell": list(cell), "exit": done.returncode, "seconds": seconds}
    if done.returncode == 2 or not file.exists():
        return row | {"verdict": "could not", "why": (done.stderr.strip().splitlines() or ["no verdict"])[-1]}
    verdict = json.loads(file.read_text())
    file.unlink()
    origin = verdict["origin"]
    near = max(map(nearness, verdict["stages"]))
    why = f"{origin['stage']} ({origin['phase']}) at {origin['tap']}" if origin else ""
    return row | {"verdict": verdict["verdict"], "why": why, "comparisons": len(verdict["stages"]), "nearest": near}


def nearness(stage: Mapping[str, Any]) -> float:
    """Return the distance of a comparison as a share of its bound."""
    return max((m["value"] / m["high"] for m in stage["measures"] if m["name"] == "twin_distance"), default=0.0)


def page(rows: Sequence[Mapping[str, Any]], cells: Sequence[Cell]) -> str:
    """Return docs/results/parity_matrix.md."""
    met = set().union(*(pairs(row["cell"]) for row in rows)) if rows else set()
    due = set().union(*map(pairs, cells))
    agreed = sum(row["verdict"] == "agreed" for row in rows)
    lines = [
        "# Every lever with every other",
        "",
        f"Made by `python -m lockstep.scripts.studies.parity_matrix`: {agreed} of {len(cells)} cells agree. Each is "
        "`lockstep "
        "parity "
        f"{CONFIG} --steps {STEPS}` with a model of two blocks; {len(due & met)} of {len(due)} pairs of values of two "
        f"levers meet (pairwise design, {len(cells)} of {len(list(itertools.product(*LEVERS.values())))} "
        f"combinations). torch {version('torch').split('+')[0]}, torchao {version('torchao')}, jax {version('jax')}, "
        f"{platform.machine()} {platform.system()}, CPU: FP8 is emulated, ranks are gloo processes.",
        "",
        f"| {' | '.join(LEVERS)} | verdict | comparisons | nearest to a bound on the distance | time |",
        f"|{'---|' * (len(LEVERS) + 4)}",
    ]
    by_cell = {tuple(row["cell"]): row for row in rows}
    for cell in cells:
        row = by_cell.get(cell)
        said = ("not run", "", "", "")
        if row is not None:
            verdict = row["verdict"] + (f": {row['why']}" if row["why"] else "")
            said = verdict, row.get("comparisons", ""), f"{row.get('nearest', 0):.2f}", f"{row['seconds']:.0f} s"
        lines.append(f"| {' | '.join(map(str, (*cell, *said)))} |")
    return "\n".join([*lines, ""])


@dataclass
class Matrix:
    """Run the missing cells, and write the page."""

    page: bool = False
    """only write the page from the finished rows"""
    jobs: int = 2
    """number of cells at a time; each computes on one thread per rank"""


def main() -> int:
    """Run the cells, write each row at once, write the page; 0 if every cell agrees."""
    options = tyro.cli(Matrix)
    cells = design(LEVERS)
    rows: list[dict[str, Any]] = json.loads(ROWS.read_text()) if ROWS.exists() else []
    rows = [row for row in rows if tuple(row["cell"]) in cells]
    if not options.page:
        ROWS.parent.mkdir(exist_ok=True)
        os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        done = {tuple(row["cell"]) for row in rows if row["verdict"] == "agreed"}
        rows = [row for row in rows if tuple(row["cell"]) in done]
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            for row in pool.imap_unordered(run, [cell for cell in cells if cell not in done]):
                rows.append(row)
                ROWS.write_text(json.dumps(rows, indent=1) + "\n")
                print(" ".join(row["cell"]), row["verdict"], row["why"], f"{row['seconds']:.0f} s", flush=True)
    PAGE.write_text(page(rows, cells), encoding="utf-8")
    return int(sum(row["verdict"] == "agreed" for row in rows) < len(cells))


if __name__ == "__main__":
    sys.exit(main())
