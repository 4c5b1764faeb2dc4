"""The rate of false alarms: random models, random and trained weights, thousands of checks. Resumable.

    python -m lockstep.scripts.studies.false_alarms --jobs 3    run the missing draws, write
    docs/results/false_alarms.md python -m lockstep.scripts.studies.false_alarms "bf16, compiled"     that row alone
    python -m lockstep.scripts.studies.false_alarms --page      only write the page from the finished draws

A check is one verdict on one step. Draws of shapes are separate from those of the calibration. Each finished draw is a
line of docs/results/false_alarms.jsonl, so that an interrupted search continues where it stopped. Lines made with other
bounds (by their digest) are not counted.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import exp, factorial
from typing import Any

from lockstep.scripts.studies.repository import ROOT

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache/jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import jax
import torch
import tyro
from torch.distributed.launcher.api import elastic_launch

from lockstep.core.config.schema import AttentionConfig, RecomputeConfig, RunConfig, Section
from lockstep.core.files.jsonl import JsonLines, read_lines
from lockstep.core.model.families import FAMILIES
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.measures import calibrated_bounds, here, peak_bounds
from lockstep.core.run.launch import launched
from lockstep.core.run.ranks import Ranks
from lockstep.core.sinks.phrases import check_line
from lockstep.scripts.shared.peers import launch_here, ranks_of_launch
from lockstep.scripts.studies.clean_runs import Optimizer, clean_evidence, draw_config, of_family, open_reference

RESULTS, PAGE = ROOT / "docs/results/false_alarms.jsonl", ROOT / "docs/results/false_alarms.md"


# Draws 2000 to 2005 and 3000 to 3010 were examined while bounds were being set, and 4000 to 4029 under the bounds
# before the levers.
FIRST_DRAW = 5000


@dataclass(frozen=True)
class Kind:
    """A kind of clean run. accumulate: whether the batch has several micro-batches; None: as drawn.

    family: of models, with settings drawn for it. head: a library's, or Lockstep's own. casts: under a random plan of
    casts. first_draw: earlier draws were examined while its bounds were set. Chunks of the head, recomputation and
    programs of blocks are drawn at random for every kind.
    """

    recipe: str
    accumulate: bool | None = None
    optimizer: Optimizer = "adamw"
    recompute: bool = False
    documents: bool = False
    ranks: int = 1
    head: str = ""
    casts: bool = False
    first_draw: int = FIRST_DRAW
    family: str = ""

    def config(self, draw: int) -> RunConfig:
        """Return the run of a draw."""
        config = draw_config(draw, self.recipe, self.accumulate, self.optimizer, self.casts)
        if self.family:
            config = of_family(config, draw, self.family)
        changes: dict[str, Section] = {}
        if self.recompute and not config.recompute.parts:
            changes["recompute"] = RecomputeConfig(parts="block" if draw % 2 else "norms,attention,mlp")
        if self.head:
            changes["loss"] = config.loss.model_copy(update={"head": self.head})
        if self.documents:
            changes["attention"] = AttentionConfig(document_mask=True, reset_positions=draw % 2 == 0)
        if self.ranks > 1:
            many = config.train.batch_size * self.ranks
            changes["train"] = config.train.model_copy(update={"ranks": self.ranks, "batch_size": many})
        return config.model_copy(update=changes)


RECIPES = {
    "fp32": Kind("fp32/eager", False),
    "fp32, accumulation": Kind("fp32/eager", True),
    "fp32, compiled": Kind("fp32/compiled"),
    "bf16": Kind("bf16/eager", False),
    "bf16, accumulation": Kind("bf16/eager", True),
    "bf16, compiled": Kind("bf16/compiled", False),
    "bf16, compiled, accumulation": Kind("bf16/compiled", True),
    "fp16": Kind("fp16/eager"),
    "fp16, compiled": Kind("fp16/compiled"),
    "fp8 tensorwise": Kind("fp8_tensorwise/eager"),
    "fp8 tensorwise, compiled": Kind("fp8_tensorwise/compiled"),
    "fp8 rowwise": Kind("fp8_rowwise/eager"),
    "fp8 rowwise, compiled": Kind("fp8_rowwise/compiled"),
    "fp8 delayed": Kind("fp8_delayed/eager"),
    "fp8 delayed, compiled": Kind("fp8_delayed/compiled"),
    "bf16, activation checkpointing": Kind("bf16/eager", recompute=True),
    "bf16, documents": Kind("bf16/eager", documents=True),
    "bf16, two ranks": Kind("bf16/eager", ranks=2),
    "bf16, 8-bit AdamW": Kind("bf16/eager", optimizer="adamw8bit"),
    "bf16, 8-bit AdamW of bitsandbytes": Kind("bf16/eager", optimizer="adamw8bit_bnb"),
    "bf16, Muon": Kind("bf16/eager", optimizer="muon", first_draw=6000),
    "bf16, torch's loss head": Kind("bf16/eager", head="torch"),
    "bf16, random casts": Kind("bf16/eager", casts=True),
    "bf16, random casts, compiled": Kind("bf16/compiled", casts=True),
    "fp16, random casts": Kind("fp16/eager", casts=True),
    **{
        f"{policy}, {family}{', compiled' if program == 'compiled' else ''}": Kind(f"{policy}/{program}", family=family)
        for policy in ("fp32", "bf16")
        for program in ("eager", "compiled")
        for family in FAMILIES
    },
}
EARLIER = """Earlier rounds, each under narrower bounds and on draws that are not used again, accused 2 of 864 checks,
11 of 1,872 and 5 of 3,936; a fourth, the last before there were levers, none of 10,080; a fifth, before single elements
had bounds and the step's own weights were judged, none of 8,256; a sixth, before there were means over layers, none of
552. Each accusation was looked into, and what it taught became part of the bounds: sums in FP32, errors that one early
rounding gives to all that follows, one token that outweighs all others, a run of one letter. One of Muon was in a
matrix whose norm lay at a tie of bf16, to which torch rounds it; Lockstep's Muon has not rounded it since, and its
draws began anew.

Under the first bounds of casts 3 of 48 compiled checks under random casts were accused: one element of a small
gradient, at a tie, was all of its distance; and attention's gradient of k had bounds from 8 shapes only. A few elements
at a tie have been no distance since, of a tensor or of one of its rows and columns, and compiled programs were measured
on 30 shapes more, with Lockstep's casts and with others. One of those draws, 5016, was accused until then, and after it
by a mean over layers; draw 5000 by the compiler's bridge. Whole steps of compiled programs have had bounds of their own
under other casts since, of 22 shapes.

On another processor, an Intel Xeon, thirty checks were accused, and six rules were mended. Three had a column that one
element at a tie outweighed: a row or column with at most two unequal elements is held by its elements. Two, of FP16's
draw 5001, had 28 tokens of a run of one letter with the same numbers, one of them at a tie: before an accusation each
token counts once. One, of compiled bf16, had a length between both programs in a gradient in which one token outweighs
all others: the twin had a single row exact by chance, and errors of either side weigh a row now. In another an ulp of
one loss weight made a whole token round otherwise: two tokens have the ulp in turn. One, of Muon, had four sampled
tokens, one of which carried the twin's error: tokens count by that error. With torch's loss head 22 of 48 checks were
accused: with one weight an ulp larger it scales every gradient otherwise, and the weight is an ulp smaller now. These
draws were made anew. Other checks of before are counted on, since each of these rules but the last accuses no more
than the one before. Lines of before a new check say nothing of that check: the step held to itself under other weights,
evaluation of all sequences, the rates of later steps, and Muon's lengths; what is only reported, sampling at a drawn
place, and two steps in a row.

One compiled check of FP8's delayed scaling was accused, of draw 5000: a gradient's amax in the program that trains was
1.6 % from the tapped tensor. Two compiled programs differ by FP8's own errors. The tapped one is held to its own
tensors since, within a rounding to bf16, and the other to it within both errors. The draw was made anew.

FP16's checks begin at the loss scale of the run's start. At 2²⁰, where gradients of a small model nearly overflow,
10 of 15 clean checks of `lockstep parity` were accused: a micro-batch by itself has larger gradients than in its step,
and overflowed where the step did not. It is computed at a smaller loss scale since; tests hold this, and no line here
counts for it.

The first checks with two steps in a row accused 30 of 48 of bitsandbytes' 8-bit AdamW, draw 5003: the library keeps a
block of zeros as the code of −0.993 and the scale 0, which read as −0, and a loaded state had 0 there or the other way
round. Zeros have one sign since, and the draw was made anew.

The same link accused every first step of torchao's 8-bit AdamW, in commits of 2026-11-26 up to 67badbc: before that
step the moments have no codes, and after a load they have those of zeros. No line here began so: theirs were of before
that link. A check of the 1.24B model found it. Checksums are of codes in both since, and tests check a first step of
every optimizer. Lines of before say nothing of what follows a step either: another batch, scores and samples, a step
while a checkpoint is written, a step from one that was restored, and a third step.

The first checks of what later steps of a run do to moments and weights accused seven of 28 of bitsandbytes' 8-bit
AdamW, draws 5007 to 5013: the last part of a parameter whose rows are no multiple of those that fill blocks of 256
codes (414 of 72) began within a block. `parity.update` always had the same fault. Parts begin with a block since, and
these draws were made anew. Lines of before say nothing of that link. Loss and gradients of a first step are also held
to those of the same step as a later one; only the newest lines of 8-bit AdamW and of bf16's random casts had that.
The newest 114 lines of Llama, 456 checks of 17 kinds, none of them compiled, also had an end of text among the tokens
that are looked at, but for FP8, and in each first check a step that is not finite, a loss scale that grows and a full
history of amaxes; so had all lines of the other families, and no other line had.

Sampling at a drawn place accused one of 16 checks of FP16's draw 5004, by 0.5 %: seventeen tokens of one sequence share
errors of the keys and values that they read, and count as four since. This check is among what the bound rests on; the
draw was made anew.

During training stages are examined on other sequences from check to check; the count is of the first and the last of
a micro-batch."""
SEEDS, BETWEEN = 2, 3


@dataclass
class FalseAlarms:
    """Judge clean runs, and count the accused ones."""

    labels: tyro.conf.Positional[tuple[str, ...]] = ()
    """rows of the page, for example "bf16, compiled" (none = all)"""
    jobs: int = 2
    """processes; each computes on one thread"""
    draws: int = 30
    """shapes per recipe"""
    checks: int = 24
    """checks per run; a shape has two runs"""
    minutes: float = 0.0
    """time limit; 0 = none. A later call continues"""
    page: bool = False
    """only write the page"""


@cache
def digest(label: str) -> str:
    """Return the digest of the bounds that judge this kind."""
    config, recipe = RECIPES[label].config(0), RECIPES[label].recipe
    of_all = config.model.model_copy(update={"tied": False, "qkv_bias": True, "o_bias": True, "mlp_bias": True})
    kinds = calibrated_bounds.all_kinds(config.model_copy(update={"model": of_all}))
    # Stages of other families do not occur here, so their bounds are left out.
    own = {kind.split("/")[1] for kind in kinds if "/" in kind}
    means = (kind for kind in calibrated_bounds.table()[recipe] if kind.endswith(calibrated_bounds.OVER_LAYERS))
    kinds |= {kind for kind in means if not kind.startswith("end_to_end/") or kind.split("/")[2] in own}
    if RECIPES[label].casts:
        rows = calibrated_bounds.table()[
            calibrated_bounds.measured_under(recipe, f"forward/act{calibrated_bounds.CAST}")
        ]
        kinds |= {kind for kind in rows if calibrated_bounds.CAST in kind}
        kinds |= {kind for kind in calibrated_bounds.table()[recipe] if kind.endswith(calibrated_bounds.OTHER_PLAN)}
    used = {
        (kind, size): (calibrated_bounds.limits(recipe, kind, size), calibrated_bounds.extremes_of(recipe, kind))
        for kind in kinds
        for size in (16, 4096)
    }
    rule = (
        calibrated_bounds.NOISE_MARGIN,
        calibrated_bounds.FP32_LIMIT,
        calibrated_bounds.FP64_LIMIT,
        peak_bounds.LEAST,
        sorted(used.items(), key=lambda item: item[0]),
    )
    return hashlib.sha256(repr(rule).encode()).hexdigest()[:16]


def run_draw(job: tuple[str, int, int]) -> dict[str, Any]:
    """Return the line of one shape, from (label, draw, checks per run): checks, and findings of accused ones."""
    config = RECIPES[job[0]].config(job[1])
    if config.train.ranks > 1 and launched() is None:
        # Ranks are processes, which a pool's worker may not start.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        found: dict[str, Any] = elastic_launch(launch_here(config.train.ranks), run_draw)(job)[0]
        return found
    with ranks_of_launch(config) as ranks:
        return _run_draw(job, config, ranks)


def _run_draw(job: tuple[str, int, int], config: RunConfig, ranks: Ranks) -> dict[str, Any]:
    label, draw, checks = job
    started = time.perf_counter()
    seeds = [draw * SEEDS + i for i in range(SEEDS)]
    made, comparisons, accused = 0, 0, []
    nearest: dict[str, float] = {}
    runs: dict[int, Reference] = {}
    for seed, evidence, reference in clean_evidence(config, open_reference(config, ranks), seeds, checks, BETWEEN):
        check = judge(evidence, runs.setdefault(seed, reference.over_a_run()))
        made += 1
        comparisons += len(check.findings)
        for found in check.findings:
            link = f"{found.stage}, {found.phase}, {found.scope.replace('_', ' ')}"
            nearest[link] = max(nearest.get(link, 0.0), found.worst.strain)
        if check.verdict != "agreed":
            accused.append(f"seed {seed}, {check_line(check)}")
    return {
        "bounds": digest(label),
        "label": label,
        "draw": draw,
        "checks": made,
        "comparisons": comparisons,
        "accused": accused,
        "nearest": {link: round(strain, 2) for link, strain in sorted(nearest.items()) if strain > 0.5},
        "model": config.model.model_dump(),
        "train": config.train.model_dump(),
        "seconds": round(time.perf_counter() - started, 1),
    }


def lines() -> list[dict[str, Any]]:
    """Return the finished draws under the present bounds."""
    found = read_lines(RESULTS) if RESULTS.exists() else []
    return [line for line in found if line["label"] in RECIPES and line["bounds"] == digest(line["label"])]


def missing(options: FalseAlarms) -> Iterator[tuple[str, int, int]]:
    """Yield the missing draws, recipe by recipe in turns, so that an early stop leaves no recipe out."""
    done = {(line["label"], line["draw"]) for line in lines()}
    for number in range(options.draws):
        for label in options.labels or RECIPES:
            kind = RECIPES[label]
            if (label, kind.first_draw + number) not in done:
                yield label, kind.first_draw + number, options.checks


def upper_bound(alarms: int, checks: int) -> float:
    """Return the rate at which this few alarms have a probability of 5 % (Poisson; 3/n for no alarm)."""
    low, high = 0.0, 50.0 + 2 * alarms
    for _ in range(60):
        rate = (low + high) / 2
        likely = sum(exp(-rate) * rate**k / factorial(k) for k in range(alarms + 1))
        low, high = (rate, high) if likely > 0.05 else (low, rate)
    return high / checks


def page() -> str:
    """Return docs/results/false_alarms.md."""
    found = lines()
    text = [
        "# False alarms: clean runs that were accused",
        "",
        "Made by `python -m lockstep.scripts.studies.false_alarms` (resumable; its lines are "
        "[false_alarms.jsonl](false_alarms.jsonl)) "
        f"with torch {torch.__version__.split('+')[0]}, jax {jax.__version__} on {platform.machine()} "
        f"({platform.system()}), CPU. A check is one verdict on one step, made of some hundred comparisons; it is "
        "accused if a single one is out of bounds. Random models (1–4 layers, 16–256 hidden, one to all KV heads, tied "
        "or not, biases or not, 16–320 tokens a sequence), initial and trained weights, uneven loss weights, real "
        "text. Bounds: core/parity/measures/calibrated_bounds.json and calibrated_bounds.py, measured on other draws "
        "(docs/results/calibration.md).",
        "",
        "| recipe | shapes | checks | comparisons | accused | rate, 95 % upper bound |",
        "|---|---|---|---|---|---|",
    ]
    totals = [0, 0, 0]
    for label in RECIPES:
        of = [line for line in found if line["label"] == label]
        checks, comparisons = sum(x["checks"] for x in of), sum(x["comparisons"] for x in of)
        alarms = sum(len(x["accused"]) for x in of)
        totals = [a + b for a, b in zip(totals, (checks, comparisons, alarms), strict=True)]
        rate = f"{upper_bound(alarms, checks):.2%}" if checks else "not measured"
        text.append(f"| {label} | {len(of)} | {checks:,} | {comparisons:,} | {alarms} | {rate} |")
    rate = f"{upper_bound(totals[2], totals[0]):.3%}" if totals[0] else "not measured"
    text += [f"| **all** | | {totals[0]:,} | {totals[1]:,} | {totals[2]} | {rate} |", ""]
    text += ["\n\n".join(part.replace("\n", " ") for part in EARLIER.split("\n\n")), ""]
    nearest: dict[str, float] = {}
    for line in found:
        for link, strain in line["nearest"].items():
            nearest[link] = max(nearest.get(link, 0.0), strain)
    closest = sorted(nearest.items(), key=lambda item: -item[1])[:5]
    if closest:
        said = "; ".join(f"{link}: {strain:.2f}" for link, strain in closest)
        text += [f"Clean comparisons that came nearest to their bound (1 is the bound): {said}.", ""]
    if accused := [f"- {x['label']}, draw {x['draw']}: {said}" for x in found for said in x["accused"]]:
        text += ["## Accused", "", *accused, ""]
    return "\n".join(text)


def main() -> None:
    """Run the missing draws, then write the page."""
    options = tyro.cli(FalseAlarms, description=__doc__)
    if unknown := set(options.labels) - RECIPES.keys():
        sys.exit(f"not rows: {', '.join(sorted(unknown))}; they are {'; '.join(RECIPES)}")
    os.environ[here.FOLDER] = "off"
    started = time.perf_counter()
    if not options.page:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
        results = JsonLines(RESULTS)
        with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=4) as pool:
            for line in pool.imap_unordered(run_draw, list(missing(options))):
                results.append(line)
                said = f"{line['label']}, draw {line['draw']}: {line['checks']} checks, {len(line['accused'])} accused"
                print(f"{said}, {line['seconds']} s", file=sys.stderr, flush=True)
                if options.minutes and time.perf_counter() - started > 60 * options.minutes:
                    pool.terminate()
                    break
        results.close()
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
