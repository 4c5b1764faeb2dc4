"""Number formats of tensors in files: widened without loss, or rounded where that was asked for."""

from __future__ import annotations

import numpy as np

from lockstep.core.arrays import bit_equal

# Format, as safetensors calls it, that weights may have.
WEIGHTS = ("F64", "F32", "F16", "BF16")
# Formats that can be written → their names to numpy and to transformers.
NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}


def widened(array: np.ndarray, dtype: type[np.floating]) -> np.ndarray | None:
    """Convert numbers to a wider format; None if one of them is lost there or is not finite."""
    with np.errstate(over="ignore"):
        wide = array.astype(dtype)
    exact = array.dtype == wide.dtype or bit_equal(wide.astype(array.dtype), array)
    return wide if exact and bool(np.isfinite(wide).all()) else None


def narrowed(array: np.ndarray, form: str) -> np.ndarray:
    """Round to a format of NAMES, to nearest, ties to even."""
    import ml_dtypes  # noqa: F401 - makes bf16 a format of numpy's

    return array.astype(np.dtype(NAMES[form]))
