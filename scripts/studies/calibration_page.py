"""docs/results/calibration.md and calibration.csv, from the table that scripts/studies/calibrate.py measured.

The page sums up; the CSV has a row for each kind of comparison of each recipe.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterator
from typing import Any

from lockstep.core.parity.measures import calibrated_bounds
from lockstep.core.parity.measures.calibrated_bounds import Extremes, Limits
from lockstep.core.parity.measures.scatter import SCATTER_SIZE

POLICIES = ("fp32", "bf16", "fp16", "fp8_tensorwise", "fp8_rowwise")
RECIPES = tuple(f"{policy}/{program}" for policy in POLICIES for program in ("eager", "compiled"))
LARGE = 1 << 40  # elements of a tensor so large that its size widens no bound
# Scope of a kind of comparison → the comparison, in the order of the page.
SCOPES = {
    "forward": "output of a stage, from its own inputs",
    "backward": "gradient that a stage sends back, from its own inputs",
    "end_to_end": "taps and their gradients, end to end",
    "gradients": "gradients of parameters, end to end",
    "bridge": "gradients of the program that trains, against the tapped one",
    "moments": "moments of AdamW",
    "update": "update of AdamW",
    "others": "moments and updates of 8-bit AdamW and Muon",
}
COLUMNS = (
    "recipe", "kind", "draws", "excess", "excess bound", "distance", "distance bound", "gain", "gain bound",
    "held-out draws", "held-out excess", "held-out accused", "peak draws", "result", "peak distance", "element", "row",
    "column", "row gain", "unequal",
)  # fmt: skip


def scope_of(kind: str) -> str:
    """Return the scope of SCOPES to which a kind of comparison belongs."""
    scope = kind.partition("/")[0].partition(" ")[0]
    if scope in ("exp_avg", "exp_avg_sq"):
        return "moments"
    return scope if scope in SCOPES else "others"


def page(table: dict[str, Any], made: str, draws: str) -> str:
    """Return the page in Markdown.

    Args:
        table: the measured table, with `recipes` and `held_out`.
        made: the command, versions and machine, as a sentence.
        draws: the shapes and runs, as sentences.
    """
    lines = [
        "# Calibration: clean runs and the bounds from them",
        "",
        made,
        "",
        draws,
        "",
        "[calibration.csv](calibration.csv) has a row for each kind of comparison. `lockstep calibrate` measures the "
        "same on your machine ([check a run](../guide/check.md)).",
        "",
        "## How a bound follows",
        "",
        f"* A bound is the extreme of all clean runs times {calibrated_bounds.MARGIN:g}: on the logarithm of the "
        "excess, on the distance and on the gain. End to end it is the extreme times "
        f"{calibrated_bounds.MARGIN_END_TO_END:g}.",
        f"* No bound is below excess ×/÷ {calibrated_bounds.LEAST_EXCESS}, distance "
        f"{calibrated_bounds.LEAST_DISTANCE} and gain {calibrated_bounds.LEAST_GAIN} of the twin's error. Where "
        f"results stay in FP32, excess and distance have a least bound of {calibrated_bounds.LEAST_OF_SUMS:g}.",
        "* For a stage from its own inputs, the bound on the gain is at least half of the bound on the distance.",
        f"* All figures here are those of a large tensor. For a tensor of n numbers, distance, gain and the logarithm "
        f"of the excess may be larger by √(1 + {SCATTER_SIZE} / n).",
        "* The largest single difference, rows, columns and the share of unequal elements have bounds of their own "
        "(`core/parity/measures/peak_bounds.py`). The CSV has them in its last columns.",
        "",
        "## Held-out runs",
        "",
        "Held-out shapes were not read when bounds were set. A comparison of a clean run that exceeds its bound is "
        "accused.",
        "",
        "| recipe | kinds | comparisons for the bounds | held-out comparisons | accused |",
        "|---|--:|--:|--:|--:|",
        *(_held_out(table, recipe) for recipe in measured(table)),
    ]
    for recipe in measured(table):
        lines += ["", f"## {recipe}", "", *_by_scope(recipe, table["recipes"][recipe])]
    return "\n".join([*lines, ""])


def rows(table: dict[str, Any]) -> str:
    """Return every kind of every recipe as CSV, with a line of COLUMNS."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for recipe in measured(table):
        for kind, clean in table["recipes"][recipe].items():
            writer.writerow([recipe, kind, *_values(recipe, kind, clean, table["held_out"][recipe].get(kind))])
    return out.getvalue()


def measured(table: dict[str, Any]) -> list[str]:
    """List the recipes that a table has, in the order of RECIPES."""
    return [recipe for recipe in RECIPES if recipe in table["recipes"] and recipe in table["held_out"]]


def _held_out(table: dict[str, Any], recipe: str) -> str:
    clean, held_out = table["recipes"][recipe], table["held_out"][recipe]
    draws = sum(row["draws"] for row in clean.values())
    apart, accused = (sum(row[what] for row in held_out.values()) for what in ("draws", "accused"))
    return f"| {recipe} | {len(clean)} | {draws:,} | {apart:,} | {accused} |"


def _by_scope(recipe: str, clean: dict[str, Any]) -> Iterator[str]:
    yield "| comparison | kinds | excess ×/÷, typical bound | widest | distance, typical bound | widest |"
    yield "|---|--:|--:|---|--:|---|"
    for scope, comparison in SCOPES.items():
        limits = {kind: _limits(recipe, kind) for kind in clean if scope_of(kind) == scope}
        if limits:
            cells = [
                cell
                for measure in ("excess", "distance")
                for cell in _typical_and_widest({kind: getattr(limit, measure) for kind, limit in limits.items()})
            ]
            yield f"| {comparison} | {len(limits)} | {' | '.join(cells)} |"


def _typical_and_widest(bounds: dict[str, float]) -> tuple[str, str]:
    widest = max(bounds, key=lambda kind: bounds[kind])
    return f"{statistics.median(bounds.values()):.3g}", f"{bounds[widest]:.3g} (`{widest}`)"


def _limits(recipe: str, kind: str) -> Limits:
    return calibrated_bounds.limits(recipe, kind, LARGE)


def _values(recipe: str, kind: str, clean: dict[str, Any], held_out: dict[str, Any] | None) -> list[str]:
    limit, sharp = _limits(recipe, kind), Extremes.from_json(clean).sharp
    values = [
        str(clean["draws"]), f"{math.exp(clean['log_excess']):.3f}", f"{limit.excess:.3f}", f"{clean['distance']:.3f}",
        f"{limit.distance:.3f}", f"{clean['gain']:.3f}", f"{limit.gain:.3f}",
    ]  # fmt: skip
    if held_out is None:
        values += [""] * 3
    else:
        values += [str(held_out["draws"]), f"{math.exp(held_out['log_excess']):.3f}", str(held_out["accused"])]
    if sharp is None:
        return [*values, *[""] * 8]
    peaks = (sharp.distance, sharp.largest, sharp.row, sharp.column, sharp.row_gain, sharp.unequal)
    result = calibrated_bounds.result_of(recipe, kind)
    return [*values, str(sharp.draws), str(result), *(f"{value:.2g}" for value in peaks)]
