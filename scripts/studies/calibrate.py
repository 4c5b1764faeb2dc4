"""Measure clean runs; write core/parity/measures/calibrated_bounds.json and the page docs/results/calibration.md.

    python -m lockstep.scripts.studies.calibrate                     all recipes
    python -m lockstep.scripts.studies.calibrate bf16/eager --jobs 4 one recipe, in four processes; the others are kept
    python -m lockstep.scripts.studies.calibrate --parts muon        only the bounds of Muon, added to the table
    python -m lockstep.scripts.studies.calibrate tf32/eager --device cuda   TF32, which CPUs do not have
    python -m lockstep.scripts.studies.calibrate bf16/eager --add    only bounds on elements, added to the table
    python -m lockstep.scripts.studies.calibrate --page              only the page and its CSV, from the table

Every draw is a clean torch session of a random shape (scripts/studies/clean_runs.py), judged against the JAX twin and
truth at initial weights and after some training. Bounds come from the calibration draws. The held-out draws, never
examined when bounds were set, measure how often a clean run would be accused.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

# All recipes of a policy share the programs of twin and truth: compiled once, then cached for the next process.
from lockstep.scripts.studies.repository import ROOT

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache/jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import tyro

from lockstep.core.backend import Arrays
from lockstep.core.components.cast_plan import NARROW
from lockstep.core.config.schema import ModelConfig
from lockstep.core.model.names import GRADIENT
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.judge.local import stages
from lockstep.core.parity.judge.update import update
from lockstep.core.parity.measures import calibrated_bounds, here
from lockstep.core.parity.measures.calibrated_bounds import Extremes
from lockstep.core.parity.measures.distances import Distances
from lockstep.core.parity.measures.peak_bounds import Sharp
from lockstep.core.parity.measures.scatter import scatter
from lockstep.core.parity.measures.verdict import Measure
from lockstep.core.parity.reference.stages import chain, forward_stages
from lockstep.scripts.studies import calibration_page
from lockstep.scripts.studies.calibration_page import RECIPES
from lockstep.scripts.studies.clean_runs import clean_evidence, draw_config, of_family, open_reference
from lockstep.scripts.studies.samples import Checks, Sample, kept

TABLE = ROOT / "core/parity/measures/calibrated_bounds.json"
# The parts that are measured separately: `step`, a whole step with AdamW; another optimizer or a library's loss head.
# `casts`: the roundings of a plan of casts (`precision.casts`). `plans`: a whole step under another plan than
# Lockstep's. `families`: stages that a Llama lacks.
Part = Literal[
    "step", "families", "casts", "plans", "adamw8bit", "adamw8bit_bnb", "muon", "torch_head", "liger_head", "cce_head"
]
PARTS: tuple[Part, ...] = get_args(Part)
ON_CPU: tuple[Part, ...] = ("step", "families", "casts", "plans", "adamw8bit", "muon", "torch_head")
CALIBRATION_DRAWS, HELD_OUT_DRAWS = range(30), range(1000, 1008)
SEEDS, CHECKS, BETWEEN = 2, 5, 6

Job = tuple[str, int, Part, str, Path | None]


def clean_run(job: Job) -> Checks:
    """Return the distances of every comparison of `clean_checks` by check, from the folder of samples if stored."""
    recipe, draw, part, _, folder = job
    path = folder / recipe / f"{part}-{draw}.json" if folder else None
    return kept(path, lambda: clean_checks(job))


def clean_checks(job: Job) -> Checks:
    """Return distances of every comparison of `CHECKS` steps of `SEEDS` runs of a shape, by check.

    A part other than the step keeps only its own comparisons.
    """
    recipe, draw, part, device, _ = job
    checks: Checks = []

    def record(recipe: str, kind: str, d: Distances, size: int) -> tuple[Measure, ...]:
        if part_of(kind) == part and calibrated_bounds.measured_under(recipe, kind) == recipe:
            checks[-1].append((kind, d, size))
        return (Measure("excess", d.excess, None, None, "calibration"),)

    optimizer = part if part in ("adamw8bit", "adamw8bit_bnb", "muon") else "adamw"
    config = draw_config(draw, recipe, optimizer=optimizer, casts=part in ("casts", "plans"))
    if part == "families":
        config = of_family(config, draw)
    if part.endswith("_head"):
        loss = config.loss.model_copy(update={"head": part.removesuffix("_head")})
        config = config.model_copy(update={"loss": loss, "device": device})
    elif config.precision.chosen.on_tensor_cores:
        config = config.model_copy(update={"device": device})
    reference = replace(open_reference(config), bound=record)
    seeds = [draw * SEEDS + i for i in range(SEEDS)]
    for _, evidence, of_seed in clean_evidence(config, reference, seeds, CHECKS, BETWEEN):
        checks.append([])
        if part in ("step", "plans", "families"):
            judge(evidence, of_seed)
        elif part.endswith("_head"):
            list(stages(replace(evidence, taps=_of_head(evidence.taps)), of_seed, []))
        elif part == "casts":
            list(stages(evidence, of_seed, []))
        else:
            list(update(evidence, of_seed))
    return checks


def _of_head(taps: Arrays) -> Arrays:
    names = ("final_norm", "nll", "logits.weight", "lm_head.weight")
    return {name: value for name, value in taps.items() if name.removeprefix(GRADIENT) in names}


def part_of(kind: str) -> Part:
    """Return the part whose clean runs measure a kind of comparison."""
    if calibrated_bounds.CAST in kind:
        return "casts"
    if kind.endswith(calibrated_bounds.OTHER_PLAN):
        return "plans"
    scope, _, stage = kind.partition("/")
    if scope == "end_to_end":
        stage = stage.partition("/")[2]
    named = stage.partition("/")[0] if scope in ("forward", "backward", "end_to_end") else scope
    if named in chain().kinds and named not in of_llama() and not named.endswith("_head"):
        return "families"
    return next((part for part in PARTS if part == named), "step")


@cache
def of_llama() -> frozenset[str]:
    """Return the stages of a Llama."""
    return frozenset(one.id for one in forward_stages(ModelConfig()))


def measured_here(recipe: str) -> list[Part]:
    """List the parts whose clean runs are those of this recipe (`measured_under` in calibrated_bounds.py)."""
    kinds = {part: f"forward/{part}" if part.endswith("_head") else f"{part}/update" for part in PARTS}
    kinds["casts"] = f"forward/act{calibrated_bounds.CAST}"
    kinds["plans"] = f"gradients/together{calibrated_bounds.OTHER_PLAN}"
    if calibrated_bounds.policy_of(recipe).operand not in NARROW:
        del kinds["casts"], kinds["plans"]
    return [
        part
        for part in kinds
        if part in ("step", "families") or calibrated_bounds.measured_under(recipe, kinds[part]) == recipe
    ]


def keep(rows: dict[str, Any], recipe: str, parts: list[Part], measured: dict[str, Any]) -> None:
    """Replace the measurements of these parts."""
    others = {kind: row for kind, row in rows.get(recipe, {}).items() if part_of(kind) not in parts}
    rows[recipe] = others | measured


def extremes(samples: list[Sample]) -> dict[str, Extremes]:
    """Return the extremes of each kind of comparison, in units of the scatter for its tensor's size."""
    found: dict[str, Extremes] = {}
    for kind, d, size in samples:
        one = Extremes.of(d, size)
        found[kind] = found[kind] | one if kind in found else one
    return dict(sorted(found.items()))


def over_checks(runs: list[Checks]) -> dict[str, float]:
    """Return kind → max |mean of log excess over the checks of a run|, in units of the scatter of all their numbers."""
    found: dict[str, float] = {}
    for draw in runs:
        for run in (draw[start : start + CHECKS] for start in range(0, len(draw), CHECKS)):
            for kind in calibrated_bounds.OF_MANY:
                each = [(math.log(d.excess), size) for check in run for of, d, size in check if of == kind]
                if each:
                    mean = math.fsum(value for value, _ in each) / len(each) / scatter(sum(size for _, size in each))
                    found[kind] = max(found.get(kind, 0.0), abs(mean))
    return found


def add_sharp(rows: dict[str, Any], clean: dict[str, Extremes]) -> None:
    """Add bounds on elements to the existing rows of a recipe, and add rows of missing kinds.

    Everything else in the rows is kept.
    """
    added = {kind: row.to_json() for kind, row in clean.items() if kind not in rows}
    for kind, row in rows.items():
        if kind in clean and (sharp := clean[kind].sharp) is not None:
            row["sharp"] = asdict(sharp | Sharp(**row["sharp"]) if "sharp" in row else sharp)
        if kind in clean and (reached := clean[kind].over_checks) is not None:
            row["over_checks"] = max(reached, row.get("over_checks", 0.0))
    rows |= added


def accused(recipe: str, samples: list[Sample]) -> dict[str, int]:
    """Count the clean comparisons of each kind that the bounds would have accused."""
    counts = {kind: 0 for kind, _, _ in samples}
    for kind, d, size in samples:
        measures = calibrated_bounds.measures(recipe, kind, d, size)
        if calibrated_bounds.under_own_plan(kind) == "gradients/together":
            measures = tuple(m for m in measures if m.name == "excess")
        counts[kind] += not all(m.ok for m in measures)
    return counts


def read_table(path: Path) -> dict[str, Any]:
    """Read the measured table; a new table starts as a copy of the one in force."""
    start = path if path.exists() else TABLE
    stored: dict[str, Any] = json.loads(start.read_text()) if start.exists() else {}
    return {"recipes": stored.get("recipes", {}), "held_out": stored.get("held_out", {})}


def write_table(table: dict[str, Any], path: Path) -> None:
    """Write a table, and put its bounds in force in this process."""
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    calibrated_bounds.TABLE = path
    calibrated_bounds.table.cache_clear()


def write_page(table: dict[str, Any]) -> None:
    """Write docs/results/calibration.md and calibration.csv."""
    made = (
        f"Made by `python -m lockstep.scripts.studies.calibrate` with torch {torch.__version__.split('+')[0]} on "
        f"{platform.machine()} ({platform.system()}), CPU."
    )
    draws = (
        f"{len(CALIBRATION_DRAWS)} random shapes of model and batch give the bounds, and {len(HELD_OUT_DRAWS)} others "
        f"are held out. Each has {SEEDS} runs of {CHECKS} checked steps, with {BETWEEN} training steps between two "
        "checks, uneven loss weights and real text as bytes (scripts/studies/clean_runs.py). Stages that no Llama has "
        "come from 16 shapes of four families (gpt2, qwen3, mistral, gemma2), and four held out, 2026-11-27. Kinds "
        "with fewer comparisons had fewer shapes."
    )
    results = ROOT / "docs/results"
    (results / "calibration.md").write_text(calibration_page.page(table, made, draws))
    (results / "calibration.csv").write_text(calibration_page.rows(table))


@dataclass
class Calibrate:
    """Calibrate the recipes that are named, or all."""

    recipes: Annotated[tuple[str, ...], tyro.conf.Positional] = RECIPES
    """policy/eager or policy/compiled"""
    jobs: int = 2
    """processes; each computes on one thread"""
    parts: tuple[Part, ...] = ON_CPU
    """parts whose kinds of comparison are measured; the other parts keep their bounds"""
    device: Literal["cpu", "cuda"] = "cpu"
    """device of library loss heads and of tf32; liger_head, cce_head and tf32 need cuda"""
    table: Path = TABLE
    """table to write; docs/results/calibration.md is written only with the package's own table"""
    add: bool = False
    """add only bounds on elements (core/parity/measures/peak_bounds.py) to the existing rows"""
    samples: Path | None = None
    """folder of each draw's samples; a draw whose samples are there is not run again"""
    draws: int = len(CALIBRATION_DRAWS)
    """number of random shapes for the bounds"""
    held_out: int = len(HELD_OUT_DRAWS)
    """number of held-out shapes"""
    page: bool = False
    """measure nothing; write the page and its CSV from the table of the package"""


def main() -> None:
    """Measure, then write the table and the page after each recipe."""
    options = tyro.cli(Calibrate)
    if options.page:
        write_page(read_table(TABLE))
        return
    os.environ[here.FOLDER] = "off"
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    # A new process every few draws frees the programs that torch.compile and XLA keep.
    with context.Pool(options.jobs, maxtasksperchild=4) as pool:
        for recipe in options.recipes:
            started = time.perf_counter()
            bounds, apart = CALIBRATION_DRAWS[: options.draws], HELD_OUT_DRAWS[: options.held_out]
            parts = [part for part in measured_here(recipe) if part in options.parts]
            given = options.device, options.samples
            jobs: list[Job] = [(recipe, draw, part, *given) for part in parts for draw in (*bounds, *apart)]
            runs = dict(zip(jobs, pool.imap(clean_run, jobs), strict=True))
            clean = extremes([s for job in jobs if job[1] in bounds for check in runs[job] for s in check])
            for kind, mean in over_checks([runs[job] for job in jobs if job[1] in bounds]).items():
                clean[kind] = replace(clean[kind], over_checks=mean)
            held_out = [s for job in jobs if job[1] in apart for check in runs[job] for s in check if s[0] in clean]
            table = read_table(options.table)
            if options.add:
                add_sharp(table["recipes"][recipe], clean)
            else:
                keep(table["recipes"], recipe, parts, {kind: e.to_json() for kind, e in clean.items()})
            write_table(table, options.table)
            wrong = accused(recipe, held_out)
            measured = {
                k: replace(e, sharp=None).to_json() | {"accused": wrong[k]} for k, e in extremes(held_out).items()
            }
            keep(table["held_out"], recipe, parts, measured)
            write_table(table, options.table)
            if options.table == TABLE:
                write_page(table)
            print(
                f"{recipe}: {time.perf_counter() - started:.0f} s, "
                f"{sum(wrong.values())}/{len(held_out)} held out accused",
                file=sys.stderr,
                flush=True,
            )


if __name__ == "__main__":
    main()
