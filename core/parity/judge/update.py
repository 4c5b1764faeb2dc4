"""The links of a step that are not the model's: data, state, scalars, optimizer, checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from lockstep.core.backend import Arrays, State
from lockstep.core.model.graph import Shape
from lockstep.core.model.groups import moment_names
from lockstep.core.model.init import init_parameters
from lockstep.core.model.names import parameter_shapes
from lockstep.core.parity.evidence.gather import Evidence
from lockstep.core.parity.measures import calibrated_bounds, scalar_bounds
from lockstep.core.parity.measures.compare import Reference, compare, exact, finding, perturbed
from lockstep.core.parity.measures.verdict import Finding
from lockstep.core.train.schedule import learning_rate
from lockstep.core.train.skipped_steps import is_made, leaves_out, scalars_after


def data(evidence: Evidence) -> Iterator[Finding]:
    """The candidate consumed the batch that it was given, and that was the one which the data order prescribes."""
    size, digest = evidence.batch.tokens.size, evidence.batch.digest()
    basis = "equal bits, by SHA-256"
    yield exact("tokens", "tokens", int(evidence.record.digest != digest), size, basis)
    if evidence.due is not None:
        yield exact("tokens", "order", int(evidence.due != digest), size, f"{basis}, with the data order at this step")


def weights(evidence: Evidence, reference: Reference) -> Iterator[Finding]:
    """Names and shapes of weights and moments always; at step 0, the weights' bits against core/model/init.py."""
    shapes, params = parameter_shapes(reference.config.model), evidence.before.params
    wrong: dict[str, None] = {}
    kinds = moment_names(reference.config)
    for state in (evidence.before, evidence.after):
        wrong |= dict.fromkeys(differing(state.params, shapes))
        for kind, names in kinds.items():
            due = {name: shapes[name] for name in names}
            wrong |= dict.fromkeys(f"{kind}/{name}" for name in differing(state.optimizer.get(kind, {}), due))
    basis = "equal names and shapes"
    yield exact("weights", "names", len(wrong), len(shapes), basis, ", ".join(list(wrong)[:5]))
    if evidence.before.step == 0 and not wrong:
        initial = init_parameters(reference.config.model, reference.config.seed)
        differ = {name: int(np.count_nonzero(params[name] != values)) for name, values in initial.items()}
        basis = "equal bits, with core/model/init.py"
        note = ", ".join(name for name, count in differ.items() if count)
        yield exact("weights", "initial", sum(differ.values()), sum(v.size for v in initial.values()), basis, note)


def differing(arrays: Arrays, shapes: Mapping[str, Shape]) -> list[str]:
    """Names that are missing, too many, or of another shape."""
    return sorted(
        n
        for n in shapes.keys() | arrays.keys()
        if n not in shapes or n not in arrays or tuple(np.shape(arrays[n])) != shapes[n]
    )


def step_scalars(evidence: Evidence, reference: Reference) -> Iterator[Finding]:
    """Loss, gradient norm, clip coefficient and learning rate from the candidate's own arrays."""
    config, record = reference.config, evidence.record
    dtype: np.dtype[np.floating] = np.dtype(reference.stream)
    for tap, of, batch, said in (
        ("loss", evidence.probed, evidence.probe, None),
        ("loss_of_step", evidence.stepped, evidence.batch, record.loss),
    ):
        if of is not None and of.nll.shape != batch.targets.shape:
            note = f"candidate {of.nll.shape}, batch {batch.targets.shape}"
            yield exact("nll", "nll", 1, batch.targets.size, "shapes must be equal", note)
        # A loss of NLLs that are not finite only inherits that.
        elif of is not None and np.isfinite(of.nll).all():
            value = of.loss if said is None else said
            yield finding("loss", tap, "local", (scalar_bounds.loss(value, of.nll, batch),), 1)
    if evidence.stepped:
        norm = scalar_bounds.gradient_norm(record.grad_norm, evidence.stepped.grads)
        yield finding("grad_norm", "grad_norm", "local", (norm,), 1)
    coefficient = scalar_bounds.clip_coefficient(record.clip_coefficient, record.grad_norm, config.optim, dtype)
    yield finding("clip_coefficient", "clip_coefficient", "local", (coefficient,), 1)
    due = learning_rate(config.optim, evidence.before.step + 1, config.train.steps)
    yield finding("learning_rate", "learning_rate", "local", (scalar_bounds.learning_rate(record.lr, due),), 1)


def update(evidence: Evidence, reference: Reference) -> Iterator[Finding]:
    """Moments and update from the candidate's own gradients, state and coefficient, relative to the update."""
    config, before, after = reference.config, evidence.before, evidence.after
    steps = before.step + 1
    if evidence.not_finite:
        yield exact("step_count", "step", int(after.step != before.step), 1, "a step that is left out is none")
        yield from _left_out(before, after)
        return
    counted = 0 if after.step == evidence.record.step == steps else 1
    yield exact("step_count", "step", counted, 1, "one step is one step")
    grads = evidence.stepped.grads if evidence.stepped else {}
    if differing(grads, {n: p.shape for n, p in before.params.items()}):
        return
    if not _is_made(evidence, reference, grads):
        yield from _left_out(before, after)
        return
    inputs: dict[str, np.ndarray] = {
        "step": np.asarray(before.updates),
        "coefficient": np.asarray(evidence.record.clip_coefficient),
        "lr": np.asarray(learning_rate(config.optim, steps, config.train.steps)),
    }
    for prefix, arrays in {"params": before.params, "grads": grads, **before.optimizer}.items():
        inputs |= {f"{prefix}/{name}": array for name, array in arrays.items()}
    outputs = [session.run_stage("update", inputs) for session in reference.sessions]
    w, t = outputs[0], outputs[-1]
    noise = _NoiseOfUpdate(reference, inputs, w)
    for kind, names in moment_names(config).items():
        for name in names:
            key, band = f"{kind}/{name}", calibrated_bounds.update_kind(config, name, kind)
            of = noise.of(key, band)
            c = after.optimizer[kind][name]
            yield compare(reference, "moments", band, key, "local", c, w[key], t[key], noise=of)
    for name, old in before.params.items():
        c64, w64, t64 = (
            new.astype(np.float64) - old for new in (after.params[name], w[f"params/{name}"], t[f"params/{name}"])
        )
        band = calibrated_bounds.update_kind(config, name, "update")
        of = noise.of(f"params/{name}", band)
        yield compare(reference, "update", band, name, "local", c64, w64, t64, noise=of)


class _NoiseOfUpdate:
    """Measure the effect of one ulp in gradients and moments on an update that rounds to a narrow format inside.

    Newton–Schulz multiplies small singular values by up to 3.4⁵: in a matrix that is nearly of lower rank, each bf16
    rounding that falls otherwise, as sums in another order make it, comes out as large as the honest error. The same
    for a number on the border between two 8-bit codes.
    """

    def __init__(self, reference: Reference, inputs: Arrays, w: Arrays) -> None:
        self._reference, self._inputs, self._w = reference, inputs, w
        self._moved: Arrays | None = None

    def of(self, key: str, band: str) -> Callable[[], float] | None:
        """Gives the noise's L2 norm in one output; None for a kind that rounds nothing inside."""
        return partial(self._norm, key) if calibrated_bounds.is_rounded_update(band) else None

    def _norm(self, key: str) -> float:
        if self._moved is None:
            kept = ("params/", "step", "coefficient", "lr")
            changing = {name: x for name, x in self._inputs.items() if not name.startswith(kept)}
            changed = perturbed(changing, self._reference.stream)
            self._moved = self._reference.twin.run_stage("update", {**self._inputs, **changed})
        apart = self._moved[key].astype(np.float64) - self._w[key]
        return calibrated_bounds.NOISE_MARGIN * float(np.linalg.norm(apart))


def _is_made(evidence: Evidence, reference: Reference, grads: Arrays) -> bool:
    """Return whether the step may change weights and moments. Its loss and norm are checked elsewhere."""
    config, record = reference.config, evidence.record
    if not (leaves_out(config) or evidence.before.scalars):
        return True
    finite = all(np.isfinite(g).all() for g in grads.values())
    return finite and is_made(config, record.loss, record.grad_norm)


def _left_out(before: State, after: State) -> Iterator[Finding]:
    """Gradients that are not finite: nothing moves."""
    basis = "a step whose gradients are not finite is left out: equal bits"
    for stage, old, new in (
        ("moments", before.optimizer, after.optimizer),
        ("update", {"": before.params}, {"": after.params}),
    ):
        moved = [n for kind in old for n, a in old[kind].items() if not np.array_equal(a, new[kind][n], equal_nan=True)]
        yield exact(stage, "weights" if stage == "update" else "moments", len(moved), 1, basis, ", ".join(moved[:5]))


def loss_scale(evidence: Evidence, reference: Reference) -> Iterator[Finding]:
    """Loss scale and counts of steps left out after the step, from those before and whether it was finite."""
    before, grads = evidence.before.scalars, evidence.stepped.grads if evidence.stepped else {}
    if not before or not grads:
        return
    made = _is_made(evidence, reference, grads)
    due = scalars_after(reference.config, before, made)
    wrong = [
        key for key in due.keys() | evidence.after.scalars.keys() if due.get(key) != evidence.after.scalars.get(key)
    ]
    basis = f"the rule, {'loss and gradients finite' if made else 'not finite'}"
    yield exact("loss_scale", "loss_scale", len(wrong), len(due), basis, ", ".join(sorted(wrong)))


def checkpoint(evidence: Evidence) -> Iterator[Finding]:
    """The state after it was written, read back and loaded: equal bits."""
    if evidence.reloaded is None:
        return
    now, then = flat(evidence.reloaded), flat(evidence.after)
    differ = [
        name
        for name in sorted(now.keys() | then.keys())
        if name not in now or name not in then or not np.array_equal(now[name], then[name], equal_nan=True)
    ]
    basis = "equal bits after a checkpoint was written, read back and loaded"
    yield exact("checkpoint", "state", len(differ), len(then), basis, ", ".join(differ[:5]))


def flat(state: State) -> dict[str, np.ndarray]:
    """Every array of a state by `params/NAME`, `KIND/NAME`, and `step`."""
    arrays = {f"params/{name}": array for name, array in state.params.items()}
    arrays |= {f"{kind}/{name}": array for kind, tree in state.optimizer.items() for name, array in tree.items()}
    scalars = {f"scalars/{name}": np.asarray(value) for name, value in state.scalars.items()}
    return arrays | scalars | {"step": np.asarray(state.step)}
