"""Judge one step of a user's loop: gradients, loss and outputs end to end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from lockstep.core.backend import Arrays
from lockstep.core.errors import UserError
from lockstep.core.parity.measures import calibrated_bounds
from lockstep.core.parity.measures.distances import Distances, distances
from lockstep.core.parity.measures.scatter import scatter
from lockstep.core.parity.measures.verdict import Finding, Measure
from lockstep.core.parity.watch.clipping import clip_finding, clipped_before
from lockstep.core.parity.watch.findings import exact, few, layer_in, listed
from lockstep.core.parity.watch.limits import LOSS_UNITS, Extremes, Limits, Precision
from lockstep.core.parity.watch.snapshot import Answer
from lockstep.core.parity.watch.step import Step, Widened, norm, relative
from lockstep.core.parity.watch.uncovered import Uncovered

LEAST_TWIN_ERROR_BF16 = 1e-5
WORSE_TWIN = "the twin is worse than the candidate"


@dataclass
class Judge:
    """A judge of steps, with the bounds, and the measurements of calibrating checks.

    limits: None while calibrating.
    own: the twin is the candidate's own program.
    """

    precision: Precision
    limits: Limits | None
    own: bool = False
    extremes: Extremes = field(default_factory=Extremes)

    @property
    def stream(self) -> type[np.floating]:
        """The dtype whose ulp is the lower limit of every denominator."""
        return np.float64 if self.precision == "fp64" else np.float32

    def forward_backward(
        self, step: Step, truth: Answer, twin: Answer, clip_norm: float | None, missing: Uncovered, left_out: set[str]
    ) -> Iterator[Finding]:
        """Compare outputs, loss and gradients with the reference's, which have the model's names.

        left_out: names of parameters whose gradients are not compared.
        Raises UserError for gradients of another shape, and for a twin that does not round to the declared precision.
        """
        trainable = [name for name in step.params if name not in step.frozen]
        _check_shapes(step, truth, twin)
        extra = sorted(set(truth.grads) - set(step.params))
        absent = sorted(set(trainable) - (set(truth.grads) & set(twin.grads)))
        yield exact(
            "gradients", "names", len(extra) + len(absent), len(trainable), "both sides have every parameter",
            listed("the reference lacks", absent) + listed("the model lacks", extra),
        )  # fmt: skip
        if step.frozen:
            missing.append(f"gradients of {len(step.frozen)} frozen parameters: {few(sorted(step.frozen))}")
        both = [name for name in trainable if name in truth.grads and name in twin.grads]
        t: Arrays = Widened({name: truth.grads[name] for name in both})
        # The gradient of a narrow weight has its dtype, even if the reference computed in a wider one.
        w: Arrays = Widened({name: twin.grads[name] for name in both}, step.dtypes)
        error = relative(w, t)
        if self.precision == "bf16" and both and error < LEAST_TWIN_ERROR_BF16:
            raise UserError(
                f"the twin's gradients are {error:.0e} from the truth, as FP32's are, but precision is bf16: "
                "give the reference a twin that casts as the model does, reference(loss, twin=loss_in_bf16)"
            )
        if self.precision == "fp32" and any(twin.grads[name].dtype == np.float64 for name in both):
            raise UserError(
                "the reference computed in FP64 where its parameters are float32: its twin must round as the model does"
            )
        yield from self._outputs(step, truth, twin, missing)
        yield from self._loss(step, truth, twin, t, error, missing)
        if clip_norm is not None and clipped_before(step, t, clip_norm):
            own = norm(step.grads)
            yield clip_finding(step, clip_norm, clip_norm, own, 0.0, "the gradients were clipped before they were read")
            t, w = Widened(t, factor=own / norm(t)), Widened(w, factor=own / norm(w))
        held = self._by_itself(step, w) if self.own and self.limits is not None else self.limits
        # Follow the backward pass: the first broken gradient is the origin. The order in which parameters are
        # registered stands for the order of the forward pass.
        better: list[str] = []
        for name in reversed(both):
            if name not in left_out:
                yield from self._gradient(name, step, w[name], t[name], held, better)
        if better:
            what = "in all gradients: is the declared precision in force?" if len(better) == len(both) else few(better)
            missing.append(f"{WORSE_TWIN}, which is nearer to the truth: {what}")

    def _by_itself(self, step: Step, w: Arrays) -> Limits | None:
        """Return narrower bounds if most gradients have the twin's bits, else the usual bounds.

        The backward pass reaches last the parameters that were registered first. If their gradients have the twin's
        bits, so have all earlier results, up to differences that rounding removes. A gradient that differs then differs
        by an error of its own.

        The candidate's kernel may round elsewhere than the twin's. For example, CUDA sums the bf16 gradient of an
        embedding in FP32, and torch on the CPU, where the twin runs, sums it in bf16. So only the size of the error and
        its component along the truth are compared with the twin's. Two independent errors may have opposite directions,
        so the bound of their distance is the sum of both.
        """
        equal = [n for n in w if n in step.grads and np.array_equal(step.grads[n], w[n])]
        first = list(w)[:2]
        if 2 * len(equal) < len(w) or not set(first) & set(equal):
            return self.limits
        assert self.limits is not None
        excess, distance = calibrated_bounds.least(f"{self.precision}/eager", "gradients/matrices")
        basis = (
            f"{len(equal)} of {len(w)} gradients have the twin's bits, also those at the end of the backward pass, so "
            "each is judged alone, by the narrowest bounds of core/parity/measures/calibrated_bounds.py"
        )
        return replace(self.limits, excess=excess, distance=1 + excess, gain=distance / 2, basis=basis)

    def _gradient(
        self, name: str, step: Step, w: np.ndarray, t: np.ndarray, held: Limits | None, better: list[str]
    ) -> Iterator[Finding]:
        if name in step.grads:
            for finding in self._compared("gradients", name, "backward", step.grads[name], w, t, held):
                better += [name] if finding.note == WORSE_TWIN else []
                yield finding
        elif np.any(t):
            note = "no gradient reached it (detached, or not used), but the reference's is not zero"
            yield exact("gradients", name, 1, t.size, "every parameter that the loss depends on has a gradient", note)

    def _compared(
        self, stage: str, tap: str, phase: str, c: np.ndarray, w: np.ndarray, t: np.ndarray, held: Limits | None
    ) -> Iterator[Finding]:
        d = distances(c.astype(np.float64), w, t, self.stream)
        size = calibrated_bounds.independent(t.shape)
        if held is None:
            if not math.isfinite(d.excess):
                note = "not finite"
                yield exact(stage, tap, 1, t.size, "finite numbers, also while calibrating", note, phase)
            else:
                self.extremes.see(d, size)
            return
        worse = d.excess < held.excess ** -scatter(size) and self.precision != "fp64"
        yield Finding(
            stage=stage, tap=tap, phase=phase, layer=layer_in(tap), scope="end_to_end",
            measures=self._measures(held, d, size), size=t.size, unequal=d.unequal, note=WORSE_TWIN if worse else "",
        )  # fmt: skip

    def _measures(self, limits: Limits, d: Distances, size: int) -> tuple[Measure, ...]:
        if self.precision == "fp64":
            return (Measure("relative_error", d.relative_error, None, limits.relative_error, limits.basis),)
        width = scatter(size)
        basis = limits.basis + (f", few numbers ×{width:.2g}" if width > 1.05 else "")
        most, reach = limits.excess**width, width * limits.gain * d.twin_relative_error
        return (
            # No lower bound: if the candidate is nearer to the truth than the twin, the twin is coarse, and the
            # candidate is not wrong.
            Measure("excess", d.excess, None, most, basis),
            Measure("gain_difference", d.gain_difference, -reach, reach, basis),
            Measure("twin_distance", d.twin_distance, None, width * limits.distance, basis),
        )

    def _outputs(self, step: Step, truth: Answer, twin: Answer, missing: Uncovered) -> Iterator[Finding]:
        theirs, ours = set(truth.outputs), set(step.outputs)
        if not ours:
            what = f"{', '.join(sorted(theirs))} was not given to step(outputs=)" if theirs else "none are compared"
            missing.append(f"outputs of the forward pass other than the loss: {what}")
            return
        basis = "equal names and shapes"
        shaped = {n for n in ours & theirs if step.outputs[n].shape == truth.outputs[n].shape}
        yield exact("loss", "outputs", len((ours | theirs) - shaped), len(ours | theirs), basis,
                    listed("differing", sorted((ours | theirs) - shaped)), "forward")  # fmt: skip
        for name in sorted(shaped):
            w, t = (side.outputs[name].astype(np.float64) for side in (twin, truth))
            yield from self._compared("loss", name, "forward", step.outputs[name], w, t, self.limits)

    def _loss(
        self, step: Step, truth: Answer, twin: Answer, t: Arrays, error: float, missing: Uncovered
    ) -> Iterator[Finding]:
        if step.loss is None:
            missing.skip("loss", "neither step(batch, loss) nor a closure gave one")
            return
        unit = loss_unit(truth, twin, t, step.params, error, self.stream)
        off = abs(step.loss - truth.loss) / unit if math.isfinite(step.loss) else math.inf
        if self.limits is None and math.isfinite(off):
            self.extremes.loss = max(self.extremes.loss, off)
            return
        most = self.limits.loss if self.limits else LOSS_UNITS
        basis = (
            f"units of {unit:.1e}: the larger of the twin's own error and its gradients' relative error, {error:.1e}, "
            "of |loss| + ‖gradient·parameter‖"
        )
        note = f"{step.loss!r}, truth {truth.loss!r}"
        yield Finding(
            stage="loss", tap="loss", phase="forward", layer=None, scope="end_to_end",
            measures=(Measure("loss_error", off, None, most, basis),), size=1, note=note,
        )  # fmt: skip


def loss_unit(truth: Answer, twin: Answer, t: Arrays, params: Arrays, error: float, stream: type[np.floating]) -> float:
    """Return the unit of loss errors: the first-order effect of relative roundings of size `error`.

    A random relative change ε of every parameter changes the loss by ε·‖gradient·parameter‖. A relative change ε in one
    of the last operations changes it by ε·|loss|. The first term matters where large terms cancel in the loss, the
    second where the parameters have little effect.

    t: gradients of the truth, float64.
    error: the relative error of the twin's gradients.
    stream: the dtype in which a loss is stored; the unit is at least 4 ulp of it.
    """
    through = math.sqrt(sum(float(np.sum(np.square(g * params[name]))) for name, g in t.items()))
    spacing = 4 * float(np.spacing(np.abs(stream(truth.loss))))
    return max(abs(twin.loss - truth.loss), error * (abs(truth.loss) + through), spacing)


def _check_shapes(step: Step, truth: Answer, twin: Answer) -> None:
    for name in step.params:
        for side in (truth, twin):
            if name in side.grads and side.grads[name].shape != step.params[name].shape:
                raise UserError(
                    f"the reference's gradient of {name} has shape {side.grads[name].shape}, the model's parameter "
                    f"{step.params[name].shape}: return gradients in the layout of the parameters that were given"
                )
