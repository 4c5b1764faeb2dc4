"""Write docs/results/faults.md, after running the rows of `lockstep faults` that are missing.

    python -m lockstep.parity_tests.boards.board            run the missing rows, then write the page
    python -m lockstep.parity_tests.boards.board --anew     delete all rows first (kept rows may be of older commits)
    python -m lockstep.parity_tests.boards.board --page     only write the page, from existing rows

The rows are stored in docs/results/faults.json.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence

from lockstep.parity_tests.repository import REPO

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPO / ".cache/jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import torch

from lockstep.parity_tests.faults import FAULTS, REFERENCE
from lockstep.scripts.commands import faults
from lockstep.scripts.shared.scoreboard import Row, from_json, in_words, place, totals

ROWS, PAGE = (REPO / f"docs/results/faults.{ending}" for ending in ("json", "md"))
# FP16 and FP8 are for the faults that occur only there.
RECIPES = (
    "bf16/eager",
    "bf16/compiled",
    *(
        f"{policy}/{program}"
        for policy in ("fp16", "fp8_tensorwise", "fp8_delayed")
        for program in ("eager", "compiled")
    ),
)


def line(row: Row) -> str:
    """Return one row of the table, in Markdown."""
    moved = "" if row.loss_moved is None else f"{row.loss_moved:.1e}"
    number = "" if row.number is None else f"#{row.number}"
    step = "–" if row.step is None else str(row.step)
    named = f"`{place(row.named)}`" + ("" if row.exact else f" (the true one is {ordinal(row.rank)})")
    told = "; ".join([f"**{said}**" for said in row.broken_promises] + [text for text in (row.cause, row.note) if text])
    cells = row.name, number, row.mechanism, f"`{place(row.expected)}`", row.first_step, step, named, row.measure
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in (*cells, moved, told)) + " |"


def ordinal(rank: int | None) -> str:
    """Return the place of the true origin among those named, such as `number 2`."""
    return "not among those named" if rank is None else f"number {rank}"


def page(rows: Sequence[Row]) -> str:
    """Return the text of docs/results/faults.md."""
    small = sum(fault.loss_moves_less_than is not None for fault in FAULTS)
    lines = [
        "# Planted faults",
        "",
        "Made by `python -m lockstep.parity_tests.boards.board` (`lockstep faults` prints the same) on the quickstart "
        "model and "
        f"data from initial weights, with torch {torch.__version__.split('+')[0]} on {platform.machine()} "
        f"({platform.system()}), CPU. Each fault is a `Backend` in `parity_tests/faults/`: "
        "`lockstep parity configs/quickstart.toml --candidate FILE.py:NAME`.",
        "",
        f"{len(FAULTS)} faults: {sum(f.backward_only for f in FAULTS)} with every forward value right to the bit, "
        f"{sum(f.only_compiled for f in FAULTS)} honest when eager, {small} of which the loss of their first step "
        "shows less than a thousandth. Where each must be named (stage, phase, layer) was written down before it was "
        "first run. `acts`: the first wrong step. `found`: the first check that disagreed. `loss moved`: relative, in "
        "the step in which the fault first acts. `#`: of the list of faults met in public projects.",
        "",
    ]
    for recipe in RECIPES:
        of_recipe = [row for row in rows if row.recipe == recipe and row.expected is not None]
        if not of_recipe:
            continue
        counts = totals([row for row in rows if row.recipe == recipe])
        there = {row.name for row in of_recipe}
        absent = [f.name for f in FAULTS if recipe in f.recipes and f.name not in there]
        lines += [
            f"## {recipe}",
            "",
            f"{in_words(counts)}." + (f" Not run under this recipe: {', '.join(absent)}." if absent else ""),
            "",
            f"Made with commit {', '.join(sorted({row.commit for row in of_recipe}))}.",
            "",
            "| fault | # | what is wrong | planted in | acts | found | named | measured (bound) | loss moved | cause, "
            "notes |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *map(line, of_recipe),
            "",
        ]
    lines += [
        "## In the reference",
        "",
        "The reference is judged before it judges, and a wrong one is refused: these and others are planted in "
        "parity_tests/reference.",
        "",
        "| # | what goes wrong | what refuses it |",
        "|---|---|---|",
        *(f"| #{fault.number} | {fault.mechanism} | {fault.told} |" for fault in REFERENCE),
        "",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Run the missing rows and write the page. Return the exit code of `lockstep faults`."""
    code = 0
    argv = list(argv)
    if "--anew" in argv:
        argv.remove("--anew")
        ROWS.unlink(missing_ok=True)
    if "--page" not in argv:
        os.chdir(REPO)
        options = ["--json", str(ROWS), "--resume", "--device", "cpu", "--recipe", *RECIPES]
        code = faults.main([*argv, *options])
    rows = [from_json(row) for row in json.loads(ROWS.read_text())["rows"]]
    PAGE.write_text(page(rows), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
