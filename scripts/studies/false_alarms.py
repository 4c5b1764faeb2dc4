"""The rate of false alarms: random models, random and trained weights, thousands of checks. Resumable.

    python -m lockstep.scripts.studies.false_alarms --jobs 3            the missing draws, then the page
    python -m lockstep.scripts.studies.false_alarms "bf16, compiled"    that row alone
    python -m lockstep.scripts.studies.false_alarms --page              the page alone, from the finished draws

The page is docs/results/false_alarms.md.

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
EARLIER = """## Earlier rounds

Each earlier round had narrower bounds, and its draws are not used again:

| round | accused | checks |
|---|--:|--:|
| first | 2 | 864 |
| second | 11 | 1,872 |
| third | 5 | 3,936 |
| fourth, the last one before the levers | 0 | 10,080 |
| fifth, before bounds on single elements and before a check judged the step's own weights | 0 | 8,256 |
| sixth, before means over layers | 0 | 552 |

Every accusation was examined, and its cause became part of the bounds:

- Sums in FP32, errors that one early rounding passes on to all later results, one token that outweighs all others,
  and a run of one letter.
- **Muon.** The norm of one matrix lay at a tie of bf16, and torch rounds that norm to bf16. Lockstep's Muon no longer
  rounds it. Muon's draws started over.
- **Random casts.** Under the first bounds of casts 3 of 48 compiled checks were accused. In some, one element of a
  small gradient, at a tie, was the whole distance: a few elements at a tie no longer count as a distance, of a tensor
  or of one of its rows and columns. In others, attention's gradient of k had bounds from only 8 shapes: compiled
  programs were measured on 30 more shapes, with Lockstep's casts and with others. Draw 5016 was accused until then,
  and later by a mean over layers; draw 5000 was accused by the compiler's bridge. Whole steps of compiled programs
  now have bounds of their own under other casts, from 22 shapes.

On another processor, an Intel Xeon, thirty checks were accused, and six rules were corrected:

- Three checks had a column in which one element at a tie outweighed all others. A row or column with at most two
  unequal elements is now judged by its elements.
- Two checks of FP16's draw 5001 had 28 tokens of a run of one letter with the same numbers, one of them at a tie.
  Before an accusation each distinct token now counts once.
- One check of compiled bf16 compared the lengths of a gradient in both programs, and one token outweighed all others:
  the twin had a single row exact by chance. Errors of either side now weigh a row.
- In another check an ulp of one loss weight changed the rounding of a whole token. Now two tokens get the ulp in
  turn.
- One check of Muon had four sampled tokens, one of which carried the twin's error. Tokens now count by that error.
- With torch's loss head 22 of 48 checks were accused: with one weight an ulp larger it scales every gradient
  differently. The weight is now an ulp smaller.

These draws were repeated. Other earlier checks still count, because each of these rules except the last accuses no
more than the earlier rule. A line made before a kind of check existed has no result for it. Such checks are: the step
compared with itself under other weights, evaluation of all sequences, the rates of later steps, Muon's lengths,
values that are only reported, sampling at a drawn place, and two steps in a row.

Later findings:

- **FP8, delayed scaling.** One compiled check of draw 5000 was accused: a gradient's amax in the training program was
  1.6 % from that of the tapped tensor. Two compiled programs differ by FP8's own errors. The tapped program is now
  compared with its own tensors, within a rounding to bf16, and the other program with it, within both errors. The
  draw was repeated.
- **FP16.** Checks begin at the loss scale of the run's start. At 2²⁰, where gradients of a small model nearly
  overflow, 10 of 15 clean checks of `lockstep parity` were accused: a micro-batch alone has larger gradients than in
  its step, and overflowed although the step did not. It is now computed at a smaller loss scale. Tests cover this; no
  line here counts for it.
- **8-bit AdamW of bitsandbytes, two steps in a row.** The first such checks accused 30 of 48, of draw 5003: the
  library stores a block of zeros as the code of −0.993 and the scale 0, which reads as −0; a loaded state had 0
  there, or the reverse. Zeros now have one sign, and the draw was repeated.
- **8-bit AdamW of torchao.** The same link accused every first step, in commits of 2026-11-26 up to 67badbc: before
  that step the moments have no codes, and after a load they have the codes of zeros. No line here began in this way,
  as these lines are older than that link; a check of the 1.24B model found it. Checksums are now of codes in both
  cases, and tests check a first step of every optimizer. Earlier lines have no result for the links after a step:
  another batch, scores and samples, a step while a checkpoint is written, a step from a restored checkpoint, and a
  third step.
- **8-bit AdamW of bitsandbytes, later steps.** The first checks of moments and weights in later steps accused seven
  of 28, draws 5007 to 5013. A parameter's rows did not fill whole blocks of 256 codes (414 rows of 72), so its last
  part began within a block. `parity.update` always had the same fault. Parts now begin with a block, and these draws
  were repeated. Earlier lines have no result for that link. Loss and gradients of a first step are also compared with
  those of the same step as a later one; only the newest lines of 8-bit AdamW and of bf16's random casts have that.
- **An end of text.** 114 lines of Llama, 456 checks of 17 kinds, none of them compiled, also had an end of text among
  the examined tokens, except for FP8. Each first check of them had a step that is not finite, a loss scale
  that grows and a full history of amaxes. All lines of the other families had these too, and no other line had.
- **bf16 products in FP32.** On a CPU without AVX-512 these products are computed in FP32 and rounded
  (docs/results/narrow_products.md). So were those of 144 checks of bf16: draws 5016 of documents, 5018 of accumulation,
  and 5004 of compiled accumulation. None was accused.
- **The head by oneDNN's block product** (`precision.cpu_products = "brgemm"`, docs/results/wide_product.md). 156
  checks of Llama had it: draws 5009 to 5015 of bf16 compiled, and 5009 to 5014 of FP8 row-wise compiled; and all of the
  compiled families. None was accused.
- **FP32 products by oneDNN in compiled programs** (`precision.cpu_products = "onednn"`). 96 checks had them: draws 5004
  of FP32 compiled, and 5001 to 5007 of compiled Llama in FP32. None was accused.
- **Attention by oneDNN's block product** (`attention.kernel = "flash_brgemm"`). 372 checks had it: draws 5002 to 5009
  of GPT-2, Qwen 2 and Llama in bf16, 5001 to 5004 of compiled Llama in bf16, 5004 and 5013 to 5015 of two ranks,
  and 5016 of FP8 delayed. None was accused.
- **FP32 products and attention by oneDNN's block product.** 156 checks had these products: draws 5002 to 5004 of Llama,
  5002 and 5003 of GPT-2 and Gemma 2, and 5008 to 5010 of FP32 compiled and of compiled Llama, all in FP32. All but
  Gemma 2's had this attention too. None was accused.
- **Attention by the block product without AVX-512.** 216 checks had it, on a CPU with AVX2 alone: draws 5004 to 5012 of
  GPT-2 in FP32; in bf16, multiplied in FP32, 5009 to 5013 of GPT-2 and 5010 to 5013 of Qwen 2. None was accused.
- **FP32, gradients whose terms cancel.** One check of GPT-2's draw 5001 was accused: with one loss weight an ulp
  larger, a gradient of q moved by 1.15e-4 of its length, and 1e-4 was allowed. The twin's own error was 3.7e-3 of it.
  Two results with independent errors of the twin's size are allowed now, and the draw was repeated.
- **Sampling at a drawn place.** One of 16 checks of FP16's draw 5004 was accused, by 0.5 %: seventeen tokens of one
  sequence share errors of the keys and values that they read, and now count as four. The bound is based on this check
  too, and the draw was repeated.

During training a check examines other sequences each time; the count is of the first and the last micro-batch."""
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
        "cpu": torch.backends.cpu.get_cpu_capability(),
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
    text += [EARLIER, ""]
    # Older lines do not name them.
    by_cpu: dict[str, int] = {}
    for line in found:
        if cpu := line.get("cpu"):
            by_cpu[cpu] = by_cpu.get(cpu, 0) + line["checks"]
    if by_cpu:
        said = "; ".join(f"{cpu}: {checks:,} checks" for cpu, checks in sorted(by_cpu.items()))
        text += [f"The newest lines name the instructions that torch used on the CPU. {said}.", ""]
    nearest: dict[str, float] = {}
    for line in found:
        for link, strain in line["nearest"].items():
            nearest[link] = max(nearest.get(link, 0.0), strain)
    closest = sorted(nearest.items(), key=lambda item: -item[1])[:5]
    if closest:
        said = "; ".join(f"{link}: {strain:.2f}" for link, strain in closest)
        text += [f"The clean comparisons nearest to their bound, as a share of it: {said}.", ""]
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
