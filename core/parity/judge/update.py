"""Judge the links of a step outside the model: data, state, scalars, optimizer, checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from lockstep.core.arrays import HasDigests, part_of, shape_of
from lockstep.core.backend import Arrays, NotSupported, Session, State
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.families import graph_of
from lockstep.core.model.graph import Shape
from lockstep.core.model.groups import group_settings, moment_names, update_rules
from lockstep.core.model.init import init_parameter
from lockstep.core.model.names import groups_of, layer_of, parameter_shapes
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.in_a_row import (
    ALIKE,
    AS_LATER,
    AS_STEP,
    AT_ONCE,
    EVALUATION,
    LAST_WRITTEN,
    LEFT_OUT,
    LOADED,
    NOT_SHOWN,
    ON_RANK,
    RESTORED,
    SAMPLING,
    TAPS,
    THIRD,
    WHILE_WRITTEN,
)
from lockstep.core.parity.evidence.later_steps import as_later_steps
from lockstep.core.parity.judge import scalar_words
from lockstep.core.parity.judge.rows import with_ranks
from lockstep.core.parity.measures import calibrated_bounds, peak_bounds, scalar_bounds
from lockstep.core.parity.measures.compare import Comparison, Reference, exact, finding, perturbed
from lockstep.core.parity.measures.decode import scalars_of_rule
from lockstep.core.parity.measures.drawn_part import drawn_part
from lockstep.core.parity.measures.peaks import Norms
from lockstep.core.parity.measures.stretches import stretches
from lockstep.core.parity.measures.verdict import OVER_MATRICES, Finding, Measure
from lockstep.core.streams import GRADS
from lockstep.core.train.fp8_amax import without_amaxes
from lockstep.core.train.schedule import learning_rate
from lockstep.core.train.skipped_steps import is_made, leaves_out, scalars_after

# Lengths of a slice whose update is computed at once. A shorter slice is padded to the next length.
LENGTHS = (1 << 12, 1 << 15, 1 << 18)
# Field of a step's record → the link it belongs to.
OF_RECORD = {
    "loss": "loss",
    "grad_norm": "gradients",
    "clip_coefficient": "clip_coefficient",
    "lr": "learning_rate",
}
# The median length is judged over at least this many matrices, the number in one block.
FEWEST = 7


def data(evidence: Evidence) -> Iterator[Finding]:
    """Compare the batch that the candidate consumed with the one it was given, and this one with the data order.

    The batch on the device is compared as well, if the session reads it back.
    """
    size, digest = evidence.batch.tokens.size, evidence.batch.digest()
    basis = "equal bits, by SHA-256"
    yield exact("tokens", "tokens", int(evidence.record.digest != digest), size, basis)
    for name, mismatches in evidence.misread.items():
        yield exact("tokens", f"{name} on the device", mismatches, size, "equal numbers, with the step's batch")
    if evidence.due is not None:
        yield exact("tokens", "order", int(evidence.due != digest), size, f"{basis}, with the data order at this step")


def weights(evidence: Evidence, reference: Reference) -> Iterator[Finding]:
    """Compare names and shapes of weights and moments, initial weights, and the state around passes that only read it.

    At step 0 the weights must have the bits of core/model/init.py. Imported weights follow from no seed. A session that
    takes them over is compared with the stored ones (core/checkpoint/taken_over.py).
    """
    shapes = parameter_shapes(reference.config.model)
    wrong: dict[str, None] = {}
    kinds = moment_names(reference.config)
    for state in (evidence.before, evidence.after):
        wrong |= dict.fromkeys(differing(state.params, shapes))
        for kind, names in kinds.items():
            due = {name: shapes[name] for name in names}
            wrong |= dict.fromkeys(f"{kind}/{name}" for name in differing(state.optimizer.get(kind, {}), due))
    basis = "equal names and shapes"
    yield exact("weights", "names", len(wrong), len(shapes), basis, ", ".join(list(wrong)[:5]))
    if evidence.before.step == 0 and reference.config.initial == "seed" and not wrong:
        model, params = reference.config.model, evidence.before.params
        differ = {
            name: int(np.count_nonzero(params[name] != init_parameter(one, reference.config.seed)))
            for name, one in graph_of(model).parameters.items()
        }
        basis = "equal bits, with core/model/init.py"
        note = ", ".join(name for name, count in differ.items() if count)
        yield exact("weights", "initial", sum(differ.values()), sum(map(math.prod, shapes.values())), basis, note)
    basis = "an operation that only reads a state does not change it: equal checksums before and after"
    for what, changed in evidence.changed.items():
        yield exact("weights", f"after {what}", len(changed), len(shapes), basis, ", ".join(changed[:5]))


def differing(arrays: Arrays, shapes: Mapping[str, Shape]) -> list[str]:
    """Return names that are missing, unexpected, or have another shape."""
    return sorted(
        n
        for n in shapes.keys() | arrays.keys()
        if n not in shapes or n not in arrays or shape_of(arrays, n) != shapes[n]
    )


def step_scalars(evidence: Evidence, reference: Reference) -> Iterator[Finding]:
    """Check loss, gradient norm, clip coefficient and learning rate. Each is recomputed from the candidate's arrays."""
    config, record = reference.config, evidence.record
    dtype: np.dtype[np.floating] = np.dtype(reference.stream)
    for tap, (of, batch) in evidence.losses.items():
        if of is not None and of.nll.shape != batch.targets.shape:
            note = f"candidate {of.nll.shape}, batch {batch.targets.shape}"
            yield exact("nll", "nll", 1, batch.targets.size, "shapes must be equal", note)
        # The mean of non-finite NLLs is not finite either.
        elif of is not None and np.isfinite(of.nll).all():
            value = record.loss if of is evidence.stepped else of.loss
            held = scalar_bounds.loss(value, of.nll, batch)
            note = scalar_words.of_loss(value, of.nll, batch, config.train.micro_batch_size, held)
            yield finding("loss", tap, "local", (held,), 1, note=note)
    if evidence.stepped:
        norm = scalar_bounds.gradient_norm(record.grad_norm, evidence.stepped.grads, record.norm_in_fp64)
        yield finding("grad_norm", "grad_norm", "local", (norm,), 1)
    this = evidence.before.step + 1
    for suffix, (number, made) in {"": (this, record), **as_later_steps(evidence.later, config)}.items():
        again = (f"made again as step {number:,} of the run",) if suffix else ()
        if made.step != number and suffix:
            basis = f"a step that follows a state of {number - 1:,} steps is step {number:,}, not {made.step:,}"
            yield exact("checkpoint", "step", 1, 1, basis, *again)
            continue
        of_clipping = made.clip_coefficient, made.grad_norm, config.optim, dtype
        coefficient = scalar_bounds.clip_coefficient(*of_clipping)
        rate = scalar_bounds.learning_rate(made.lr, learning_rate(config.optim, number, config.train.steps))
        for stage, held, words in (
            ("clip_coefficient", coefficient, scalar_words.of_clip_coefficient(*of_clipping, coefficient)),
            ("learning_rate", rate, scalar_words.of_learning_rate(made.lr, config, number, rate)),
        ):
            note = "; ".join(one for one in (*again, words) if one)
            yield finding(stage, f"{stage}{suffix}", "local", (held,), 1, note=note)


def update(evidence: Evidence, reference: Reference) -> Iterator[Finding]:
    """Compare moments and update with those that follow from the candidate's own gradients, state and coefficient.

    Errors are relative to the update.
    """
    before, after = evidence.before, evidence.after
    steps = before.step + 1
    wrong, basis = evidence.miscounted, "an optimizer has counted the updates that were made"
    yield exact("step_count", "updates", len(wrong), len(before.params), basis, ", ".join(wrong[:5]))
    if evidence.not_finite:
        yield exact("step_count", "step", int(after.step != before.step), 1, "a skipped step does not count")
        yield from _left_out(before, after)
        return
    counted = 0 if after.step == evidence.record.step == steps else 1
    yield exact("step_count", "step", counted, 1, "a step counts once")
    grads = evidence.stepped.grads if evidence.stepped else {}
    if differing(grads, parameter_shapes(reference.config.model)):
        return
    if not _is_made(evidence, reference, grads):
        yield from _left_out(before, after)
        return
    lengths: list[float] = []
    for name in before.params:
        updated = Updated(evidence, reference, name)
        found = list(updated.findings())
        if updated.is_whole:
            lengths += [m.value for m in found[-1].measures if m.name == "row_gain"]
        yield from found
    if len(lengths) >= FEWEST:
        yield _typical_length(lengths)


def _typical_length(lengths: Sequence[float]) -> Finding:
    """Check the error of length that the updates of all whole matrices share. Roundings of a single one are larger.

    lengths: row gain of each matrix. The largest median in 200 clean checks of 20 shapes, with 7 to 28 matrices, was
    2.6e-4 for updates that round to bf16 inside; in 180 checks of updates that do not it was 0.019. A single matrix
    reached 0.17.
    """
    high = peak_bounds.LEAST["rounded"].row_gain
    basis = f"median of {len(lengths)} matrices, whose roundings have random directions"
    measure = Measure("row_gain", float(np.median(lengths)), -high, high, basis)
    return finding("update", OVER_MATRICES, "local", (measure,), len(lengths))


class Updated:
    """A parameter's moments and update, compared slice by slice."""

    def __init__(
        self, evidence: Evidence, reference: Reference, name: str, part: tuple[slice, Shape] | None = None
    ) -> None:
        """Prepare the comparison for the parameter `name`.

        part: the elements to compare, and their shape; by default those that are due in this check.
        """
        assert evidence.stepped is not None
        config = reference.config
        of_rule = scalars_of_rule(config, name, evidence.before.updates + 1)
        self._reference = replace(reference, known={**reference.known, **of_rule})
        self._evidence, self._name = evidence, name
        self._before, self._after = evidence.before, evidence.after
        self._rule = update_rules(config)[name]
        self._where, self._shape = part or part_judged(config, name, self._before.step)
        self._alias = _same_update(config, name)
        self._arrays = {"params": self._before.params, "grads": evidence.stepped.grads}
        self._arrays |= {kind: self._before.optimizer[kind] for kind in self._rule.moments}
        self._scalars = {
            "step": np.asarray(self._before.updates),
            "coefficient": np.asarray(evidence.record.clip_coefficient),
            "lr": np.asarray(learning_rate(config.optim, self._before.step + 1, config.train.steps)),
        }
        if evidence.record.adam_in_fp32:
            self._scalars["adam_in_fp32"] = np.asarray(True)

    @property
    def is_whole(self) -> bool:
        """Return whether the update of the parameter needs all of it at once."""
        return self._rule.together is None

    def findings(self) -> Iterator[Finding]:
        """Compare each kind of moment, then the update, on the part that is due in this check."""
        outputs = (*self._rule.moments, "params")
        compared = {kind: self._comparison(kind) for kind in outputs}
        for where in self._stretches():
            inputs = self._inputs(where)
            twin, truth = self._both(inputs, where)
            for kind in self._rule.moments:
                compared[kind].add(part_of(self._after.optimizer[kind], self._name, where), twin[kind], truth[kind])
            old = part_of(self._before.params, self._name, where)
            new = (part_of(self._after.params, self._name, where), twin["params"], truth["params"])
            compared["params"].add(*(x.astype(np.float64) - old for x in new))
        for kind in outputs:
            rounded = calibrated_bounds.is_rounded_update(self._band(kind))
            found = compared[kind].finding(partial(self._noise, kind) if rounded else None)
            whole = parameter_shapes(self._reference.config.model)[self._name]
            if self._shape == whole and self._rule.together is not None:
                found = with_ranks(found, self._reference.config, whole, partial(self._of_rows, kind))
            yield found

    def _of_rows(self, kind: str, rows: slice, shape: Shape) -> Finding:
        """Return the finding of one kind for some rows."""
        row = math.prod(shape[1:])
        part = slice(rows.start * row, rows.stop * row), shape
        *moments, update = Updated(self._evidence, self._reference, self._name, part).findings()
        return update if kind == "params" else moments[self._rule.moments.index(kind)]

    def _comparison(self, kind: str) -> Comparison:
        stage, tap = ("update", self._name) if kind == "params" else ("moments", f"{kind}/{self._name}")
        return Comparison(self._reference, stage, self._band(kind), tap, "local", self._shape)

    def _band(self, kind: str) -> str:
        what = "update" if kind == "params" else kind
        return calibrated_bounds.update_kind(self._reference.config, self._name, what)

    def _stretches(self) -> Iterator[slice]:
        first, size = self._where.start, math.prod(self._shape)
        for where in stretches(size, size if self._rule.together is None else LENGTHS[-1]):
            yield slice(first + where.start, first + where.stop)

    def _inputs(self, where: slice) -> dict[str, np.ndarray]:
        """Return the inputs of a slice by kind, in a shape that many slices share. Zeros pad the end and stay zero."""
        found = {kind: part_of(arrays, self._name, where) for kind, arrays in self._arrays.items()}
        if self._rule.together is None:
            return {kind: x.reshape(self._shape) for kind, x in found.items()}
        missing = next(length for length in LENGTHS if length >= where.stop - where.start) - (where.stop - where.start)
        return {kind: np.pad(x, (0, missing)) if missing else x for kind, x in found.items()}

    def _both(self, inputs: Arrays, where: slice) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return the twin's and the truth's outputs by kind, flat."""
        sides = [self._run(session, inputs, where) for session in self._reference.sessions]
        return sides[0], sides[-1]

    def _run(self, session: Session, inputs: Arrays, where: slice) -> dict[str, np.ndarray]:
        named = {f"{kind}/{self._alias}": x for kind, x in inputs.items()}
        try:
            made = session.run_stage("update", {**named, **self._scalars})
        except (KeyError, ValueError) as error:
            why = f"the reference does not update a single parameter ({type(error).__name__}: {error})"
            raise NotSupported(f"moments and update: {why}") from error
        size = where.stop - where.start
        return {kind: made[f"{kind}/{self._alias}"].reshape(-1)[:size] for kind in ("params", *self._rule.moments)}

    def _noise(self, kind: str) -> Norms:
        """Measure how one ulp in gradients and moments changes an update that rounds to a narrow format inside.

        Newton–Schulz multiplies small singular values by up to 3.4⁵. In a matrix of nearly lower rank, a single bf16
        rounding that another order of summation changes therefore has an effect as large as the honest error. The same
        is true of a number on the border between two 8-bit codes.
        """
        power = 0.0
        for where in self._stretches():
            inputs = self._inputs(where)
            changing = {name: x for name, x in inputs.items() if name != "params"}
            moved = {**inputs, **perturbed(changing, self._reference.stream)}
            sides = (self._run(self._reference.twin, given, where)[kind] for given in (moved, inputs))
            apart = np.subtract(*(x.astype(np.float64) for x in sides))
            power += float(apart @ apart)
        return Norms.anywhere(calibrated_bounds.NOISE_MARGIN * math.sqrt(power))


def part_judged(config: RunConfig, name: str, step: int) -> tuple[slice, Shape]:
    """Return the elements of a parameter whose moments and update are judged after `step` steps, and their shape."""
    return drawn_part(config, name, step, config.parity.update)


def not_judged(config: RunConfig, step: int) -> list[str]:
    """Describe the share of moments and update that a check does not judge; empty if it judges all."""
    sizes = [math.prod(shape) for shape in parameter_shapes(config.model).values()]
    judged = sum(math.prod(part_judged(config, name, step)[1]) for name in parameter_shapes(config.model))
    if judged == sum(sizes):
        return []
    share = 100 * (1 - judged / sum(sizes))
    return [f"{share:.3g} % of moments and update (parity.update = {config.parity.update}): in other checks"]


def _same_update(config: RunConfig, name: str) -> str:
    """Return the first parameter with the same update, so that the reference needs few programs at any depth."""
    rules, groups, shapes = update_rules(config), groups_of(config.model), parameter_shapes(config.model)

    def key(one: str) -> tuple[object, ...]:
        whole = shapes[one] if rules[one].together is None else None
        return rules[one], group_settings(config, groups[one]), whole

    return next(one for one in rules if key(one) == key(name))


def _is_made(evidence: Evidence, reference: Reference, grads: Arrays) -> bool:
    """Return whether the step should change weights and moments. Its loss and norm are checked elsewhere."""
    config, record = reference.config, evidence.record
    if not (leaves_out(config) or without_amaxes(evidence.before.scalars)):
        return True
    finite = all(np.isfinite(g).all() for g in grads.values())
    return finite and is_made(config, record.loss, record.grad_norm)


def step_is_made(evidence: Evidence, reference: Reference) -> bool:
    """Return whether the step should change the state, as far as the gradients that it shows tell."""
    return _is_made(evidence, reference, evidence.stepped.grads if evidence.stepped else {})


def _left_out(before: State, after: State) -> Iterator[Finding]:
    """Check that a step with non-finite gradients changed nothing."""
    basis = "a step with gradients that are not finite changes nothing: equal bits"
    for stage, old, new in (
        ("moments", before.optimizer, after.optimizer),
        ("update", {"": before.params}, {"": after.params}),
    ):
        moved = [n for kind in old for n, a in old[kind].items() if not np.array_equal(a, new[kind][n], equal_nan=True)]
        yield exact(stage, "weights" if stage == "update" else "moments", len(moved), 1, basis, ", ".join(moved[:5]))


def loss_scale(evidence: Evidence, reference: Reference) -> Iterator[Finding]:
    """Compare loss scale and counts of skipped steps after the step with those that follow from the state before it."""
    before, after = (without_amaxes(state.scalars) for state in (evidence.before, evidence.after))
    if not before or evidence.stepped is None or not evidence.stepped.grads:
        return
    made = step_is_made(evidence, reference)
    due = scalars_after(reference.config, before, made)
    wrong = [key for key in due.keys() | after.keys() if due.get(key) != after.get(key)]
    basis = f"the rule, {'loss and gradients finite' if made else 'not finite'}"
    yield exact("loss_scale", "loss_scale", len(wrong), len(due), basis, ", ".join(sorted(wrong)))


def in_a_row(evidence: Evidence) -> Iterator[Finding]:
    """Compare two consecutive steps with the same two steps with a check between them, bit for bit.

    The first difference in a step's arithmetic gives the link. The judge compares them only if every other link holds,
    because a fault in one of those may act in one of the two alone.
    """
    found = evidence.in_a_row
    if not found:
        return
    if wrong := found.get(LOADED, ()):
        basis = "a session holds the state that it loaded: equal checksums"
        yield exact("checkpoint", "loaded", len(wrong), max(len(wrong), 1), basis, ", ".join(wrong[:5]))
        return
    for what, basis in (
        (NOT_SHOWN, "a step computes the same, shown or not: equal bits"),
        (AT_ONCE, "a step does not depend on anything that a pass or a load resets: equal bits"),
        (THIRD, "a step does not depend on anything that a pass or a load resets: equal bits"),
        (WHILE_WRITTEN, "a step computes the same while a checkpoint is being written: equal bits"),
        (RESTORED, "a step computes the same from a checkpoint that the session read: equal bits"),
    ):
        if what not in found:
            continue
        wrong = found.get(what, ())
        note = f"{', '.join(wrong[:5])}: the step depends on something outside the state" if wrong else ""
        yield exact(_first_link(wrong, evidence.after), TAPS[what], len(wrong), max(len(wrong), 1), basis, note)
        if wrong:
            return
    basis = "scores and samples use the session's weights, from a step or from a load: equal bits"
    for what in (EVALUATION, SAMPLING):
        if what in found:
            # Compared with itself, the session shows nothing about the arithmetic; nor do two equal steps.
            stage = what if found[what] else _first_link((), evidence.after)
            yield exact(stage, TAPS[what], len(found[what]), 1, basis, ", ".join(found[what]))
    if ALIKE in found:
        wrong = found[ALIKE]
        basis = "a later step is the same on every rank: equal bits"
        stage = "reduction" if any(name.startswith(f"{GRADS}/") for name in wrong) else ""
        stage = stage or _first_link(wrong, evidence.after)
        yield exact(stage, TAPS[ALIKE], len(wrong), max(len(wrong), 1), basis, ", ".join(wrong[:5]))
    if AS_LATER in found:
        # A rank that differs from rank 0 is already named above, with the arrays that differ.
        wrong = tuple(name for name in found[AS_LATER] if ON_RANK not in name or not found.get(ALIKE))
        basis = "loss and gradients do not depend on the step's number: equal bits"
        note = ", ".join(wrong[:5])
        yield exact(_first_link(wrong, evidence.after), TAPS[AS_LATER], len(wrong), max(len(wrong), 1), basis, note)
    if LAST_WRITTEN in found:
        wrong = found[LAST_WRITTEN]
        basis = "the state after the run's last step, written and read back: equal checksums"
        note = ", ".join(wrong[:5])
        yield exact("checkpoint", TAPS[LAST_WRITTEN], len(wrong), max(len(wrong), 1), basis, note)
    if LEFT_OUT in found:
        wrong = found[LEFT_OUT]
        basis = "a step with a weight of NaN reports it and changes nothing but its counts: equal checksums"
        note = f"{', '.join(wrong[:5])}: as after a finite step" if wrong else ""
        stage = _first_link(wrong, evidence.after)
        scalars = {name.partition(ON_RANK)[0] for name in wrong} & evidence.after.scalars.keys()
        stage = "loss_scale" if scalars and stage == "step_count" else stage
        yield exact(stage, TAPS[LEFT_OUT], len(wrong), max(len(wrong), 1), basis, note)


def _first_link(wrong: Sequence[str], state: State) -> str:
    """Return the first wrong link of a step, from fields of its record and arrays of the state after it."""
    names = {name.partition(ON_RANK)[0].partition(AS_STEP)[0] for name in wrong}
    if of_record := [stage for name, stage in OF_RECORD.items() if name in names]:
        return of_record[0]
    kinds = {name.partition("/")[0] for name in names}
    return "moments" if kinds & set(state.optimizer) else "update" if "params" in kinds else "step_count"


def checkpoint(evidence: Evidence, reference: Reference) -> Iterator[Finding]:
    """Compare the state after the step with the one written to a checkpoint, read and loaded: equal bits.

    If only some blocks have lost something, the finding is that of the lowest of them.
    """
    if evidence.reloaded is None:
        return
    now, then = tensors(evidence.reloaded), tensors(evidence.after)
    differ = [
        f"{kind}/{name}"
        for kind in sorted(now.keys() | then.keys())
        for name in sorted(now.get(kind, {}).keys() | then.get(kind, {}).keys())
        if not _equal(now.get(kind, {}), then.get(kind, {}), name)
    ]
    scalars = [{**one.scalars, "step": one.step} for one in (evidence.reloaded, evidence.after)]
    differ += sorted(key for key in scalars[0].keys() | scalars[1].keys() if scalars[0].get(key) != scalars[1].get(key))
    basis = "equal bits after a checkpoint was written, read back and loaded"
    size = sum(map(len, then.values())) + len(scalars[1])
    place = _first_of_some_blocks(differ, reference.config.model.layers) or "state"
    yield exact("checkpoint", place, len(differ), size, basis, ", ".join(differ[:5]))


def _first_of_some_blocks(arrays: Sequence[str], layers: int) -> str | None:
    """Return the array of the lowest block, if all are in blocks, and some of the model's `layers` blocks have none."""
    blocks = {name: block for name in arrays if (block := layer_of(name)) is not None}
    if not blocks or len(blocks) < len(arrays) or len(set(blocks.values())) == layers:
        return None
    return min(blocks, key=lambda name: blocks[name])


def _equal(now: Arrays, then: Arrays, name: str) -> bool:
    """Return whether two arrays have the same bits, by their digests if both have some."""
    if name not in now or name not in then:
        return False
    if isinstance(now, HasDigests) and isinstance(then, HasDigests):
        return now.digest(name) == then.digest(name)
    return np.array_equal(now[name], then[name], equal_nan=True)


def tensors(state: State) -> dict[str, Arrays]:
    """Return the weights and moments of a state by kind."""
    return {"params": state.params, **state.optimizer}


def flat(state: State) -> dict[str, np.ndarray]:
    """Return every array of a state by `params/NAME`, `KIND/NAME`, `scalars/NAME` and `step`."""
    arrays = {f"params/{name}": array for name, array in state.params.items()}
    arrays |= {f"{kind}/{name}": array for kind, tree in state.optimizer.items() for name, array in tree.items()}
    scalars = {f"scalars/{name}": np.asarray(value) for name, value in state.scalars.items()}
    return arrays | scalars | {"step": np.asarray(state.step)}
