"""Find bias over checks, which no single step shows. Rounding errors have zero mean, the errors of a bug do not.

Notation: e = S(c − w) is the sketch (or the small array itself) of candidate minus twin in one comparison, h = ‖S(w −
t)‖ the twin's own error with the lower limit of core/parity/measures/distances.py, T the number of checks so far::

    bias      B = ‖Σ e/h‖ / √T                 bounded if honest, b·√T if each e/h has the same component of norm b
    gain bias U = |Σ (gain(c) − gain(w))/ε| / T   ε = h/‖t‖; of order 1/√T if honest, u if each length error is u·ε

Each check is in units of its own h, so all checks have the same weight. In Σe / √Σh² (equal if h is constant), the
large gradients of the first steps would outweigh the next thousand checks.

**Bound of B.** The single-step bound D gives ‖e‖ ≤ D·h. So for differences that are uncorrelated between checks, E‖Σ
e/h‖² = Σ E‖e/h‖² ≤ T·D². The sum is close to normal in each of its n independent coordinates. So B²/E[B²] is at most a
χ²ₙ/n, which exceeds 1 + 2√(x/n) + 2x/n with probability at most exp(−x) (Laurent & Massart 2000, lemma 1); n is the
number of independent numbers, at most the sketch's 1,021.

**Bound of U.** Clean runs stayed within G / MARGIN, with G the single-step bound. So the mean of T such differences
differs from its expectation by more than (G / MARGIN)·√(2·ln(2/p) / T) with probability at most p (Azuma 1967, for
differences of any distribution). The mean never exceeds G, because a single check would then have exceeded G.

**Systematic and honest differences.** Two correct libraries also have constant differences: FMA or not, rsqrt or 1/√.
In 300 consecutive checks of torch against JAX (FP32 and bf16, eager, two blocks) the constant part of e/h reached
0.061·D and 0.084 (first moments; RMSNorm 0.025, RoPE 0.016). For the gain it reached 0.25·G (first moments, where the
twin's compiler fuses the multiply and the add; RMSNorm 0.13·G, attention 0.11·G). Without an allowance each of these
becomes an alarm after some hundred checks. The allowance is twice the measured value: β = min(D/8, 0.17) and G/2. With
it::

    B ≤ √((1 + 2√(x/n) + 2x/n)·D² + T·β²)        U ≤ min(G, G/2 + (G / MARGIN)·√(2·ln(2/p) / T))

**Correlated checks.** Honest differences of a slowly changing state may be correlated. For an AR(1) process with
lag-one correlation ρ, E[B²] grows by (1 + ρ)/(1 − ρ). Clean runs stay within D / MARGIN, which leaves a factor of
MARGIN² = 4. So with ρ ≤ 0.6 a run of any length stays within the bound. Measured: |ρ| ≤ 0.08, first moments 0.21.

**On a GPU** the error of a matrix unit's sums is common to all checks of a product
(core/parity/measures/accumulators.py). Let s be this error in units of the twin's error: s is added to D, β and the
bound of U.

**Power.** After T checks the sums detect a constant part b > bound(B)/√T, which falls from D to β: with D = 0.3 it is
0.045 after 200 checks. The sums detect a pure length error u > bound(U), which falls from G to G/2. A bias smaller than
β and G/2 is never detected.

**A bias that begins late** has little weight in the history: after 5,000 clean checks its detection takes hundreds
more. So a second sum has exponential weights (λ = 0.99, weight λᵃ for a check that is a checks old). All of the above
holds for weighted sums, with Σλᵃ·e/h / √Σλ²ᵃ for B, the weighted mean for U, and (Σλᵃ)²/Σλ²ᵃ, at most 199, in place of
T.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.sketch import K
from lockstep.core.parity.measures.calibrated_bounds import MARGIN
from lockstep.core.parity.measures.distances import FLOOR_ULPS
from lockstep.core.parity.measures.verdict import Measure

Key = tuple[str, ...]

# The λ of each sum: the whole run, and about the last two hundred checks.
MEMORIES = (1.0, 0.99)
SUFFIXES = ("", "_recent")
# Probability that one honest statistic exceeds its bound. 10,000 checks of 500 comparisons with four statistics each
# are 2e7 tests. So at most one run in 50,000 has a false alarm, even if all statistics were as large as the bounds
# allow.
CHANCE = 1e-12
# Systematic differences between correct libraries: twice the largest in 300 real checks (see above). For the distance
# the allowance is a share of D, and at most SYSTEMATIC_MOST of the twin's error, because a larger D comes from chaos.
SYSTEMATIC_DISTANCE, SYSTEMATIC_MOST, SYSTEMATIC_GAIN = 1 / 8, 0.17, 1 / 2
# Honest checks stay within D / MARGIN. If all of them were equal, B would be √T·D / MARGIN, which is below D up to this
# many checks.
LEAST_CHECKS = int(MARGIN**2) + 1
# The curves have this many points per octave of T, enough for a plot: some 900 points after 10,000 checks.
POINTS = 128
COLUMNS = 1 + 2 * len(MEMORIES)
VERSION = 1


def limits(
    checks: float, distance_bound: float, gain_bound: float, size: int = K, common: float = 0.0
) -> tuple[float, float]:
    """Return the bounds of B and U after `checks` (effective) checks of `size` independent numbers (see the module).

    distance_bound, gain_bound: the single-step bounds D and G, in units of the twin's error.
    common: error of a matrix unit's sums that all checks have in common (core/parity/measures/accumulators.py), in the
    same units.
    """
    n, x = min(size, K), -math.log(CHANCE)
    scatter = 1.0 + 2.0 * math.sqrt(x / n) + 2.0 * x / n
    systematic = min(SYSTEMATIC_DISTANCE * distance_bound, SYSTEMATIC_MOST) + common
    chance = math.sqrt(2.0 * math.log(2.0 / CHANCE) / checks) / MARGIN
    return (
        math.sqrt(scatter * (distance_bound + common) ** 2 + checks * systematic**2),
        gain_bound * min(1.0, SYSTEMATIC_GAIN + chance) + common,
    )


@dataclass
class _Sums:
    """The sums of one key, for M memories and L numbers.

    total: Σ λᵃ·e/h, (M, L) FP64.
    gain: Σ λᵃ·u, (M,).
    weight: Σ λᵃ, (M,).
    power: Σ λ²ᵃ, (M,).
    checks: number of checks.
    curve: rows of (T, B, U, recent B, recent U), flat.
    """

    total: np.ndarray
    gain: np.ndarray
    weight: np.ndarray
    power: np.ndarray
    checks: int = 0
    curve: array[float] = field(default_factory=lambda: array("d"))

    def add(self, scaled: np.ndarray, gain: float) -> None:
        forget = np.asarray(MEMORIES)
        self.total = forget[:, None] * self.total + scaled
        self.gain = forget * self.gain + gain
        self.weight = forget * self.weight + 1.0
        self.power = forget**2 * self.power + 1.0
        self.checks += 1
        every = max(1, 2 ** (self.checks.bit_length() - POINTS.bit_length()))
        if self.checks % every == 0:
            self.curve.extend((float(self.checks), *np.column_stack(self.statistics()).ravel().tolist()))

    def statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Return B and U by memory, each (M,)."""
        return np.linalg.norm(self.total, axis=1) / np.sqrt(self.power), np.abs(self.gain) / self.weight

    @property
    def effective(self) -> np.ndarray:
        """Effective number of checks by memory, (Σ λᵃ)² / Σ λ²ᵃ, which is T for λ = 1: (M,)."""
        return self.weight**2 / self.power


class Bias:
    """Running sums of signed differences by key, for example `("local", "blocks.0.attn.q")`.

    Add only checks that hold. One that does not has its own alarm, and would remain in the sums for the rest of the
    run. Memory for 1,021 numbers: 16 KiB a key, and 36 KiB of curve after 10,000 checks.
    """

    def __init__(self) -> None:
        self._sums: dict[Key, _Sums] = {}

    def add(
        self,
        key: Key,
        apart: np.ndarray,
        error: np.ndarray,
        truth: np.ndarray,
        stream: type[np.floating],
        gain_difference: float | None = None,
    ) -> bool:
        """Add one check. Returns False, and adds nothing, if a number is not finite: then the check itself has failed.

        apart: (L,) sketch of c − w, or the array itself.
        error: the same of w − t, (L,).
        truth: the same of t, (L,).
        L is fixed for each key.
        stream: dtype whose ulp is the lower limit of the twin's error, as in core/parity/measures/distances.py.
        gain_difference: ⟨c − w, t⟩/⟨t, t⟩ of the whole tensors; computed from the sketches if None.
        Raises ValueError if the lengths differ from each other or from the key's earlier ones.
        """
        e, w, t = (np.asarray(x, np.float64) for x in (apart, error, truth))
        sums = self._sums.get(key)
        if not (e.ndim == 1 and len(e) and e.shape == w.shape == t.shape) or (sums and sums.total.shape[1] != len(e)):
            before = "" if sums is None else f", earlier ({sums.total.shape[1]},)"
            raise ValueError(f"{key}: one length each and always: {e.shape}, {w.shape}, {t.shape}{before}")
        if not (np.isfinite(e).all() and np.isfinite(w).all() and np.isfinite(t).all()):
            return False
        scale = float(np.linalg.norm(t))
        floor = max(FLOOR_ULPS * float(np.finfo(stream).eps) * scale, float(np.finfo(np.float32).tiny))
        honest = max(float(np.linalg.norm(w)), floor)
        if gain_difference is None:
            gain_difference = float(e @ t) / scale**2 if scale else 0.0
        if not math.isfinite(gain_difference):
            return False
        if sums is None:
            memories = len(MEMORIES)
            sums = _Sums(np.zeros((memories, len(e))), np.zeros(memories), np.zeros(memories), np.zeros(memories))
            self._sums[key] = sums
        sums.add(e / honest, gain_difference * scale / honest)
        return True

    @property
    def keys(self) -> tuple[Key, ...]:
        """Every key, in the order of its first check."""
        return tuple(self._sums)

    def length(self, key: Key) -> int | None:
        """Return L, the count of numbers in each check of this key; None before its first check."""
        return self._sums[key].total.shape[1] if key in self._sums else None

    def forget(self, key: Key) -> None:
        """Discard this key's sums."""
        self._sums.pop(key, None)

    def checks(self, key: Key) -> int:
        """Return T, the number of checks of this key."""
        return self._sums[key].checks if key in self._sums else 0

    def curve(self, key: Key) -> np.ndarray:
        """Return (points, 5) float64: T, B, U, recent B and recent U, with `POINTS` points per octave of T."""
        return np.asarray(self._sums[key].curve).reshape(-1, COLUMNS)

    def measures(
        self, key: Key, distance_bound: float, gain_bound: float, size: int = K, common: float = 0.0
    ) -> tuple[Measure, ...]:
        """Return `bias`, `gain_bias`, `bias_recent`, `gain_bias_recent` with bounds; none before `LEAST_CHECKS` checks.

        distance_bound, gain_bound: the single-step bounds of this comparison
        (core/parity/measures/calibrated_bounds.py), both in units of the twin's error.
        size: count of independent numbers in the tensor.
        common: as in `limits`.
        """
        if self.checks(key) < LEAST_CHECKS:
            return ()
        sums = self._sums[key]
        found: list[Measure] = []
        for suffix, bias, gain, signed, counted in zip(
            SUFFIXES, *sums.statistics(), sums.gain / sums.weight, sums.effective, strict=True
        ):
            most, most_gain = limits(float(counted), distance_bound, gain_bound, size, common)
            over = f"{sums.checks} checks" if not suffix else f"the last checks, {counted:.0f} in effect"
            over += f" (+{common:.2g} for a matrix unit's sums)" if common else ""
            least = most / math.sqrt(counted)
            found += [
                Measure(
                    f"bias{suffix}",
                    float(bias),
                    None,
                    most,
                    f"{over}, each within {distance_bound:.3g} and uncorrelated; "
                    f"detects a constant part of {least:.2g} of the twin's error",
                ),
                Measure(
                    f"gain_bias{suffix}",
                    float(gain),
                    None,
                    most_gain,
                    f"{over}, each within ±{gain_bound:.3g}, of the twin's error; the mean is {signed:+.2g}",
                ),
            ]
        return tuple(found)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the state as arrays for one npz file. `from_arrays` restores the same bits."""
        sums = list(self._sums.values())
        curves = [self.curve(key) for key in self._sums]
        return {
            "version": np.asarray(VERSION),
            "memories": np.asarray(MEMORIES),
            "keys": np.asarray([json.dumps(key) for key in self._sums], np.str_),
            "lengths": np.asarray([s.total.shape[1] for s in sums], np.int64),
            "totals": np.concatenate([s.total for s in sums], axis=1) if sums else np.zeros((len(MEMORIES), 0)),
            "checks": np.asarray([s.checks for s in sums], np.int64),
            "scalars": np.asarray([(s.gain, s.weight, s.power) for s in sums]).reshape(-1, 3, len(MEMORIES)),
            "points": np.asarray([len(c) for c in curves], np.int64),
            "curves": np.concatenate(curves) if curves else np.zeros((0, COLUMNS)),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Bias:
        """Rebuild the sums from `to_arrays`. Raises UserError if they are incomplete or have another version."""
        try:
            version, memories = int(arrays["version"]), tuple(arrays["memories"].tolist())
            if (version, memories) != (VERSION, MEMORIES):
                raise UserError(f"these bias sums are of version {version} {memories}, not {VERSION} {MEMORIES}")
            count = len(arrays["keys"])  # without indices, np.split still returns one empty part
            totals = np.split(arrays["totals"], np.cumsum(arrays["lengths"])[:-1], axis=1)[:count]
            curves = np.split(arrays["curves"], np.cumsum(arrays["points"])[:-1])[:count]
            bias = cls()
            for text, total, checks, (gain, weight, power), curve in zip(
                arrays["keys"].tolist(), totals, arrays["checks"].tolist(), arrays["scalars"], curves, strict=True
            ):
                points = array("d", curve.ravel().tolist())
                bias._sums[tuple(json.loads(text))] = _Sums(
                    total.copy(), gain.copy(), weight.copy(), power.copy(), checks, points
                )
        except (KeyError, ValueError) as error:
            raise UserError(f"these bias sums are incomplete: {error}") from None
        return bias
