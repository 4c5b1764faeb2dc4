"""The distances of three arrays as their definitions stand, all at once in FP64."""

from __future__ import annotations

import numpy as np


def plain_distances(candidate: np.ndarray, twin: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """By the names of core/parity/measures/distances.py, where no error is below its floor."""
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
