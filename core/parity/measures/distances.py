"""Excess, gain and twin distance: how a candidate's error compares with that of an honest implementation.

With candidate c, twin w (the reference at the candidate's declared precision) and truth t (the reference far above
it)::

    excess          = ‖c − t‖ / ‖w − t‖          near 1 when honest; far below 1: the declared precision is not in force
    gain difference = ⟨c, t⟩/⟨t, t⟩ − ⟨w, t⟩/⟨t, t⟩   sees errors of length that drown in quadrature
    twin distance   = ‖c − w‖ / ‖w − t‖          small where an honest stage reproduces its twin's bits

Norms are computed in FP64. Both error norms are floored at a few ulp of the *stream* dtype, so that a stage that is
exact on all sides (a table look-up) has excess 1 and distance 0, not 0/0. Why not of the operand dtype: a floor of a
few bf16 ulp would swallow every bf16 fault that there is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# An honest FP32 stage differs from its FP64 truth by about half an ulp an operation in each element; below two ulp
# (of the norm) a difference of rounding between two correct implementations is not worth a ratio.
FLOOR_ULPS = 2.0


@dataclass(frozen=True)
class Distances:
    """The three measures, ‖c − t‖/‖t‖, the twin's (floored) ‖w − t‖/‖t‖, and the share of unequal elements."""

    excess: float
    gain_difference: float
    twin_distance: float
    relative_error: float
    twin_relative_error: float
    unequal: float


def distances(
    candidate: np.ndarray, twin: np.ndarray, truth: np.ndarray, stream: type[np.floating], noise: float = 0.0
) -> Distances:
    """Compare three arrays of one shape; `stream` is the dtype whose ulp sets the floor.

    noise: an L2 norm below which errors are not told apart, where that is known to be above the floor.
    Non-finite values in the candidate that the twin does not have make every measure infinite. Raises ValueError if
    shapes differ or there is nothing to compare.
    """
    if not (candidate.shape == twin.shape == truth.shape):
        raise ValueError(f"shapes differ: candidate {candidate.shape}, twin {twin.shape}, truth {truth.shape}")
    if candidate.size == 0:
        raise ValueError("nothing to compare: the arrays are empty")
    if not (np.isfinite(candidate).all() and np.isfinite(twin).all() and np.isfinite(truth).all()):
        return Distances(np.inf, np.inf, np.inf, np.inf, np.inf, float(np.mean(candidate != twin)))
    unequal = float(np.mean(candidate != twin))
    c, w, t = (x.astype(np.float64).ravel() for x in (candidate, twin, truth))
    return ratios(c, w, t, stream, unequal, noise)


def ratios(
    c: np.ndarray, w: np.ndarray, t: np.ndarray, stream: type[np.floating], unequal: float, noise: float = 0.0
) -> Distances:
    """The measures of three float64 vectors: flattened tensors, or their sketches."""
    scale = float(np.linalg.norm(t))
    # A truth of all zeros (the gradient of an unused row) leaves only the smallest normal number as a floor.
    floor = max(FLOOR_ULPS * float(np.finfo(stream).eps) * scale, float(np.finfo(np.float32).tiny), noise)
    of_candidate, of_twin, apart = (float(np.linalg.norm(d)) for d in (c - t, w - t, c - w))
    honest = max(of_twin, floor)
    power = float(t @ t)
    return Distances(
        excess=max(of_candidate, floor) / honest,
        gain_difference=float((c - w) @ t) / power if power else 0.0,
        twin_distance=apart / honest,
        relative_error=of_candidate / scale if scale else (0.0 if of_candidate == 0 else np.inf),
        twin_relative_error=honest / scale if scale else np.inf,
        unequal=unequal,
    )
