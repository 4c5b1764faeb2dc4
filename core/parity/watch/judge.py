"""Judge one step of a user's loop: gradients and loss end to end, clipping and update locally."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lockstep.core.backend import Arrays
from lockstep.core.errors import UserError
from lockstep.core.parity.measures import calibrated_bounds, scalar_bounds
from lockstep.core.parity.measures.decode import typical_ratio
from lockstep.core.parity.measures.distances import Distances, distances
from lockstep.core.parity.measures.scatter import scatter
from lockstep.core.parity.measures.verdict import Finding, Measure
from lockstep.core.parity.watch.library_rules import RULES
from lockstep.core.parity.watch.limits import LOSS_UNITS, Extremes, Limits, Precision
from lockstep.core.parity.watch.one_coefficient import FORMATS, coefficients
from lockstep.core.parity.watch.snapshot import Answer, Snapshot
from lockstep.core.parity.watch.uncovered import Uncovered
from lockstep.core.parity.watch.update_rules import EPSILON, EXACT, OF_SUMS, ROUNDINGS, Arithmetic, Rule

# `p + Δ` has an error of half an ulp of p. Allow this many ulp of ‖p‖/‖Δ‖.
ULPS_OF_WEIGHTS = 4.0
# An update by factored moments has three sums over a tensor: the norm of the weights, the factors, and its own norm.
SUMS = 3
LEAST_TWIN_ERROR_BF16 = 1e-5
WORSE_TWIN = "the twin is worse than the candidate"
NARROW = ("bfloat16", "float16")
# Roundings between gradients and their coefficient, in the format of the gradients: the norm of a tensor, the norm of
# the norms, and a quotient. Each is half a unit. Just above a power of two, half a unit counts double in relative
# terms.
AS_NARROW = 3


@dataclass(frozen=True)
class Step:
    """Tensors and settings of one step, by the model's parameter names.

    number: number of the step, counted from 1.
    loss: None if none was given.
    outputs: other tensors of the forward pass, by the reference's names.
    params: weights at the beginning of the block.
    grads: gradients before clipping.
    before, after: one snapshot an optimizer, right before and right after its step.
    fired: number of steps of each optimizer inside the block.
    frozen: names of parameters without `requires_grad`.
    dtypes: name → dtype of the parameter.
    rules, kinds: update rule and class name of each optimizer.
    """

    number: int
    loss: float | None
    outputs: Arrays
    params: Arrays
    grads: Arrays
    before: list[Snapshot]
    after: list[Snapshot]
    fired: Sequence[int]
    frozen: frozenset[str]
    dtypes: Mapping[str, str]
    rules: Sequence[Rule | None]
    kinds: Sequence[str]


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
            _list("the reference lacks", absent) + _list("the model lacks", extra),
        )  # fmt: skip
        if step.frozen:
            missing.append(f"gradients of {len(step.frozen)} frozen parameters: {few(sorted(step.frozen))}")
        both = [name for name in trainable if name in truth.grads and name in twin.grads]
        t: Arrays = Widened({name: truth.grads[name] for name in both})
        # The gradient of a narrow weight has its dtype, even if the reference computed in a wider one.
        w: Arrays = Widened({name: twin.grads[name] for name in both}, step.dtypes)
        error = _relative(w, t)
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
        if clip_norm is not None and _clipped_before(step, t, clip_norm):
            own = _norm(step.grads)
            yield _clip_finding(
                step, clip_norm, clip_norm, own, 0.0, "the gradients were clipped before they were read"
            )
            t, w = Widened(t, factor=own / _norm(t)), Widened(w, factor=own / _norm(w))
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
                    _list("differing", sorted((ours | theirs) - shaped)), "forward")  # fmt: skip
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


def clipping(step: Step, clip_norm: float | None) -> Iterator[Finding]:
    """Compare the optimizer's gradients with those of backward. The factor must be min(1, limit / (norm + 1e-6))."""
    stepped = {n: g for s in step.before for n, g in s.grads.items()}
    shared = [name for name in step.grads if name in stepped]
    changed = [n for n in shared if not np.array_equal(step.grads[n], stepped[n], equal_nan=True)]
    # A gradient that no optimizer holds must not be scaled.
    changed += [n for s in step.before for n in s.groups if n in step.grads and n not in stepped]
    old, new = _norm({n: step.grads[n] for n in shared}), _norm({n: stepped[n] for n in shared})
    if clip_norm is None:
        basis = "no clip_norm= was declared, so the optimizer uses the gradients of backward unchanged"
        note = f"norm {old:.6g} became {new:.6g}" if changed else ""
        yield exact("clip_coefficient", "gradients", len(changed), max(len(step.grads), 1), basis, note, "update")
    elif not math.isfinite(old):
        return
    elif changed or old > clip_norm * (1 + _coefficient_slack(step)):
        dot = math.fsum(float(np.vdot(step.grads[n].astype(np.float64), stepped[n])) for n in shared)
        k = dot / old**2 if old else 1.0
        apart = math.sqrt(math.fsum(_squares(stepped[n], k, step.grads[n]) for n in shared))
        due = old * min(1.0, clip_norm / (old + 1e-6))
        yield _clip_finding(step, clip_norm, due, k * old, apart / new if new else 0.0, exactly=stepped)


def skipped_by_scaler(step: Step) -> str:
    """Return the reason why a step without an update is correct: its gradients are not finite. Empty otherwise."""
    finite = all(np.isfinite(g).all() for g in step.grads.values())
    if finite or not step.fired or any(step.fired):
        return ""
    return "gradients are not finite and optimizer.step() was skipped, as a GradScaler does while it adjusts its scale"


def update(step: Step, skipped: str, missing: Uncovered) -> Iterator[Finding]:
    """Compare moments and update with the rule's, applied to the candidate's own gradients, state and hyperparameters.

    skipped: the reason why this step has no update, or empty. Errors are relative to the update.
    """
    if skipped:
        missing.skip("update", skipped)
        return
    for before, after, rule, kind, fired in zip(
        step.before, step.after, step.rules, step.kinds, step.fired, strict=True
    ):
        counted = sum(after.steps.get(n, 0) != before.steps.get(n, 0) + 1 for n in before.grads if n in after.steps)
        basis = "one optimizer step inside the block, counted once for every parameter with a gradient"
        note = f"optimizer.step() ran {fired} times" if fired != 1 else ""
        yield exact("step_count", "step", counted + (fired != 1), 1, basis, note, "update")
        idle = [n for n in before.params if n not in before.grads]
        if idle and fired == 1:
            moved = [n for n in idle if not np.array_equal(before.params[n], after.params[n], equal_nan=True)]
            basis = "parameters without a gradient do not change"
            yield exact("update", "without gradient", len(moved), len(idle), basis, few(moved))
        if fired != 1:
            missing.append("update: judged only with exactly one optimizer.step() inside the block")
        elif rule is None:
            missing.skip("update", f"{kind} has no rule")
            missing.append(f"update: no rule for {kind} (known: {', '.join(RULES)}; rule= names one, or is a function)")
        else:
            for name in before.grads:
                yield from _updated(name, before, after, rule, step.dtypes[name], missing)


def _updated(
    name: str, before: Snapshot, after: Snapshot, rule: Rule, dtype: str, missing: Uncovered
) -> Iterator[Finding]:
    p, g = before.params[name].astype(np.float64), before.grads[name].astype(np.float64)
    if not np.isfinite(g).all():
        missing.append(f"update of {name}: its gradient is not finite")
        return
    old = {kind: by_name[name].astype(np.float64) for kind, by_name in before.moments.items() if name in by_name}
    count = int(before.steps.get(name, 0)) + 1
    group = before.groups[name] | {"dtype": dtype, "in_codes": name in after.coded}
    w, t = (rule(p, g, old, count, group, a) for a in (Arithmetic.of(dtype), EXACT))
    stream: type[np.floating] = np.float64 if dtype == "float64" else np.float32
    for kind, moment in t.moments.items():
        found = after.moments.get(kind, {}).get(name)
        tap = f"{kind}/{name}"
        if found is None:
            yield exact("moments", tap, 1, p.size, "the optimizer stores its rule's moments", "not stored", "update")
            continue
        band = t.kinds.get(kind, "exp_avg_sq" if kind.endswith("_sq") else "exp_avg")
        d = distances(found.astype(np.float64), w.moments[kind], moment, stream)
        yield _local("moments", tap, band, d, moment, dtype, 0.0)
    moves = [x - p for x in (after.params[name].astype(np.float64), w.param, t.param)]
    d = distances(moves[0], moves[1], moves[2], stream)
    lost = float(np.mean((moves[1] == 0) & (moves[2] != 0)))
    note = f"{lost:.0%} of the update is below half an ulp of {dtype} weights and vanishes" if lost > 0.5 else ""
    size = float(np.linalg.norm(moves[2]))
    of_weights = ULPS_OF_WEIGHTS * EPSILON[dtype] * (float(np.linalg.norm(p)) / size if size else 0.0)
    yield _local("update", name, t.kinds.get("update", "update"), d, p, dtype, of_weights, note)


def _local(
    stage: str, tap: str, band: str, d: Distances, x: np.ndarray, dtype: str, of_weights: float, note: str = ""
) -> Finding:
    """Compare a moment or an update with its bounds.

    band: the kind of its calibrated bounds, or OF_SUMS.
    x: a tensor of its shape.
    of_weights: the relative error that the rounding of the weights adds.
    """
    if dtype == "float64":
        basis = f"FP64: {calibrated_bounds.FP64_LIMIT:.0e}, and {ULPS_OF_WEIGHTS:g} ulp of the weights for an update"
        most = calibrated_bounds.FP64_LIMIT + of_weights
        found: tuple[Measure, ...] = (Measure("relative_error", d.relative_error, None, most, basis),)
    elif band == OF_SUMS:
        terms, words = scalar_bounds.norm_bound(x.size)
        basis = f"{SUMS} sums ({words}) in {dtype}, and {ULPS_OF_WEIGHTS:g} ulp of the weights for an update"
        most = SUMS * terms * EPSILON[dtype] + of_weights
        found = (Measure("relative_error", d.relative_error, None, most, basis),)
    else:
        found = calibrated_bounds.measures("fp32/eager", band, d, calibrated_bounds.independent(x.shape))
    return Finding(
        stage=stage, tap=tap, phase="update", layer=layer_in(tap), scope="local", measures=found, size=x.size,
        unequal=d.unequal, note=note,
    )  # fmt: skip


def exact(
    stage: str, tap: str, mismatches: int, size: int, basis: str, note: str = "", phase: str = "backward"
) -> Finding:
    """Build the finding of a comparison in which nothing may differ. mismatches: how many of `size` items differ."""
    found = (Measure("mismatches", float(mismatches), None, 0.0, basis),)
    return Finding(
        stage=stage, tap=tap, phase=phase, layer=layer_in(tap), scope="local", measures=found, size=size, note=note
    )


def layer_in(name: str) -> int | None:
    """Return the first number among the dotted parts of a name, which is the block in most models; None without one."""
    return next((int(part) for part in name.rpartition("/")[2].split(".") if part.isdecimal()), None)


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


# Number of trailing zero bits in the FP32 mantissas of numbers from a narrower format, and the cause to name.
PRODUCTS = (
    (16, "only bf16 numbers, the results of bf16 products: is autocast on (precision='bf16')?"),
    (13, "only FP16 numbers, the results of FP16 products: `watch` has no twin for FP16 autocast, but one for bf16"),
)


def is_narrow(gradient: np.ndarray, zeros: int) -> bool:
    """Return whether the last `zeros` bits of all FP32 numbers are zero.

    False for another dtype, or for fewer than 64 non-zero numbers. By chance, 64 numbers have this once in 2^832.
    """
    numbers = gradient[gradient != 0]
    if gradient.dtype != np.float32 or numbers.size < 64:
        return False
    return not (numbers.view(np.uint32) & ((1 << zeros) - 1)).any()


class Widened(Mapping[str, np.ndarray]):
    """A read-only mapping of arrays in FP64, times a factor. Each array is widened when it is read, to save memory.

    dtypes: name → dtype of the weights. Gradients of narrow weights are rounded to it first.
    """

    def __init__(self, arrays: Arrays, dtypes: Mapping[str, str] | None = None, factor: float = 1.0) -> None:
        self._arrays, self._dtypes, self._factor = arrays, dtypes, factor

    def __getitem__(self, name: str) -> np.ndarray:
        found = self._arrays[name].astype(np.float64, copy=False)
        found = _as_kept(found, self._dtypes[name]) if self._dtypes else found
        return self._factor * found if self._factor != 1 else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _as_kept(gradient: np.ndarray, dtype: str) -> np.ndarray:
    """Round a gradient to the dtype in which `.grad` holds it: that of its weights."""
    return ROUNDINGS[dtype](gradient) if dtype in NARROW else gradient


def _check_shapes(step: Step, truth: Answer, twin: Answer) -> None:
    for name in step.params:
        for side in (truth, twin):
            if name in side.grads and side.grads[name].shape != step.params[name].shape:
                raise UserError(
                    f"the reference's gradient of {name} has shape {side.grads[name].shape}, the model's parameter "
                    f"{step.params[name].shape}: return gradients in the layout of the parameters that were given"
                )


def _clipped_before(step: Step, t: Arrays, clip_norm: float) -> bool:
    """Return whether the gradients that were read already have the norm of the clipping limit."""
    slack = _norm_slack(step) + 1e-6 / clip_norm
    return _norm(t) > clip_norm * (1 + slack) and abs(_norm(step.grads) / clip_norm - 1) <= slack


def _clip_finding(
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
        old = _norm({name: step.grads[name] for name in exactly if name in step.grads})
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


def _norm(arrays: Arrays) -> float:
    return math.sqrt(math.fsum(float(np.square(g, dtype=np.float64).sum()) for g in arrays.values()))


def _relative(w: Arrays, t: Arrays) -> float:
    size = _norm(t)
    return math.sqrt(math.fsum(_squares(w[name], 1.0, t[name]) for name in t)) / size if size else 0.0


def _squares(c: np.ndarray, k: float, t: np.ndarray) -> float:
    """Sum (c − k·t)² in FP64.

    One tensor is widened at a time, because all together take as much memory as the model.
    """
    return float(np.square(c.astype(np.float64) - k * t.astype(np.float64)).sum())


def few(names: Sequence[str]) -> str:
    """Join the first five names with commas. An ellipsis stands for the others."""
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _list(what: str, names: Sequence[str]) -> str:
    return f"{what} {few(names)}; " if names else ""


def check_declared(declared: Any, optimizers: Sequence[Any]) -> None:
    """Raise UserError for a declared hyperparameter that no optimizer has.

    A function as declaration is not checked here.
    """
    known = {key for optimizer in optimizers for group in optimizer.param_groups for key in group}
    if isinstance(declared, Mapping) and (unknown := sorted(set(declared) - known)):
        raise UserError(f"declared= names {unknown[0]!r}, which is no hyperparameter of the optimizer")


def hyperparameters(step: Step, declared: Any, missing: Uncovered) -> Iterator[Finding]:
    """Compare the optimizer's hyperparameters with the user's declaration. Raises UserError for an unknown name."""
    if declared is None:
        missing.append("hyperparameters: read from the optimizer and not compared (declared= compares them)")
        return
    wrong: dict[str, list[str]] = {}
    for before in step.before:
        for name, group in before.groups.items():
            due = declared(name, step.number) if callable(declared) else declared
            for key, value in due.items():
                if key not in group:
                    raise UserError(f"declared= names {key!r}, which is no hyperparameter of the optimizer of {name}")
                if group[key] != value:
                    wrong.setdefault(f"{key} {group[key]!r}, declared {value!r}", []).append(name)
    note = "; ".join(f"{what}: {few(names)}" for what, names in wrong.items())
    count = sum(map(len, wrong.values()))
    size = max(sum(len(before.groups) for before in step.before), 1)
    stage = "learning_rate" if wrong and all(what.startswith("lr ") for what in wrong) else "update"
    yield exact(stage, "hyperparameters", count, size, "equal to the declared numbers", note, "update")
