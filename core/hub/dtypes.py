"""Number formats of tensors in files: widened without loss, or rounded where that was asked for."""

from __future__ import annotations

import numpy as np

from lockstep.core.arrays import bit_equal

# Format, as safetensors calls it, that weights may have.
WEIGHTS = ("F64", "F32", "F16", "BF16")


def widened(array: np.ndarray, dtype: type[np.floating]) -> np.ndarray | None:
    """The same numbers in a wider format, or None if one of them is lost there or is not finite."""
    with np.errstate(over="ignore"):
        wide = array.astype(dtype)
    exact = array.dtype == wide.dtype or bit_equal(wide.astype(array.dtype), array)
    return wide if exact and bool(np.isfinite(wide).all()) else None


def narrowed(array: np.ndarray, name: str) -> np.ndarray:
    """Round to a format: fp64, fp32 or bf16, to nearest, ties to even."""
    if name == "bf16":
        import ml_dtypes

        return array.astype(ml_dtypes.bfloat16)
    return array.astype({"fp32": np.float32, "fp64": np.float64}[name])
