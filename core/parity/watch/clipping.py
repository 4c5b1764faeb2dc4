"""Judge the clipping of one step of a user's loop, from its gradients before and after."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from lockstep.core.backend import Arrays
from lockstep.core.parity.measures import scalar_bounds
from lockstep.core.parity.measures.verdict import Finding, Measure
from lockstep.core.parity.watch.findings import exact
from lockstep.core.parity.watch.one_coefficient import FORMATS, coefficients
from lockstep.core.parity.watch.step import Step, norm, squares
from lockstep.core.parity.watch.update_rules import EPSILON

# Roundings between gradients and their coefficient, in the format of the gradients: the norm of a tensor, the norm of
# the norms, and a quotient. Each is half a unit. Just above a power of two, half a unit counts double in relative
# terms.
AS_NARROW = 3


def clipping(step: Step, clip_norm: float | None) -> Iterator[Finding]:
    """Compare the optimizer's gradients with those of backward. The factor must be min(1, limit / (norm + 1e-6))."""
    stepped = {n: g for s in step.before for n, g in s.grads.items()}
    shared = [name for name in step.grads if name in stepped]
    changed = [n for n in shared if not np.array_equal(step.grads[n], stepped[n], equal_nan=True)]
    # A gradient that no optimizer holds must not be scaled.
    changed += [n for s in step.before for n in s.groups if n in step.grads and n not in stepped]
    old, new = norm({n: step.grads[n] for n in shared}), norm({n: stepped[n] for n in shared})
    if clip_norm is None:
        basis = "no clip_norm= was declared, so the optimizer uses the gradients of backward unchanged"
        note = f"norm {old:.6g} became {new:.6g}" if changed else ""
        yield exact("clip_coefficient", "gradients", len(changed), max(len(step.grads), 1), basis, note, "update")
    elif not math.isfinite(old):
        return
    elif changed or old > clip_norm * (1 + _coefficient_slack(step)):
        dot = math.fsum(float(np.vdot(step.grads[n].astype(np.float64), stepped[n])) for n in shared)
        k = dot / old**2 if old else 1.0
        apart = math.sqrt(math.fsum(squares(stepped[n], k, step.grads[n]) for n in shared))
        due = old * min(1.0, clip_norm / (old + 1e-6))
        yield clip_finding(step, clip_norm, due, k * old, apart / new if new else 0.0, exactly=stepped)


def clipped_before(step: Step, t: Arrays, clip_norm: float) -> bool:
    """Return whether the gradients that were read already have the norm of the clipping limit."""
    slack = _norm_slack(step) + 1e-6 / clip_norm
    return norm(t) > clip_norm * (1 + slack) and abs(norm(step.grads) / clip_norm - 1) <= slack


def clip_finding(
    step: Step, clip_norm: float, due: float, new: float, apart: float, note: str = "", exactly: Arrays | None = None
) -> Finding:
    """Build the finding of clipping.

    due, new: the correct norm after clipping, and the norm that was found.
    apart: distance of the clipped gradients from a common multiple of the gradients, relative to their norm.
    exactly: the clipped gradients. Where they are narrow, their bits bound the coefficient closely.
    """
    error, slack = abs(new / due - 1) if due else 0.0, _norm_slack(step)
    basis = "a norm summed in the gradients' precision, as in core/parity/measures/scalar_bounds.py"
    if exactly is not None and due and _narrow(step):
        old = norm({name: step.grads[name] for name in exactly if name in step.grads})
        wanted, slack = due / old, _coefficient_slack(step)
        basis = "a norm summed in FP32, and a product that is rounded a few times"
        if (found_at := coefficients(step.grads, exactly, step.dtypes)) is not None:
            low, high = found_at
            error = max(low / wanted - 1, 1 - high / wanted, 0.0)
            slack = _norm_slack(step, EPSILON["float32"])
            basis = (
                f"a norm summed in FP32; the clipped gradients show a coefficient of {low:.6g} to {high:.6g}, "
                f"due is {wanted:.6g}"
            )
            if slack < error <= AS_NARROW * _eps(step):
                note = f"the error of a norm in {' or '.join(_narrow(step))}, in which torch's clip_grad_norm_ computes"
    found = (
        Measure("norm_error", error, None, slack + 1e-6 / clip_norm, basis),
        Measure(
            "ulp", apart / _eps(step), None, scalar_bounds.FEW_ULPS, "all gradients times one coefficient, rounded once"
        ),
    )  # fmt: skip
    return Finding(
        stage="clip_coefficient", tap="clip_coefficient", phase="update", layer=None, scope="local", measures=found,
        size=1, note=note,
    )  # fmt: skip


def _narrow(step: Step) -> list[str]:
    """Return the formats among the gradients' dtypes that are narrower than FP32."""
    return sorted({step.dtypes[name] for name in step.grads} & set(FORMATS))


def _coefficient_slack(step: Step) -> float:
    """Return the relative error that rounding may cause in the norm of clipped gradients over the norm before.

    Narrow gradients are rounded a few times, by half a unit each. Their norm is in FP32.
    """
    if not _narrow(step):
        return _norm_slack(step)
    return _norm_slack(step, EPSILON["float32"]) + scalar_bounds.FEW_ULPS * _eps(step) / 2


def _norm_slack(step: Step, eps: float | None = None) -> float:
    """Return the largest relative error of a correct norm of these gradients (core/parity/measures/scalar_bounds.py).

    eps: unit of the format in which the norm is summed. Default: the widest unit among the gradients.
    """
    terms = max((g.size for g in step.grads.values()), default=1) + len(step.grads)
    chain = min(terms, scalar_bounds.LONGEST_RUN) / scalar_bounds.LANES
    return (scalar_bounds.sum_bound(terms)[0] + chain / 4 + 2 * scalar_bounds.FEW_ULPS) * (eps or _eps(step))


def _eps(step: Step) -> float:
    return max((EPSILON[step.dtypes[name]] for name in step.grads), default=EPSILON["float32"])
