"""Local checks: compare each stage of the model, forward and backward, from the candidate's own inputs to it.

Errors of earlier stages do not enter, so the sensitivity is highest and the faulty stage is named directly. The
backward pass of a stage gets the candidate's own inputs and the candidate's own gradient of its output. Its results are
compared at each *edge*: the gradient that this stage alone contributes to each of its inputs and parameters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from lockstep.core.arrays import Scaled, part_of, shape_of
from lockstep.core.backend import Arrays, NotSupported, RankReport
from lockstep.core.components.precision import narrowed
from lockstep.core.model.graph import OUTPUT, Operation
from lockstep.core.model.names import GRADIENT, cancelled, in_fp8, parameter_shapes
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.judge.rows import with_ranks
from lockstep.core.parity.measures import calibrated_bounds, scalar_bounds
from lockstep.core.parity.measures.accumulators import NO_SUMS, OfSums, of_sums
from lockstep.core.parity.measures.compare import (
    Comparison,
    Noise,
    NoiseOf,
    Reference,
    compare,
    compare_cancelled,
    exact,
    finding,
    relative_difference,
    same_but_for_rounding,
    zeroed,
)
from lockstep.core.parity.measures.distances import Distances, Sums
from lockstep.core.parity.measures.stretches import stretches
from lockstep.core.parity.measures.verdict import Finding, Measure
from lockstep.core.parity.reference.operations import run_operation, with_amaxes
from lockstep.core.parity.reference.stages import Shared, shared_tensors, stages_of
from lockstep.core.train.fp8_amax import amaxes_in_force
from lockstep.core.train.loss_scale import SCALE


class Sent(NamedTuple):
    """The gradient of a stage with respect to one input, in the twin and in the truth.

    sums: error of the matrix unit's sums.
    """

    twin: np.ndarray
    truth: np.ndarray
    sums: OfSums = NO_SUMS


def stages(
    evidence: Evidence,
    reference: Reference,
    missing: list[str],
    chosen: Callable[[Operation], bool] = lambda stage: True,
) -> Iterator[Finding]:
    """Compare the output of each stage, then each gradient that the stage computes. The order is not that of the chain.

    missing: receives the comparisons that are not possible.
    chosen: selects the stages. Sums of gradients are compared for tensors that a selected stage writes.
    """
    if not evidence.taps:
        return
    evidence = _as_computed(evidence)
    has_gradients = any(name.startswith(GRADIENT) for name in evidence.taps)
    sums = {shared.name: shared for shared in shared_tensors(reference.config)}
    sent: dict[tuple[str, str], Sent] = {}
    # One token's gradients are large: noise in them would hide those of the others. It is not compared.
    spare, taps = evidence.outweighs, evidence.taps
    if spare is not None:
        taps = {name: zeroed(value, spare) for name, value in taps.items()}
    amaxes = amaxes_in_force(reference.config, evidence.before.scalars)
    without_gradient = cancelled(reference.config.model)
    if has_gradients and "nll" not in evidence.hidden_taps:
        yield _loss_backward(evidence, reference)
    for stage in filter(chosen, stages_of(reference.config)):
        if absent := [t for t in (*stage.reads.values(), stage.tap) if t not in evidence.taps]:
            if set(absent) <= set(evidence.hidden_taps):
                missing += _not_shown(stage, absent, missing)
                continue
            basis = "every requested tap is present"
            yield exact(stage.id, stage.tap, len(absent), len(absent), basis, ", ".join(absent))
            continue
        inputs = _inputs(stage, evidence)
        if not all(np.isfinite(a).all() for a in inputs.values()):
            missing.append(f"{stage.id} at {stage.tap}: the candidate's own inputs to it are not finite")
            continue
        grad = evidence.taps.get(GRADIENT + stage.tap)
        if grad is not None and not np.isfinite(grad).all():
            missing.append(f"{stage.id} backward at {stage.tap}: the candidate's own gradient of it is not finite")
            grad = None
        if grad is not None:
            inputs["grad"] = grad
        try:
            variant = f"{stage.id}/fp8" if in_fp8(reference.config, stage) else stage.id
            of_variant = with_amaxes(stage, inputs, amaxes)
            w, t = _run(stage, variant, of_variant, reference)
            if spare is not None:
                w, t = ({name: zeroed(value, spare) for name, value in side.items()} for side in (w, t))
        except ValueError as error:  # if shapes do not fit, the tap's own comparison reports it
            yield exact(stage.id, stage.tap, 1, 1, "shapes of the inputs fit together", str(error).splitlines()[0])
            continue
        kind = calibrated_bounds.local_kind(reference.config, stage)
        noise = Noise(reference, variant, of_variant, w, t, spare)
        c = taps[stage.tap]
        forward = compare(
            reference,
            stage.id,
            kind,
            stage.tap,
            "local",
            c,
            w["out"],
            t["out"],
            noise=functools.partial(noise.of, "out"),
            sums=of_sums(reference.config, stage, OUTPUT, inputs),
        )
        yield from _unless_twin_overflows(forward, c, (w["out"],), missing)
        if grad is None:
            continue
        # If one token outweighs the others, the gradient of a parameter is that token's.
        for role in (*stage.reads, *(stage.params if spare is None else ())):
            name, total = stage.sends(role), stage.reads.get(role, stage.params.get(role))
            there = GRADIENT + name in taps
            if total in sums and (not there or name == total):
                of_role = of_sums(reference.config, stage, role, inputs)
                sent[stage.tap, role] = Sent(w[f"grad/{role}"], t[f"grad/{role}"], of_role)
                continue
            sides = w[f"grad/{role}"], t[f"grad/{role}"]
            if name in without_gradient:
                c = taps.get(GRADIENT + name, np.zeros_like(sides[1]))
                errors = _norm(c - sides[1].astype(np.float64)), _norm(sides[0] - sides[1].astype(np.float64))
                size, scale = sides[1].size, _norm(grad)
                yield compare_cancelled(reference, stage.id, name, "local", errors, scale, size, stage.layer)
                continue
            # The gradient of a parameter is a sum over all tokens.
            terms = grad[..., 0].size if role in stage.params else 1
            heard = functools.partial(noise.of, f"grad/{role}", terms)
            of_role = of_sums(reference.config, stage, role, inputs)
            backward = _sent_back(stage, role, name, sides, taps, reference, heard, of_role)
            yield from _unless_twin_overflows(backward, taps.get(GRADIENT + name), sides[:1], missing)
    if has_gradients:
        for shared in (one for one in sums.values() if chosen(one.producer)):
            yield from _sum(shared, sent, taps, reference, missing)


class Program:
    """The comparison of the training program with the tapped one, and of its gradients with the session's.

    The two programs may differ by honest rounding of the same mathematics, so their distance is bounded relative to the
    distance between twin and truth. Where gradients cancel, both distances are large. If the session does not show its
    program's gradients before later processing, the two links are one: `compiler` under compile, else `gradients`.
    """

    def __init__(self, evidence: Evidence, reference: Reference) -> None:
        self._evidence, self._reference = evidence, reference
        self._bridges: list[Finding] = []

    def __call__(self, name: str, twin: np.ndarray, truth: np.ndarray, errors: int) -> None:
        """Compare a parameter's gradient in both programs while the twin's and the truth's are in memory."""
        micro = self._evidence.probed
        if micro is None:
            return
        raw = micro.program if name in micro.program else micro.grads
        if name in cancelled(self._reference.config.model):
            return  # only rounding errors, which differ between programs; their size is checked end to end
        if name in raw and GRADIENT + name in self._evidence.taps:
            stage = "compiler" if self._reference.config.compile.enabled else "gradients"
            sides = raw[name], self._evidence.taps[GRADIENT + name]
            keeps = self._evidence.taps_keep_bits
            self._bridges += _bridge(stage, name, *sides, twin, truth, errors, self._reference, keeps)

    def findings(self) -> Iterator[Finding]:
        """Yield the comparisons of both programs, then those of the candidate's own gradients with each other."""
        yield from self._bridges
        micro = self._evidence.probed
        if micro is None:
            return
        for name in parameter_shapes(self._reference.config.model):
            if name not in micro.grads:
                yield exact("gradients", name, 1, 1, "every parameter has a gradient")
            elif name in micro.program:
                yield same_but_for_rounding(self._reference, "gradients", name, micro.grads[name], micro.program[name])


def accumulation(evidence: Evidence, reference: Reference) -> Iterator[Finding]:
    """Compare the gradients of several micro-batches together with the weighted sum of the separate ones."""
    found = evidence.accumulated
    if found is None:
        return
    for name, whole in found.whole.grads.items():
        parts = [part.get(name) for part in found.parts]
        if any(part is None or part.shape != whole.shape for part in parts):
            yield exact("accumulation", name, 1, 1, "every micro-batch has this gradient", phase="backward")
            continue
        scaled = [
            part if s == 1 else whole.dtype.type(s) * part
            for s, part in zip(found.shares, parts, strict=True)
            if part is not None
        ]
        yield same_but_for_rounding(reference, "accumulation", name, whole, functools.reduce(np.add, scaled))


def reduction(evidence: Evidence, reference: Reference) -> Iterator[Finding]:
    """Compare the gradients reduced over ranks with the sum of the ranks' gradients; then the states of the ranks."""
    found, dtype = evidence.reduced, reference.config.parallel.gradient_dtype
    if found is not None:
        for name, whole in found.whole.grads.items():
            shapes = [shape_of(part, name) if name in part else None for part in found.parts]
            if any(shape != whole.shape for shape in shapes):
                yield exact("reduction", name, 1, 1, "every rank has this gradient")
                continue
            total, together = np.zeros_like(whole), np.zeros(whole.shape) if dtype != "fp32" else None
            for share, part in zip(found.shares, found.parts, strict=True):
                scaled = whole.dtype.type(share) * part[name]
                total += scaled
                if together is not None:
                    together += np.abs(scaled)

            def compared(
                where: slice = slice(None),
                name: str = name,
                whole: np.ndarray = whole,
                total: np.ndarray = total,
                together: np.ndarray | None = together,
            ) -> Finding:
                if together is None:
                    return same_but_for_rounding(reference, "reduction", name, whole[where], total[where])
                return _narrowly_reduced(name, whole[where], total[where], together[where], reference)

            yield with_ranks(compared(), reference.config, whole.shape, lambda rows, _: compared(rows))
    yield from _same_on_every_rank(evidence, reference)


# Formats in which gradients may be summed: unit roundoff, and half the smallest spacing.
NARROW = {"bf16": (2.0**-8, 2.0**-134), "fp16": (2.0**-11, 2.0**-25)}


def _narrowly_reduced(
    name: str, whole: np.ndarray, total: np.ndarray, together: np.ndarray, reference: Reference
) -> Finding:
    """Compare a sum in a declared narrow format. Each rank's part is rounded once when cast, and each addition once.

    A rounding error is at most u times the rounded number, which is at most the sum of the parts' magnitudes (Higham
    2002, 4.2), or half the smallest spacing.
    together: the sum of the parts' magnitudes, float64.
    """
    ranks, dtype = reference.config.train.ranks, reference.config.parallel.gradient_dtype
    return _rounded_sum("reduction", name, whole, total, together, ranks, dtype, f" over {ranks} ranks")


def _rounded_sum(
    stage: str,
    name: str,
    whole: np.ndarray,
    total: np.ndarray,
    together: np.ndarray,
    roundings: int,
    dtype: str,
    over: str = "",
) -> Finding:
    """Compare a sum with `roundings` roundings to a narrow format with the sum of its parts in a wide format."""
    roundoff, smallest = NARROW[dtype]
    size = float(np.linalg.norm(total.astype(np.float64)))
    lost = roundings * (roundoff * float(np.linalg.norm(together)) + smallest * math.sqrt(total.size))
    basis = f"summed{over} in {dtype}: {roundings} roundings of {roundoff:.1e} of the parts' sizes"
    apart = relative_difference(whole, total)
    measure = Measure("relative_difference", apart, None, lost / size if size else 0.0, basis)
    return finding(stage, name, "local", (measure,), whole.size, float(np.mean(whole != total)), phase="backward")


# Field of a rank's record → the link it belongs to.
OF_EVERY_RANK = {
    "digest": "tokens",
    "step": "step_count",
    "lr": "learning_rate",
    "grad_norm": "grad_norm",
    "clip_coefficient": "clip_coefficient",
}


def _same_on_every_rank(evidence: Evidence, reference: Reference) -> Iterator[Finding]:
    """Compare each rank's record and state with rank 0's, bit for bit."""
    if len(evidence.ranks) < 2:
        return
    first, *others = evidence.ranks
    for key, stage in OF_EVERY_RANK.items():
        values = [getattr(report.record, key) for report in evidence.ranks]
        differ = sum(not scalar_bounds.same(value, values[0]) for value in values[1:])
        note = f"{key} by rank: {', '.join(map(str, values))}" if differ else ""
        yield exact(stage, f"{key}_of_ranks", differ, len(others), "equal on every rank", note)
    unequal = [
        f"{name} on rank {rank}"
        for rank, report in enumerate(others, 1)
        for name, digest in first.state.items()
        if report.state.get(name) != digest
    ]
    note = ", ".join(unequal[:5]) + (f" and {len(unequal) - 5} more" if len(unequal) > 5 else "")
    basis = "equal bits on every rank after the step, by SHA-256"
    yield exact("update", "state_of_ranks", len(unequal), len(others) * len(first.state), basis, note)
    yield from _same_taps(first, others, reference)


def _same_taps(first: RankReport, others: Sequence[RankReport], reference: Reference) -> Iterator[Finding]:
    """Compare each rank's taps of one micro-batch with rank 0's: each tap must have equal bits.

    Rank 0's stages are judged separately. A stage is named if a rank has rank 0's inputs to it and another result.
    """
    if not first.taps:
        return
    differs = {
        rank: {name for name in first.taps.keys() | one.taps.keys() if one.taps.get(name) != first.taps.get(name)}
        for rank, one in enumerate(others, 1)
        if one.processor == first.processor
    }
    if not differs:
        return
    basis, named = "equal bits on every rank, by SHA-256", set[int]()

    def told(stage: str, tap: str, phase: str, ranks: Sequence[int]) -> Iterator[Finding]:
        if ranks:
            named.update(ranks)
            said = f"on rank {', '.join(map(str, ranks))}"
            yield exact(stage, tap, len(ranks), len(differs), basis, said, phase)

    stages = stages_of(reference.config)
    for stage in stages:
        given = [rank for rank, names in differs.items() if names.isdisjoint(stage.reads.values())]
        yield from told(stage.id, stage.tap, "forward", [rank for rank in given if stage.tap in differs[rank]])
        sent_to = [rank for rank in given if differs[rank].isdisjoint((stage.tap, GRADIENT + stage.tap))]
        for role in (*stage.reads, *stage.params):
            name = stage.sends(role)
            wrong = [rank for rank in sent_to if GRADIENT + name in differs[rank]]
            yield from map(partial(_at, stage=stage), told(stage.id, name, "backward", wrong))
    last = stages[-1].tap
    began = [rank for rank, names in differs.items() if GRADIENT + last in names and last not in names]
    yield from told("loss", last, "backward", began)
    left = [f"{min(names)} on rank {rank}" for rank, names in differs.items() if names and rank not in named]
    yield exact("gradients", "taps_of_ranks", len(left), len(differs) * len(first.taps), basis, ", ".join(left[:5]))


def not_compared(evidence: Evidence) -> list[str]:
    """List, in words, the comparisons between rank 0 and other ranks that were not possible."""
    if len(evidence.ranks) < 2:
        return []
    first, *others = evidence.ranks
    if not first.taps:
        return ["stages on ranks other than 0: they show no taps that must be equal"]
    return [
        f"stages on rank {rank}: it computes on {one.processor}, and rank 0 on {first.processor}"
        for rank, one in enumerate(others, 1)
        if one.processor != first.processor
    ]


def _inputs(stage: Operation, evidence: Evidence) -> dict[str, np.ndarray]:
    inputs = {role: evidence.taps[tap] for role, tap in stage.reads.items()}
    inputs |= {role: evidence.before.params[name] for role, name in stage.params.items()}
    part = evidence.weighted
    return inputs | {role: part.arrays[role] for role in stage.batch}


def _as_computed(evidence: Evidence) -> Evidence:
    """Return the evidence with gradients times the loss scale, as the backward pass had them, for FP16's range."""
    scale = evidence.before.scalars.get(SCALE, 1.0)
    return evidence if scale == 1 else replace(evidence, taps=Scaled(evidence.taps, np.float32(scale), GRADIENT))


def _run(stage: Operation, variant: str, inputs: Arrays, reference: Reference) -> tuple[Arrays, Arrays]:
    # FP64 has no FP8, so the truth is the plain stage.
    names = (variant, stage.id) if len(reference.sessions) > 1 else (stage.id,)
    sides = zip(names, reference.sessions, strict=True)
    outputs = [run_operation(session, name, stage, inputs) for name, session in sides]
    if "grad" in inputs and any("grad/" + role not in outputs[0] for role in (*stage.reads, *stage.params)):
        raise NotSupported(f"the reference gives no gradients of {stage.id}")
    return outputs[0], outputs[-1]


def _not_shown(stage: Operation, absent: Sequence[str], said: Sequence[str]) -> Iterator[str]:
    """Yield a message that a stage is not judged, once for all blocks: the session cannot show these taps."""
    names = (tap if stage.layer is None else tap.removeprefix(f"blocks.{stage.layer}.") for tap in absent)
    line = f"local checks of {stage.id}: the candidate does not show {', '.join(names)}"
    if line not in said:
        yield line


def _loss_backward(evidence: Evidence, reference: Reference) -> Finding:
    """Compare the gradient of each token's NLL with the share of its weight."""
    part = evidence.weighted
    share = part.weights.astype(np.float64) / evidence.tapped.weights.sum(dtype=np.float64)
    share *= evidence.before.scalars.get(SCALE, 1.0)
    found = evidence.taps.get(GRADIENT + "nll")
    if found is None or found.shape != share.shape:
        return exact("loss", "nll", 1, 1, "every NLL has a gradient", phase="backward")
    return same_but_for_rounding(reference, "loss", "nll", found, share, phase="backward")


def _sent_back(
    stage: Operation,
    role: str,
    name: str,
    sides: tuple[np.ndarray, np.ndarray],
    taps: Mapping[str, np.ndarray],
    reference: Reference,
    noise: NoiseOf,
    sums: OfSums,
) -> Finding:
    """Compare one gradient that a stage computes. A missing gradient is compared as zero.

    sides: the twin's and the truth's.
    """
    w, t = sides
    c = taps.get(GRADIENT + name)
    note = "" if c is not None else "no gradient came back"
    c = np.zeros_like(t) if c is None else c
    kind = calibrated_bounds.local_kind(reference.config, stage, role)

    def compared(rows: slice = slice(None)) -> Finding:
        part = c[rows], w[rows], t[rows]
        return compare(reference, stage.id, kind, name, "local", *part, "backward", note, noise, stage.layer, sums)

    if role not in stage.params or c.shape != t.shape:
        return compare(reference, stage.id, kind, name, "local", c, w, t, "backward", note, noise, stage.layer, sums)
    return with_ranks(compared(), reference.config, t.shape, lambda rows, _: compared(rows))


def _unless_twin_overflows(
    found: Finding, c: np.ndarray | None, twin: Sequence[np.ndarray], missing: list[str]
) -> Iterator[Finding]:
    """Yield the finding. Drop a broken one if candidate and twin are both not finite for the same inputs.

    FP16 overflows at a large loss scale in an honest stage as well. A candidate that is finite there is compared.
    twin: the twin's results for the candidate's inputs, or the parts of a sum.
    """
    if found.ok or c is None or np.isfinite(c).all() or all(np.isfinite(part).all() for part in twin):
        yield found
    else:
        missing.append(f"{found.stage} {found.phase} at {found.tap}: its twin overflows too, from the same inputs")


def _at(found: Finding, stage: Operation) -> Finding:
    return replace(found, layer=stage.layer)


def _sum(
    shared: Shared,
    sent: Mapping[tuple[str, str], Sent],
    taps: Mapping[str, np.ndarray],
    reference: Reference,
    missing: list[str],
) -> Iterator[Finding]:
    """Compare a shared tensor's gradient with the sum of its consumers' parts.

    Parts that the candidate shows are its own. The twin's and the truth's replace the others. If the sum is wrong, one
    of the replaced parts is: that in whose direction the difference points.
    """
    total = taps.get(GRADIENT + shared.name)
    names = [GRADIENT + edge for _, _, edge in shared.consumers if edge and GRADIENT + edge in taps]
    hidden = [(s, role) for s, role, edge in shared.consumers if edge is None or GRADIENT + edge not in taps]
    if any((s.tap, role) not in sent for s, role in hidden):
        return
    shown = [taps[name] for name in names]
    if hidden:
        of_twin = [*shown, *(sent[s.tap, role].twin for s, role in hidden)]
        by_key = {(s.tap, role): s for s, role in hidden}
        found = _sum_with_hidden(shared, total, names, by_key, sent, taps, reference)
        yield from _unless_twin_overflows(found, total, of_twin, missing)
    elif total is None:
        yield exact(shared.producer.id, shared.name, 1, 1, "the gradients of its consumers arrive", phase="backward")
    else:
        found = _at(_sum_of_shown(shared, total, shown, reference), shared.producer)
        yield from _unless_twin_overflows(found, total, shown, missing)


def _sum_of_shown(shared: Shared, total: np.ndarray, parts: Sequence[np.ndarray], reference: Reference) -> Finding:
    """Compare a sum with its parts, which the candidate shows, in the format of the plan of casts."""
    precision, stage = reference.config.precision, shared.producer.id
    together, sizes = np.zeros(total.shape), []
    for part in parts:
        together += part
        sizes.append(_norm(part))
    if shared.name == shared.producer.tap and precision.plan.option(shared.producer.kind, OUTPUT):
        # Summed one after another in any order: each addition rounds once.
        magnitudes = functools.reduce(np.add, map(np.abs, parts))
        return _rounded_sum(stage, shared.name, total, together, magnitudes, len(parts) - 1, precision.operand)
    size = _norm(together)
    cancelled = sum(sizes) / size if size else 1.0
    return same_but_for_rounding(reference, stage, shared.name, total, together, "backward", cancelled)


def _sum_with_hidden(
    shared: Shared,
    total: np.ndarray | None,
    shown: Sequence[str],
    hidden: Mapping[tuple[str, str], Operation],
    sent: Mapping[tuple[str, str], Sent],
    taps: Mapping[str, np.ndarray],
    reference: Reference,
) -> Finding:
    """Compare a sum of which some parts are hidden. The twin's and the truth's parts replace them."""
    of_hidden = [(sent[key].twin, sent[key].truth) for key in hidden]
    shape = of_hidden[0][1].shape
    c = np.broadcast_to(np.zeros((), of_hidden[0][0].dtype), shape) if total is None else total
    basis = "shapes must be equal"
    if any(part.shape != shape for part in (c, *(taps[name] for name in shown))):
        return exact(shared.producer.id, shared.name, 1, 1, basis, phase="backward")
    along = dict.fromkeys(hidden, 0.0)
    precision, producer = reference.config.precision, shared.producer
    kept = shared.name == producer.tap and precision.plan.option(producer.kind, OUTPUT)
    narrow = precision.operand if kept else ""
    found: dict[tuple[str, str], Comparison] = {}
    for key, stage in hidden.items():
        kind = calibrated_bounds.local_kind(reference.config, stage, key[1])
        found[key] = Comparison(reference, stage.id, kind, shared.name, "local", shape, "backward", sums=sent[key].sums)
    for where in stretches(math.prod(shape)):
        own = sum((part_of(taps, name, where).astype(np.float64) for name in shown), start=np.zeros(()))
        w, t = (sum((sides[i].reshape(-1)[where].astype(np.float64) for sides in of_hidden), start=own) for i in (0, 1))
        w = narrowed(w, narrow) if narrow else w
        candidate = c.reshape(-1)[where]
        for key, comparison in found.items():
            comparison.add(candidate, w.astype(c.dtype), t)
            along[key] += float((candidate - t) @ sent[key].truth.reshape(-1)[where])
    chosen = max(hidden, key=lambda key: abs(along[key]) / (_norm(sent[key].truth) or math.inf))
    return _at(found[chosen].finding(), hidden[chosen])


def _norm(x: np.ndarray) -> float:
    flat, power = x.reshape(-1), 0.0
    for where in stretches(flat.size):
        wide = flat[where].astype(np.float64)
        power += float(wide @ wide)
    return math.sqrt(power)


def _bridge(
    stage: str,
    name: str,
    untapped: np.ndarray,
    tapped: np.ndarray,
    w: np.ndarray,
    t: np.ndarray,
    errors: int,
    reference: Reference,
    keeps_bits: bool,
) -> Iterator[Finding]:
    """Compare the gradient of the training program with that of the tapped one, as a twin distance.

    w, t: the twin's and the truth's gradient.
    errors: upper limit on the number of independent errors.
    keeps_bits: both programs must give the same bits. Otherwise they may differ as much as compiled programs do.
    """
    if not untapped.shape == tapped.shape == t.shape:
        yield exact(stage, name, 1, 1, "shapes must be equal", f"{untapped.shape}, {tapped.shape}", "backward")
        return
    # The difference of the two programs, added to the twin: all three measures then describe this difference.
    sums, unequal = Sums(t.shape), 0
    for where in stretches(t.size):
        of_twin, mine, theirs = (x.reshape(-1)[where] for x in (w, untapped, tapped))
        sums.add(of_twin + (mine - theirs), of_twin, t.reshape(-1)[where])
        unequal += int(np.count_nonzero(mine != theirs))
    d = replace(sums.distances(reference.stream), excess=1.0, unequal=unequal / t.size)
    size = min(calibrated_bounds.carriers(t), errors)
    recipe = reference.recipe if keeps_bits else calibrated_bounds.compiled(reference.recipe)
    kind = calibrated_bounds.bridge_kind(reference.config.model, name)
    kind = calibrated_bounds.under_plan(reference.config, kind)
    found = reference.bound(recipe, kind, d, size)
    if reference.config.device == "cuda" or not keeps_bits:  # where attention sums the gradient of q in varying order
        found = tuple(measure for measure in found if measure.name != "unequal")
    measures = (*found, *_along_the_truth(found, d))
    note = ""
    if keeps_bits and not all(measure.ok for measure in measures):
        alike = reference.bound(calibrated_bounds.compiled(recipe), kind, d, size)
        if all(measure.ok for measure in alike if measure.name != "unequal"):
            note = "the session promises equal bits of both programs (taps_keep_bits)"
    yield finding(stage, name, "local", measures, tapped.size, d.unequal, note, phase="backward")


def _along_the_truth(found: tuple[Measure, ...], d: Distances) -> Iterator[Measure]:
    """Bound the gain by half the bound on the distance.

    Rounding errors have random directions, a wrong length has not.
    """
    for measure in found:
        if measure.name == "twin_distance" and measure.high is not None:
            reach = measure.high / 2 * d.twin_relative_error
            basis = f"half the bound on the distance, of the error {d.twin_relative_error:.1e}"
            yield Measure("gain_difference", d.gain_difference, -reach, reach, basis)
