"""The distances of three arrays by their definitions, in FP64 and without chunks."""

from __future__ import annotations

import numpy as np


def plain_distances(candidate: np.ndarray, twin: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Return the distances by their names in core/parity/measures/distances.py.

    They are equal to those only if no error is below the floor there.
    """
    c, w, t = (x.astype(np.float64).ravel() for x in (candidate, twin, truth))
    honest = np.linalg.norm(w - t)
    return {
        "excess": float(np.linalg.norm(c - t) / honest),
        "gain_difference": float((c @ t - w @ t) / (t @ t)),
        "twin_distance": float(np.linalg.norm(c - w) / honest),
        "relative_error": float(np.linalg.norm(c - t) / np.linalg.norm(t)),
        "twin_relative_error": float(honest / np.linalg.norm(t)),
        "unequal": float(np.mean(candidate != twin)),
    }
