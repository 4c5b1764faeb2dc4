"""Name a common cause of broken gradients in a user's loop."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lockstep.core.parity.measures.decode import typical_ratio
from lockstep.core.parity.measures.verdict import Finding
from lockstep.core.parity.watch.findings import few
from lockstep.core.parity.watch.limits import Precision
from lockstep.core.parity.watch.snapshot import Answer
from lockstep.core.parity.watch.step import Step

# Number of trailing zero bits in the FP32 mantissas of numbers from a narrower format, and the cause to name.
PRODUCTS = (
    (16, "only bf16 numbers, the results of bf16 products: is autocast on (precision='bf16')?"),
    (13, "only FP16 numbers, the results of FP16 products: `watch` has no twin for FP16 autocast, but one for bf16"),
)


def cause_of(step: Step, truth: Answer, findings: Sequence[Finding], precision: Precision) -> str | None:
    """Name a common cause of the broken gradients, if there is one: a factor or a narrower format."""
    broken = [f.tap for f in findings if f.stage == "gradients" and not f.ok and f.tap in step.grads]
    lengths, cosines, along = [], [], []
    for name in broken:
        c, t = step.grads[name].astype(np.float64).ravel(), truth.grads[name].astype(np.float64).ravel()
        sizes = float(np.linalg.norm(c)), float(np.linalg.norm(t))
        if not (all(sizes) and all(map(math.isfinite, sizes))):
            return None
        lengths.append(sizes[0] / sizes[1])
        cosines.append(float(c @ t) / (sizes[0] * sizes[1]))
        along.append(float(c @ t) / sizes[1] ** 2)
    if not broken:
        return None
    many = f"all {len(broken)} broken gradients" if len(broken) > 1 else f"the gradient of {broken[0]}"
    middle = float(np.median(lengths))
    alike = max(abs(r / middle - 1) for r in lengths)
    if min(cosines) > 0.999 and abs(middle - 1) > 10 * max(alike, max(1 - c for c in cosines), 1e-4):
        return f"{many}: right direction, {middle:.6g} times the right length{_of_a_scaler(middle)}"
    if typical := typical_ratio(along):
        return f"{many}: {typical[0]:.3g} times the right length in the median, with a scatter of {typical[1]:.2g}"
    for zeros, words in PRODUCTS if precision == "fp32" else ():
        if narrow := [name for name in broken if is_narrow(step.grads[name], zeros)]:
            return f"{few(narrow)}: {words}"
    return None


def _of_a_scaler(factor: float) -> str:
    """Name a GradScaler if a factor is a power of two from 2^4 on, to the rounding of FP16. Empty otherwise."""
    power = round(math.log2(factor))
    if power < 4 or abs(factor / 2.0**power - 1) > 2.0**-8:
        return ""
    return f", near 2^{power}: under a GradScaler call scaler.unscale_(optimizer) before the block"


def is_narrow(gradient: np.ndarray, zeros: int) -> bool:
    """Return whether the last `zeros` bits of all FP32 numbers are zero.

    False for another dtype, or for fewer than 64 non-zero numbers. By chance, 64 numbers have this once in 2^832.
    """
    numbers = gradient[gradient != 0]
    if gradient.dtype != np.float32 or numbers.size < 64:
        return False
    return not (numbers.view(np.uint32) & ((1 << zeros) - 1)).any()
