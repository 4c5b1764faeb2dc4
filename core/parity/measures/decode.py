"""The scalar-fault decoder: if a tensor has the right direction and a length wrong by r, find the meaning of r.

Such a tensor was multiplied by a factor. A training step has only few numbers that can be this factor: its accumulation
steps, its clip coefficient, the tokens it counts. With candidate c and truth t::

    r = ⟨c, t⟩ / ⟨t, t⟩        residual ρ = ‖c − r·t‖ / ‖t‖        cos = r / √(r² + ρ²)

**Right direction** means that the rest c − r·t is honest rounding: ρ/|r| is at most the excess bound times the twin's
relative error ε, so cos ≥ 1/√(1 + (excess·ε)²) ≈ 1 − (excess·ε)²/2.

**Measurement error of r.** The candidate's own rounding has a component along t of at most G·ε, with G the gain bound
in units of the twin's error. From sketches of K numbers, r is the regression of S(c) on S(t). Only the part *not* along
t disturbs it, with a standard deviation of ρ/√K, not |r|/√K.

**Chance of a false match.** A ratio drawn log-uniformly from [low, high] is within a relative tolerance τ of one of M
values with a probability of at most 2·M·τ / ln(high/low). `chance_of_a_match` computes the exact probability. For the
34 numbers of a small step (M = 116 with their inverses and the powers of two) over six decades it is 1.1 % at τ = 1e-3
and 1.1e-4 at 1e-5; the bounds are 1.7 % and 1.7e-4. 20,000 random draws agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.core.backend import Batch, StepRecord
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.groups import update_rules
from lockstep.core.model.names import parameter_shapes
from lockstep.core.parity.measures.distances import FLOOR_ULPS
from lockstep.core.train.schedule import learning_rate

# A loss scale is a power of two from 2^8 to 2^24 (torch.amp.GradScaler begins at 2^16). Other powers of two are tried
# up to 2^24.
SCALES, LARGEST = range(8, 25), 24
# The tolerance of r, in standard deviations of the sketch's sampling error.
CONFIDENCE = 6.0
# A median of fewer ratios has little meaning. NORMAL · median deviation is the standard deviation of normal numbers.
FEW, NORMAL = 5, 1.4826
# Counts that a program may get wrong if micro-batches differ, and the allowed probability of a false match.
COUNTS = ("the world size", "the accumulation steps", "world size × accumulation steps")
CHANCE = 0.05


@dataclass(frozen=True)
class Direction:
    """The angle and length of a candidate relative to the truth.

    cosine: cosine of the angle between them; 0 if one of them is zero.
    ratio: r.
    residual: ‖c − r·t‖ / ‖t‖.
    uncertainty: standard deviation of `ratio` from sketching; 0 for whole arrays.
    """

    cosine: float
    ratio: float
    residual: float
    uncertainty: float

    @classmethod
    def of(cls, ratio: float, residual: float, sketched: int = 0) -> Direction:
        """Build from r and ‖c − r·t‖ / ‖t‖. sketched: size of the sketches they come from, 0 for whole arrays."""
        if not math.isfinite(ratio):
            return cls(0.0, math.nan, math.nan, math.nan)
        length = math.hypot(ratio, residual)
        uncertainty = residual / math.sqrt(sketched) if sketched else 0.0
        return cls(ratio / length if length else 0.0, ratio, residual, uncertainty)

    def right(self, twin_relative_error: float, excess_bound: float = 3.0) -> bool:
        """Return whether only the length differs: ρ ≤ excess_bound · ε · |r|. True for c = 0."""
        if not math.isfinite(self.ratio) or not math.isfinite(self.residual):
            return False
        honest = excess_bound * max(twin_relative_error, FLOOR_ULPS * float(np.finfo(np.float32).eps))
        return self.residual <= honest * abs(self.ratio)

    def tolerance(self, twin_relative_error: float, gain_bound: float = 1.0) -> float:
        """Return the relative error of r: G·ε of rounding, and 6 standard deviations of the sketch.

        Infinite at r = 0.
        """
        rounding = max(gain_bound * twin_relative_error, FLOOR_ULPS * float(np.finfo(np.float32).eps))
        return rounding + CONFIDENCE * self.uncertainty / abs(self.ratio) if self.ratio else math.inf


def direction(c: np.ndarray, t: np.ndarray, sketched: bool = False) -> Direction:
    """Return cosine and length ratio of candidate `c` to truth `t`, which are arrays of one shape, or their sketches.

    A zero truth or a number that is not finite gives a NaN ratio. Raises ValueError if shapes differ or are empty.
    """
    if c.shape != t.shape or not c.size:
        raise ValueError(f"one shape, not empty: candidate {c.shape}, truth {t.shape}")
    c64, t64 = (np.asarray(x, np.float64).ravel() for x in (c, t))
    power = float(t64 @ t64)
    if not (np.isfinite(c64).all() and 0 < power < math.inf):
        return Direction.of(math.nan, math.nan)
    ratio = float(c64 @ t64) / power
    residual = float(np.linalg.norm(c64 - ratio * t64)) / math.sqrt(power)
    return Direction.of(ratio, residual, c64.size if sketched else 0)


def explain(
    found: Direction,
    known: Mapping[str, float],
    twin_relative_error: float,
    gain_bound: float = 1.0,
    excess_bound: float = 3.0,
) -> list[str]:
    """Describe a wrong length in words. Returns no words if the direction is wrong too, or if no known number fits."""
    if not found.right(twin_relative_error, excess_bound):
        return []
    return decode(found.ratio, known, found.tolerance(twin_relative_error, gain_bound))


def decode(ratio: float, known: Mapping[str, float], tolerance: float) -> list[str]:
    """Return sentences that explain `ratio`, the likeliest first; none if it is 1 or nothing fits within the tolerance.

    known: name → positive number (`known_scalars`, and for a moment or an update `scalars_of_rule`), the simplest
    first. Each is tried as factor and as divisor. Powers of two and a flipped sign are tried too.
    tolerance: relative error of `ratio`.

    Numbers of equal value are named together, because nothing distinguishes them. The order among those that fit is by
    ½·(3·deviation/tolerance)², which takes the tolerance as three standard deviations, plus the place among `known`,
    from 0 to 1. So numbers that fit about equally well are ordered by simplicity.
    """
    if ratio == 0:
        return ["missing: the length is zero (×0)"]
    if not math.isfinite(ratio) or not math.isfinite(tolerance):
        return []
    size, flipped = abs(ratio), ratio < 0
    if abs(size - 1) <= tolerance:
        return ["sign flipped (×−1)"] if flipped else []
    groups: dict[tuple[str, float], tuple[float, list[str]]] = {}
    every = list(_candidates(known))
    for place, (name, value, how) in enumerate(every):
        deviation = abs(size / value - 1)
        if deviation > tolerance:
            continue
        shown = f"{how}{_number(value if how == '×' else 1 / value)}"
        cost = 0.5 * (3 * deviation / tolerance) ** 2 + place / len(every)
        groups.setdefault((shown, round(math.log(value), 9)), (cost, []))[1].append(name)
    start = "sign flipped, and length off by" if flipped else "length off by"
    return [
        f"{start} {' or '.join(dict.fromkeys(names))} ({shown})"
        for (shown, _), (_, names) in sorted(groups.items(), key=lambda item: item[1][0])
    ]


def typical_ratio(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Return the median of the tensors' ratios to the truth, and their scatter.

    The scatter is 1.4826 times the median deviation from the median, which is the standard deviation of normal numbers.
    Returns None if there are fewer than FEW ratios, if the median is not positive, if three times the scatter reaches
    the median's distance from 1, or if the median is within a factor of √2 of 1. A wrong count makes a factor of at
    least 2, or at most ½.
    """
    finite = np.asarray([ratio for ratio in ratios if math.isfinite(ratio)])
    if len(finite) < FEW:
        return None
    middle = float(np.median(finite))
    scatter = NORMAL * float(np.median(np.abs(finite - middle)))
    if middle <= 0 or abs(math.log(middle)) < math.log(2) / 2 or 3 * scatter >= abs(middle - 1):
        return None
    return middle, scatter


def decode_typical(ratios: Sequence[float], known: Mapping[str, float]) -> str:
    """Name the number of ranks or of accumulation steps by which tensors are wrong in the median, or nothing.

    If micro-batches differ and are counted wrongly, the direction of a single tensor is wrong as well, and the tensors'
    ratios scatter about a count. The tolerance is this scatter. No name is given if more than one in 20 random ratios,
    drawn as in `chance_of_a_match` over six decades, would get a name.
    """
    found = typical_ratio(ratios)
    counts = {name: known[name] for name in COUNTS if name in known}
    if found is None or not counts:
        return ""
    middle, scatter = found
    tolerance = max(scatter / middle, 1e-3)
    tried = [(name, value, how) for name, one in counts.items() for value, how in ((one, "×"), (1 / one, "÷"))]
    chance = 2 * len({value for _, value, _ in tried}) * tolerance / math.log(1e6)
    near = [(name, how) for name, value, how in tried if abs(middle / value - 1) <= tolerance]
    if not near or chance > CHANCE:
        return ""
    names, (first, how) = " or ".join(dict.fromkeys(name for name, _ in near)), near[0]
    return (
        f"length off by {names} ({how}{_number(counts[first])}) in the median of {len(ratios)} tensors: "
        f"×{middle:.3g}, which scatter by {scatter:.2g}"
    )


def chance_of_a_match(known: Mapping[str, float], tolerance: float, low: float, high: float) -> float:
    """Return the probability that `decode` explains a ratio drawn log-uniformly from [low, high].

    The probability is the length of the union of all intervals [v·(1 − τ), v·(1 + τ)] on a logarithmic axis, without
    the interval around 1.
    """

    def interval(value: float) -> tuple[float, float]:
        below = math.log(value) + (math.log1p(-tolerance) if tolerance < 1 else -math.inf)
        return max(below, math.log(low)), min(math.log(value) + math.log1p(tolerance), math.log(high))

    def measure(values: list[float]) -> float:
        covered, reached = 0.0, -math.inf
        for start, end in sorted(interval(value) for value in values):
            covered += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return covered

    values = [value for _, value, _ in _candidates(known)]
    return (measure([*values, 1.0]) - measure([1.0])) / math.log(high / low)


def known_scalars(config: RunConfig, batch: Batch, record: StepRecord, step: int) -> dict[str, float]:
    """Return numbers by which a step could multiply or divide wrongly, simplest first. None of them is 1.

    step: number of the checked step, counted from 1.
    A ratio to another step's number is the factor that results if the step before or after is taken for this one.
    Numbers of the optimizer are in `scalars_of_rule`.
    """
    train, optim, model = config.train, config.optim, config.model
    weights = batch.weights.astype(np.float64)
    total, counted = float(weights.sum()), int(np.count_nonzero(weights))
    rows = train.micro_batch_of(weights.shape[1])
    micros = batch.micro_batches(rows) if len(weights) % rows == 0 else []
    lr = learning_rate(optim, step, train.steps)

    def due(other: int) -> float:
        return learning_rate(optim, other, train.steps) / lr if lr else 0.0

    known: dict[str, float] = {
        "the world size": train.ranks,
        "the accumulation steps": train.accumulation,
        "world size × accumulation steps": train.ranks * train.accumulation,
        "the clip coefficient": record.clip_coefficient,
        "the gradient norm": record.grad_norm,
        "√head_dim": math.sqrt(model.head_dim),
        "query heads a KV head": model.heads / model.kv_heads,
        "the sequences of the batch": len(weights),
        "the sequences of a micro-batch": rows,
        "the sequence length": weights.shape[1],
        "the tokens of the batch": weights.size,
        "the tokens of a micro-batch": rows * weights.shape[1],
        "the loss weight of the batch": total,
        "loss weight / tokens": total / weights.size,
        "tokens with weight / tokens": counted / weights.size,
        "loss weight / tokens with weight": total / counted if counted else 0.0,
    }
    if len(micros) > 1 and total:
        for which, micro in (("first", micros[0]), ("last", micros[-1])):
            share = float(micro.weights.sum(dtype=np.float64)) / total
            known |= {
                f"the {which} micro-batch's share of the loss weight": share,
                f"the {which} micro-batch's share × accumulation steps": share * len(micros),
            }
    known |= {
        "the learning rate of the next step": due(step + 1),
        "the peak learning rate for this step's": optim.peak_lr / lr if lr else 0.0,
        "the learning rate": lr,
    }
    if step > 1:
        known["the learning rate of the step before"] = due(step - 1)
    return _factors(known)


def scalars_of_rule(config: RunConfig, name: str, number: int) -> dict[str, float]:
    """Return the numbers of the update rule of one parameter. None of them is 1.

    number: number of the update, counted from 1; skipped steps are not counted.
    """
    shape = parameter_shapes(config.model)[name]
    return _factors(update_rules(config)[name].factors(shape, config.optim, number))


def _factors(known: Mapping[str, float]) -> dict[str, float]:
    return {name: float(v) for name, v in known.items() if math.isfinite(v) and v > 0 and v != 1}


def _candidates(known: Mapping[str, float]) -> Iterator[tuple[str, float, str]]:
    """Yield (name, ratio that it explains, × or ÷): each known number as factor and as divisor, then powers of two."""
    for name, value in known.items():
        if value <= 0 or not math.isfinite(value):
            raise ValueError(f"{name}: a positive number, not {value}")
        yield name, value, "×"
        yield name, 1.0 / value, "÷"
    for power in range(1, LARGEST + 1):
        name = "a power of two" + (", as a loss scale is" if power in SCALES else "")
        yield name, 2.0**power, "×"
        yield name, 2.0**-power, "÷"


def _number(value: float) -> str:
    return f"{value:.0f}" if value == round(value) and value < 1e9 else f"{value:.6g}"
