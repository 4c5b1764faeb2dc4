"""Bounds of tensor comparisons: measured extremes of clean runs, by recipe and kind of comparison.

`python -m lockstep.scripts.studies.calibrate` writes `calibrated_bounds.json`. The file holds the extremes of clean
runs for each recipe (precision policy, eager or compiled) and each kind (a forward stage judged locally, NLL end to
end, gradients by kind of parameter, moments, update). A bound is such an extreme, widened by a stated margin on its
logarithm. The same script checks the bounds on separate runs (docs/results/calibration.md).

A ratio of norms over few numbers scatters more. The logarithm of the ratio of two norms of n independent errors has a
standard deviation of order 1/√n. The cosine between an error and the truth is of order 1/√n too. Extremes are therefore
stored, and bounds given, in units of `scatter(n)`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from lockstep.core.components.cast_plan import LOCKSTEP, NARROW
from lockstep.core.components.optimizers import all_rules
from lockstep.core.components.precision import POLICIES, PrecisionPolicy
from lockstep.core.config.schema import ModelConfig, RunConfig
from lockstep.core.errors import UserError
from lockstep.core.model.families import graph_of
from lockstep.core.model.graph import OUTPUT, Operation
from lockstep.core.model.groups import update_rules
from lockstep.core.parity.measures import here, peak_bounds
from lockstep.core.parity.measures.distances import Distances
from lockstep.core.parity.measures.peak_bounds import Result, Sharp
from lockstep.core.parity.measures.peaks import FEW
from lockstep.core.parity.measures.scatter import scatter
from lockstep.core.parity.measures.stretches import STRETCH, stretches
from lockstep.core.parity.measures.verdict import Measure
from lockstep.core.parity.reference.stages import (
    chain,
    forward_stages,
    is_library_head,
    keeps_product,
    rounds_operands,
)

# Bounds are the calibration's extremes times this factor (for log-excess, distance and gain). End to end the factor is
# larger: one early rounding that differs changes many numbers together, so the tails are heavier than the count of
# numbers implies. Small effects are found by local comparisons.
MARGIN, MARGIN_END_TO_END = 2.0, 5.0
# No bound is narrower than this. A result rounded to a narrow operand dtype has the twin's bits except in the few
# elements at a tie, which another order of summation changes. A result in FP32 differs by the order of its sums, which
# no policy declares: the error of a sequential sum of n terms grows as √n, that of a sum in blocks grows less, and the
# ratio of two such errors reaches this value. At 3e-7, a factor of a few is not a fault.
LEAST_EXCESS, LEAST_DISTANCE, LEAST_GAIN = 1.15, 0.6, 0.1
LEAST_OF_SUMS = 4.0
# Another order of summation changes the noise that core/parity/measures/compare.py measures by up to this factor.
NOISE_MARGIN = 4.0
# A mean over all gradients, or over the NLL of all tokens, scatters a tenth as much as one tensor. A mean over the
# checks of a run scatters a third of that. Clean bf16 runs reached 1.11 and 1.03; other libraries' code reached 1.08 in
# one check.
OF_MANY = ("gradients/together", "end_to_end/forward/nll")
# Suffix of an end-to-end kind: the mean of one tensor over all layers.
OVER_LAYERS = "/layers"
LEAST_OF_MANY, LEAST_OVER_CHECKS = 1.3, 1.1
# There is no truth above FP64. Two orders of summation of some thousand terms differ by about 1e-15 at each stage of
# the chain.
FP64_LIMIT = 1e-12
# The FP32 results of two libraries from the same weights differ by some ulp, and the ratio of such errors scatters
# widely. End to end, a relative error below this (80 ulp) is never reported. A larger one in a gradient is always
# reported.
FP32_LIMIT = 1e-5


# Separator before the plan of casts in a kind of comparison.
CAST = " with "
# Suffix of kinds of whole-step comparisons under a plan of casts other than Lockstep's own.
OTHER_PLAN = " under other casts"
OF_A_STEP = ("end_to_end/", "gradients/", "bridge/")

# Number of independent errors in one token, or in one row of a matrix.
OF_A_ROW = 16


def noise_margin(terms: int) -> float:
    """Return the largest ratio of a sum's noise to the reference's, for n = `terms`: at least √(n / 2·log₂ n).

    In sequential order, roundings to the size of the partial sums add up to u·√(n²/2)/√3 of a term. In pairwise order,
    which libraries use, they add up to u·√(n·log₂ n)/√3 (Higham 1993, The accuracy of floating point summation).
    """
    return max(NOISE_MARGIN, math.sqrt(terms / (2 * math.log2(terms)))) if terms > 1 else NOISE_MARGIN


def independent(shape: tuple[int, ...]) -> int:
    """Estimate the number of independent errors in an array of this shape: its size, or less for a narrow matrix.

    A gradient Σ g·xᵀ shares each error of g along a row and each error of x along a column. A matrix of 8 rows
    therefore scatters like a tensor of a few hundred numbers, however long its rows are.
    """
    return min(math.prod(shape), OF_A_ROW * min(shape)) if len(shape) == 2 else math.prod(shape)


def carriers(x: np.ndarray) -> int:
    """Estimate the number of independent errors that dominate a tensor's error, from its energy; at most `independent`.

    The numbers of a token share its errors. If the gradient of one token outweighs all others (a small RMS before a
    norm, or a confident prediction), its errors lie along the truth, and a ratio of two such errors has the scatter of
    two single draws. The number of tokens is their participation ratio (Σe)² / Σe² with e their energies. For a matrix
    of a parameter, rows and columns are counted in the same way.
    """
    count = independent(x.shape)
    if x.ndim < 2:
        return count
    rows = x if x.ndim == 2 else x.reshape(-1, math.prod(x.shape[2:]))
    along_rows, along_columns = np.empty(len(rows)), np.zeros(rows.shape[1])
    for where in stretches(len(rows), max(1, STRETCH // max(1, rows.shape[1]))):
        energy = np.square(rows[where], dtype=float)
        along_rows[where] = energy.sum(1)
        along_columns += energy.sum(0)
    axes = (along_rows, along_columns) if x.ndim == 2 else (along_rows,)
    return min(count, *(OF_A_ROW * participation(along) for along in axes))


def participation(energy: np.ndarray) -> int:
    """Return the participation ratio (Σe)² / Σe² of non-negative numbers: the number that dominate their sum.

    If all are equal, this is their count.
    """
    # Scale by a power of two near the largest, because squares of energies of 1e160 overflow FP64.
    share = np.ldexp(energy, -int(np.frexp(energy.max())[1])) if energy.size else energy
    squares = float(np.square(share).sum())
    ratio = float(share.sum()) ** 2 / squares if squares else math.nan
    return max(1, round(ratio)) if math.isfinite(ratio) else energy.size


@dataclass(frozen=True)
class Extremes:
    """The extremes of clean runs: max |log excess|, max twin distance, max |gain difference| / twin's error.

    Each is in units of `scatter(size)`.
    draws: number of comparisons.
    sharp: extremes of the measures of single elements, rows and columns (peak_bounds.py).
    over_checks: max |mean of log excess over the checks of a run|, in units of the scatter of all their numbers.
    sharp and over_checks are None if they were not measured; then they set no bound.
    where: the origin of values that are not in the shipped table, in words.
    """

    log_excess: float
    distance: float
    gain: float
    draws: int
    sharp: Sharp | None = None
    over_checks: float | None = None
    where: str = ""

    @classmethod
    def of(cls, d: Distances, size: int) -> Extremes:
        """Return the extremes of one comparison of `size` numbers."""
        gain = abs(d.gain_difference) / d.twin_relative_error if d.twin_relative_error else 0.0
        width = scatter(size)
        return cls(abs(math.log(d.excess)) / width, d.twin_distance / width, gain / width, 1, Sharp.of(d, size))

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Extremes:
        """Read a row of a table. Raises TypeError for unknown or missing fields."""
        sharp = row.get("sharp")
        return cls(**{**row, "sharp": Sharp(**sharp) if sharp else None})

    def to_json(self) -> dict[str, Any]:
        """Return the row of a table."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}

    def __or__(self, other: Extremes) -> Extremes:
        """Return the larger of each pair of extremes."""
        sharp = self.sharp | other.sharp if self.sharp and other.sharp else self.sharp or other.sharp
        over_checks = max((x for x in (self.over_checks, other.over_checks) if x is not None), default=None)
        most = {name: max(getattr(self, name), getattr(other, name)) for name in ("log_excess", "distance", "gain")}
        return Extremes(
            **most,
            draws=self.draws + other.draws,
            sharp=sharp,
            over_checks=over_checks,
            where=self.where or other.where,
        )


def least(recipe: str, kind: str) -> tuple[float, float]:
    """Return the narrowest bounds on excess and distance that a comparison may have."""
    scope, _, stage = kind.partition("/")
    place, _, role = stage.partition("/")
    products = rounds_operands(place) and role != "bias"
    rounded = scope in ("end_to_end", "gradients", "bridge") or products or CAST in kind
    narrow = policy_of(recipe).rounds
    if is_rounded_update(kind) or (narrow and rounded):
        return LEAST_OF_MANY if is_mean(kind) else LEAST_EXCESS, LEAST_DISTANCE
    return LEAST_OF_SUMS, LEAST_OF_SUMS


def result_of(recipe: str, kind: str) -> Result:
    """Return how the result of a comparison is rounded."""
    if least(recipe, kind)[0] == LEAST_OF_SUMS:
        return "sum"
    scope, _, stage = kind.partition("/")
    if scope == "bridge":
        return "same"
    if CAST in kind:
        return "rounded"
    place, _, role = stage.partition("/")
    kept = scope in ("forward", "backward") and keeps_product(place, role or OUTPUT)
    return "kept" if kept else "rounded"


def is_rounded_update(kind: str) -> bool:
    """Return whether the optimizer rounds this moment or update to fewer bits than the stream dtype, in any policy."""
    return any(kind == f"{rule.bounds}/{what}" for rule in all_rules() for what in rule.rounded)


def is_mean(kind: str) -> bool:
    """Return whether a kind compares a mean over tensors, layers or tokens."""
    return kind in OF_MANY or kind.endswith(OVER_LAYERS)


def margin(kind: str) -> float:
    """Return the margin on the extremes of clean runs."""
    return MARGIN_END_TO_END if kind.startswith(OF_A_STEP) else MARGIN


def recipe_of(config: RunConfig) -> str:
    """Return the recipe whose clean runs set the bounds.

    Compiled programs round at other places than eager ones and have their own recipes. So do programs on a GPU: their
    shipped bounds are the CPU's, widened by the error of the GPU's sums (accumulators.py).
    """
    program = "compiled" if config.compile.enabled else "eager"
    return f"{config.precision.policy}/{program}{here.ON_GPU if config.device == 'cuda' else ''}"


def compiled(recipe: str) -> str:
    """Return the recipe of the same policy for compiled programs."""
    return f"{policy_of(recipe).name}/compiled{_where(recipe)}"


def policy_of(recipe: str) -> PrecisionPolicy:
    """Return the precision policy of a recipe. Raises UserError if there is none."""
    try:
        return POLICIES[recipe.partition("/")[0]]
    except KeyError:
        raise _not_measured(recipe) from None


def gradient_kind(model: ModelConfig, parameter: str) -> str:
    """Return the kind of a gradient, which sets its bounds: its parameter group, with queries and keys as a group."""
    graph = graph_of(model)
    if parameter in graph.into_scores:
        return "gradients/qk"
    group = graph.parameters[parameter].group
    return f"gradients/{'vocabulary' if group in ('embedding', 'head') else group}"


def local_kind(config: RunConfig, stage: Operation, role: str | None = None) -> str:
    """Name the kind of a stage's output from its own inputs, or of its gradient with respect to input `role`.

    If the plan of casts rounds this result, the name ends with `CAST` and the plan's choice.
    """
    kind = f"forward/{stage.id}" if role is None else f"backward/{stage.id}/{role}"
    choice = config.precision.plan.option(stage.kind, role or OUTPUT)
    return f"{kind}{CAST}{choice}" if choice else kind


def tap_kind(stage: str, phase: str) -> str:
    """Name the kind of a tap's value or gradient end to end.

    A library's loss head has the same kind as Lockstep's: `nll`.
    """
    return f"end_to_end/{phase}/{'nll' if is_library_head(stage) else stage}"


def bridge_kind(model: ModelConfig, parameter: str) -> str:
    """Name the kind of a comparison of a parameter's gradients in the training program and in the tapped program."""
    return f"bridge/{gradient_kind(model, parameter).removeprefix('gradients/')}"


def under_plan(config: RunConfig, kind: str) -> str:
    """Name the kind under the run's plan of casts.

    Comparisons of whole steps have separate bounds under other plans.
    """
    other = kind.startswith(OF_A_STEP) and config.precision.plan != LOCKSTEP
    return f"{kind}{OTHER_PLAN}" if other else kind


def under_own_plan(kind: str) -> str:
    """Name the same kind under Lockstep's own plan of casts."""
    return kind.removesuffix(OTHER_PLAN)


def update_kind(config: RunConfig, parameter: str, what: str) -> str:
    """Name the kind of a moment or of `update`, with the parameter's update rule if the rule has separate bounds."""
    rule = update_rules(config)[parameter]
    return f"{rule.bounds}/{rule.variant(what, config.optim)}" if rule.bounds else what


def all_kinds(config: RunConfig) -> set[str]:
    """Return every kind of comparison with calibrated bounds that a check of a run makes."""
    kinds = {"gradients/together"}
    for name, rule in update_rules(config).items():
        kinds |= {gradient_kind(config.model, name), bridge_kind(config.model, name)}
        kinds |= {update_kind(config, name, what) for what in (*rule.moments, "update")}
    for stage in forward_stages(config.model, loss=config.loss):
        kinds |= {local_kind(config, stage), tap_kind(stage.id, "forward"), tap_kind(stage.id, "backward")}
        kinds |= {local_kind(config, stage, role) for role in (*stage.reads, *stage.params)}
    return kinds


TABLE = resources.files("lockstep.core.parity.measures").joinpath("calibrated_bounds.json")


@cache
def table() -> dict[str, dict[str, Extremes]]:
    """Return recipe → kind → extremes: the shipped ones, joined with those measured on this machine."""
    every = {f"{recipe}{where}": rows for where in ("", here.ON_GPU) for recipe, rows in shipped().items()}
    return {recipe: with_those_here(rows, here.read(recipe)) for recipe, rows in every.items()}


def shipped() -> dict[str, dict[str, Extremes]]:
    """Read recipe → kind → extremes from calibrated_bounds.json. A policy may use another policy's (`bounds_of`)."""
    raw: dict[str, Any] = json.loads(TABLE.read_text())
    found = {
        recipe: {kind: Extremes.from_json(row) for kind, row in kinds.items()}
        for recipe, kinds in raw["recipes"].items()
    }
    for policy in POLICIES.values():
        for program in ("eager", "compiled") if policy.bounds_of else ():
            found[f"{policy.name}/{program}"] = found[f"{policy.bounds_of}/{program}"]
    return found


def with_those_here(rows: dict[str, Extremes], measured: here.Here | None) -> dict[str, Extremes]:
    """Join a recipe's extremes with those of this machine. Measurements on this machine never narrow a bound."""
    if measured is None:
        return rows
    joined = dict(rows)
    for kind, row in measured.rows.items():
        if under_own_plan(kind) in rows:
            more = replace(Extremes.from_json(row), where=measured.words)
            joined[kind] = rows[kind] | more if kind in rows else more
    return joined


def widened(recipe: str, measured: here.Here) -> tuple[str, ...]:
    """List, in words, the extremes that grow when the measurements of this machine are joined with the shipped ones."""
    rows = shipped()[recipe.removesuffix(here.ON_GPU)]
    joined = with_those_here(rows, measured)
    found = []
    for kind in sorted(kind for kind in measured.rows if under_own_plan(kind) in rows):
        before, after = _under_its_plan(rows, kind), _under_its_plan(joined, kind)
        pairs = [(name, getattr(before, name), getattr(after, name)) for name in ("log_excess", "distance", "gain")]
        if before.sharp and after.sharp:
            names = ("largest", "row", "column", "row_gain", "unequal")
            pairs += [(name, getattr(before.sharp, name), getattr(after.sharp, name)) for name in names]
        found += [f"{kind}: {name}: {old:.3g} → {new:.3g}" for name, old, new in pairs if new > old]
    return tuple(found)


def require(config: RunConfig) -> None:
    """Raise UserError unless clean runs of the run's recipe were measured. Called before anything starts.

    Clean runs are needed for every kind of comparison of the run's optimizer and loss head. FP64 needs none, because
    its bound is absolute.
    """
    if config.precision.exact:
        return
    recipe = recipe_of(config)
    for rule in update_rules(config).values() if config.device == "cuda" else ():
        if rule.no_twin_on_cuda:
            raise UserError(rule.no_twin_on_cuda)
    # A model of two blocks contains every stage: one block has a window and one has none.
    biases = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
    of_all = config.model.model_copy(update={"layers": 2, "tied": False, **biases})
    kinds = all_kinds(config.model_copy(update={"model": of_all}))
    if missing := sorted(kind for kind in kinds if kind not in table().get(measured_under(recipe, kind), {})):
        shown = recipe.removesuffix(here.ON_GPU)
        what = f"{shown} ({', '.join(missing)})" if kinds & table().get(recipe, {}).keys() else shown
        how = f"{shown} --device cuda" if config.precision.chosen.on_tensor_cores else shown
        if all(map(of_library, missing)):
            how = f"{measured_under(shown, missing[0])} --parts {config.loss.chosen.stage} --device cuda"
        raise UserError(
            f"no clean runs of {what} were measured, so a check has no bounds: "
            f"run python -m lockstep.scripts.studies.calibrate {how} in a checkout, or leave the checks out"
        )


def measured_under(recipe: str, kind: str) -> str:
    """Return the recipe whose clean runs measure a kind.

    Muon and 8-bit AdamW compute in FP32 under every policy. A library's loss head is not part of the compiled program.
    Under FP8, the head, attention, and results that a plan of casts rounds stay in bf16.
    """
    operand = policy_of(recipe).operand
    if operand in NARROW and (CAST in kind or _of_attention(kind)):
        return f"{operand}/{recipe.partition('/')[2]}"
    if kind.partition("/")[0] in {rule.bounds for rule in all_rules() if rule.bounds}:
        return f"fp32/eager{_where(recipe)}"
    return f"{operand}/eager{_where(recipe)}" if of_library(kind) else recipe


def _where(recipe: str) -> str:
    return here.ON_GPU if recipe.endswith(here.ON_GPU) else ""


def _of_attention(kind: str) -> bool:
    scope, _, stage = kind.partition("/")
    return scope in ("forward", "backward") and chain().kinds.get(stage.partition("/")[0]) == "attention"


def of_library(kind: str) -> bool:
    """Return whether a kind compares a library's loss head."""
    return is_library_head(kind.partition("/")[2].partition("/")[0])


@dataclass(frozen=True)
class Limits:
    """Bounds of one comparison: excess in [1/excess, excess], |gain difference| / twin's error, twin distance."""

    excess: float
    gain: float
    distance: float


def limits(recipe: str, kind: str, size: int) -> Limits:
    """Return the bounds of a comparison of `size` numbers. Raises UserError for an uncalibrated recipe."""
    clean, kind = extremes_of(recipe, kind), under_own_plan(kind)
    wider, width = margin(kind), scatter(size)
    least_excess, least_distance = least(recipe, kind)
    distance = min(max(wider * clean.distance, least_distance), _sharper_distance(recipe, kind, clean))
    return Limits(
        excess=max(_widened(clean.log_excess, kind), least_excess) ** width,
        # An error in a random direction has a component along the truth. Allow half the bound on the distance for it.
        gain=width * max(wider * clean.gain, _least_gain(distance), distance / 2 if margin(kind) == MARGIN else 0.0),
        distance=width * distance,
    )


def _sharper_distance(recipe: str, kind: str, clean: Extremes) -> float:
    if clean.sharp is None:
        return math.inf
    return peak_bounds.distance_limit(clean.sharp, result_of(recipe, kind))


def _least_gain(distance: float) -> float:
    """Return the narrowest gain bound.

    An error within half the distance bound has no larger component along the truth.
    """
    return min(LEAST_GAIN, distance / 2)


def _with_slack(limit: Limits, recipe: str, kind: str, d: Distances) -> Limits:
    """Widen FP32 end-to-end limits to at least `FP32_LIMIT`."""
    if policy_of(recipe).in_fp32 and kind.startswith(OF_A_STEP):
        slack = FP32_LIMIT / d.twin_relative_error if d.twin_relative_error else 0.0
        return Limits(max(limit.excess, slack), max(limit.gain, slack), max(limit.distance, slack))
    return limit


def too_good(recipe: str, kind: str) -> bool:
    """Return whether an error far below the twin's is a fault: the declared narrow format is not in force.

    A small error is no fault in FP32, where another order of summation may be more accurate than the twin's. A small
    error is no fault in a single gradient end to end, because a gradient that is the remainder of a cancellation may
    happen to be exact. The comparison of all gradients together still detects the fault.
    """
    single = kind.startswith(("end_to_end/backward/", "gradients/")) and kind != "gradients/together"
    return is_rounded_update(kind) or (not policy_of(recipe).in_fp32 and not single)


def _widened(log_excess: float, kind: str) -> float:
    """Widen an extreme of the excess by its margin: a multiple for single tensors end to end, a power otherwise."""
    reached = math.exp(log_excess)
    return reached * MARGIN_END_TO_END if _is_multiple(kind) else reached**MARGIN


def _is_multiple(kind: str) -> bool:
    return margin(kind) == MARGIN_END_TO_END and not is_mean(kind)


def mean_over_checks(recipe: str, kind: str, excess: float, size: int, checks: int) -> Measure | None:
    """Bound the geometric mean of a kind's excess over several checks. Returns None if it is not calibrated.

    size: count of numbers in all checks together.
    """
    reached = extremes_of(recipe, kind).over_checks
    if reached is None or not policy_of(recipe).rounds:
        return None
    width = scatter(size)
    high = max(math.exp(MARGIN * reached), LEAST_OVER_CHECKS) ** width
    how = f"^{MARGIN:g}" if math.exp(MARGIN * reached) > LEAST_OVER_CHECKS else f"least {LEAST_OVER_CHECKS:g}"
    basis = f"geometric mean over {checks} checks; clean runs reached {math.exp(reached):.3g}, {how}"
    return Measure("excess", excess, 1 / high, high, basis)


def extremes_of(recipe: str, kind: str) -> Extremes:
    """Return the extremes that bound a comparison. Raises UserError for an uncalibrated recipe."""
    try:
        found = _under_its_plan(table()[measured_under(recipe, kind)], kind)
    except KeyError:
        raise _not_measured(f"{recipe} ({kind})") from None
    product, cast, _ = kind.partition(CAST)
    if cast and rounds_operands(product.split("/")[1]) and result_of(recipe, product) == "rounded":
        # Clean runs under any plan measure the product's own roundings. Clean runs under this plan measure the share of
        # elements that its rounding makes equal.
        joined = found | extremes_of(recipe, product)
        sharp = joined.sharp and found.sharp and replace(joined.sharp, unequal=found.sharp.unequal)
        return replace(joined, sharp=sharp)
    return found


def _under_its_plan(rows: Mapping[str, Extremes], kind: str) -> Extremes:
    """Return bounds of `kind` joined with those of Lockstep's own plan, if another plan of casts was measured."""
    own = rows[under_own_plan(kind)]
    return own | rows[kind] if kind != under_own_plan(kind) and kind in rows else own


def _not_measured(what: str) -> UserError:
    how = "run python -m lockstep.scripts.studies.calibrate in a checkout"
    return UserError(f"no clean runs of {what} were measured; {how}")


def measures(recipe: str, kind: str, d: Distances, size: int) -> tuple[Measure, ...]:
    """Return the measures of a comparison of `size` numbers with bounds; none for an uncalibrated mean over layers.

    Raises UserError for an uncalibrated recipe.
    """
    if policy_of(recipe).exact:
        basis = f"FP64 has no truth above it: relative error at most {FP64_LIMIT:.0e}"
        return (Measure("relative_error", d.relative_error, None, FP64_LIMIT, basis),)
    own = under_own_plan(kind)
    if own.endswith(OVER_LAYERS) and own not in table().get(measured_under(recipe, own), {}):
        return ()
    clean, calibrated, kind = extremes_of(recipe, kind), limits(recipe, kind, size), own
    limit = _with_slack(calibrated, recipe, kind, d)
    wider, width = margin(kind), scatter(size)
    slack = f"; never below a relative error of {FP32_LIMIT:.0e}" if limit != calibrated else ""

    def why(extreme: float, bound: float, least: float, times: str) -> str:
        few = f", few numbers {times[0]}{width:.2g}" if width > 1.05 else ""
        how = f"least {least:g}" if bound <= least else times
        return f"{clean.draws} clean draws reached {extreme:.3g}, {how}{few}{slack}"

    power = f"{wider:g}"
    least_excess, least_distance = least(recipe, kind)
    distance_basis = why(clean.distance, wider * clean.distance, least_distance, f"×{power}")
    sharper = _sharper_distance(recipe, kind, clean)
    if clean.sharp is not None and sharper < max(wider * clean.distance, least_distance):
        times = f"×{peak_bounds.REACH:.2g}"
        distance_basis = why(clean.sharp.distance, sharper, peak_bounds.LEAST[result_of(recipe, kind)].distance, times)
    # The distance, and its component along the truth, that a few elements at a tie can cause.
    ties = peak_bounds.distance_of_ties(result_of(recipe, kind), d) if clean.sharp else 0.0
    if ties > limit.distance:
        limit = replace(limit, distance=ties, gain=max(limit.gain, ties))
        distance_basis = f"at most {FEW} elements, each within a rounding at a tie"
    # Between two FP32 programs, the bound is a relative error of FP32_LIMIT, and single elements have none.
    held = clean.sharp if not (kind.startswith("bridge/") and policy_of(recipe).in_fp32) else None
    sharp = tuple(peak_bounds.measures(held, result_of(recipe, kind), d, size, wider)) if held else ()
    if kind.startswith("bridge/"):
        return _with_basis(
            (Measure("twin_distance", d.twin_distance, None, limit.distance, distance_basis), *sharp), clean
        )
    reached = math.exp(clean.log_excess)
    how = f"×{power}" if _is_multiple(kind) else f"^{MARGIN:g}"
    excess_basis = why(reached, _widened(clean.log_excess, kind), least_excess, how)
    gain_basis = why(clean.gain, wider * clean.gain, LEAST_GAIN, f"×{power}")
    if calibrated.gain > 1.001 * width * max(wider * clean.gain, LEAST_GAIN):
        gain_basis = f"half the bound on the distance (of clean gains the largest was {clean.gain:.3g})"
    gain_basis += f", of the error {d.twin_relative_error:.1e}"
    reach = limit.gain * d.twin_relative_error
    found = [
        Measure("excess", d.excess, 1 / limit.excess if too_good(recipe, kind) else None, limit.excess, excess_basis),
        Measure("gain_difference", d.gain_difference, -reach, reach, gain_basis),
        Measure("twin_distance", d.twin_distance, None, limit.distance, distance_basis),
    ]
    if policy_of(recipe).in_fp32 and kind.startswith("gradients/"):
        most = max(FP32_LIMIT, limit.excess * d.twin_relative_error)
        basis = f"FP32 gradients: {FP32_LIMIT:.0e}, or the bound on excess where the twin's own error makes that more"
        found.append(Measure("relative_error", d.relative_error, None, most, basis))
    return _with_basis((*found, *sharp), clean)


def _with_basis(found: tuple[Measure, ...], clean: Extremes) -> tuple[Measure, ...]:
    return tuple(replace(m, basis=f"{m.basis}; {clean.where}") for m in found) if clean.where else found
