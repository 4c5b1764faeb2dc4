"""End-to-end comparisons from sketches: they contain the errors of all stages before the compared one.

Both sides start from the candidate's state and the same batch. The compared numbers are those in `observations/`, so a
check during a run and a replay from recorded sketches are the same computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from lockstep.core.backend import Arrays, Batch, Gradients, NotSupported, State
from lockstep.core.config.schema import ModelConfig
from lockstep.core.model.names import GRADIENT, cancelled, parameter_shapes, tap_names
from lockstep.core.parity.evidence.evaluation import LOGITS
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.loss_weights import weighted_part, weighted_rows
from lockstep.core.parity.evidence.observations import PARAMETER, PROBE_NLL, Observation, observed
from lockstep.core.parity.evidence.sketch import K
from lockstep.core.parity.judge.aggregates import geometric_mean
from lockstep.core.parity.judge.over_layers import OverLayers
from lockstep.core.parity.measures import calibrated_bounds
from lockstep.core.parity.measures.compare import Reference, compare_cancelled, compare_observed, exact, finding
from lockstep.core.parity.measures.distances import Distances
from lockstep.core.parity.measures.verdict import OVER_ALL, Finding
from lockstep.core.parity.reference.side_by_side import passes
from lockstep.core.parity.reference.stages import stages_of
from lockstep.core.train.fp8_amax import PREFIX, layers

Observations = Mapping[str, Observation]
TakesLogits = Callable[[np.ndarray, np.ndarray], None]


def observations(probed: Gradients | None, taps: Arrays, model: ModelConfig) -> dict[str, Observation]:
    """Return observations (sketch and statistics) of each tap, of its gradient, and of each parameter's gradient."""
    kept = {name: observed(taps[name]) for name in _taps_observed(taps, model)}
    if probed is not None:
        kept[PROBE_NLL] = observed(probed.nll)
        kept |= {PARAMETER + name: observed(grad) for name, grad in probed.grads.items()}
    return kept


def observations_of(evidence: Evidence, model: ModelConfig) -> dict[str, Observation]:
    """Return the observations of the tapped micro-batch. Its NLL is without sequences that have no weight."""
    probed = evidence.probed
    if probed is not None:
        probed = replace(probed, nll=probed.nll[weighted_rows(evidence.tapped)])
    return observations(probed, evidence.taps, model)


def names_observed(evidence: Evidence, model: ModelConfig) -> set[str]:
    """Return the names of `observations_of` without computing the observations."""
    names = set(_taps_observed(evidence.taps, model))
    if evidence.probed is not None:
        names |= {PROBE_NLL, *(PARAMETER + name for name in evidence.probed.grads)}
    return names


def _taps_observed(taps: Arrays, model: ModelConfig) -> list[str]:
    return [name for tap in tap_names(model) for name in (tap, GRADIENT + tap) if name in taps]


def _same(one: Batch, other: Batch) -> bool:
    return one is other or one.digest() == other.digest()


@dataclass(frozen=True)
class Repeated:
    """Observations of twin and truth, computed from the candidate's state and batches.

    errors: estimate of the number of independent errors in the gradient of the loss, from the tokens with most of it.
    amaxes: layer → FP8's amaxes of twin and truth under delayed scaling, (3,) each, as from `Chain.run`.
    """

    twin: Observations
    truth: Observations
    errors: int = K
    amaxes: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


class Shown(Protocol):
    """A function that receives both gradients of a parameter on the tapped micro-batch while they are in memory."""

    def __call__(self, name: str, twin: np.ndarray, truth: np.ndarray, errors: int) -> None:
        """Receive both gradients of the parameter `name`.

        errors: as in `Repeated`.
        """
        ...


def repeat(
    asked: Collection[str],
    state: State,
    probe: Batch,
    tapped: Batch,
    reference: Reference,
    missing: list[str],
    shown: Shown | None = None,
    of_logits: Sequence[TakesLogits] = (),
) -> Repeated:
    """Run the reference for the observations in `asked`. No array is kept.

    probe: the batch of NLL and parameter gradients.
    tapped: the batch of the taps, whose loss weight is on some of its sequences.
    missing: receives the comparisons that are not possible.
    shown: receives each parameter's gradients on the tapped batch.
    of_logits: functions that receive the logits of twin and truth on the tapped batch.
    Raises NotSupported if the reference gives no gradients.
    """
    model = reference.config.model
    # A token without weight contributes nothing, so the reference leaves it out.
    part = weighted_part(tapped)
    one_batch = _same(probe, tapped)
    gradients = [PARAMETER + name for name in parameter_shapes(model)]
    of_probe = [PROBE_NLL, *gradients] if PROBE_NLL in asked else []
    of_tapped = [name for tap in tap_names(model) for name in (tap, GRADIENT + tap) if name in asked]
    twin: dict[str, Observation] = {}
    truth: dict[str, Observation] = {}
    errors = K
    runs = [(probe, of_probe), (part, of_tapped + (gradients if shown and of_probe else []))]
    for batch, names in [(part, of_probe + of_tapped)] if one_batch else runs:
        try:
            for made in passes(reference, state, batch, names) if names else ():
                name = made.name.removeprefix(PARAMETER)
                if made.name == PROBE_NLL:
                    errors = errors_of_loss(made.truth, batch)
                if name != made.name and shown is not None and batch is part:
                    shown(name, made.twin, made.truth, errors)
                for take in of_logits if name == LOGITS else ():
                    take(made.twin, made.truth)
                if name == made.name or batch is not part or one_batch:
                    twin[made.name], truth[made.name] = observed(made.twin), observed(made.truth)
        except NotSupported as reason:
            if of_probe and PROBE_NLL not in twin:
                raise
            missing.append(f"taps end to end: the reference does not observe them: {reason}")
    return Repeated(twin, truth, errors)


def repeat_alone(state: State, batch: Batch, reference: Reference, weight: float | None = None) -> Repeated:
    """Run the reference on one batch for its NLL and parameter gradients.

    weight: the divisor of the loss Σ weight·nll; by default the batch's own Σ weight.
    Raises NotSupported if the reference gives no gradients.
    """
    names = [PROBE_NLL, *(PARAMETER + name for name in parameter_shapes(reference.config.model))]
    names += [PREFIX + layer for layer in layers(reference.config)]
    amaxes: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    twin: dict[str, Observation] = {}
    truth: dict[str, Observation] = {}
    errors = K
    for made in passes(reference, state, batch, names, weight):
        if made.name == PROBE_NLL:
            errors = errors_of_loss(made.truth, batch)
        if made.name.startswith(PREFIX):
            amaxes[made.name.removeprefix(PREFIX)] = made.twin, made.truth
        else:
            twin[made.name], truth[made.name] = observed(made.twin), observed(made.truth)
    return Repeated(twin, truth, errors, amaxes)


def errors_of_loss(nll: np.ndarray, batch: Batch) -> int:
    """Estimate the number of independent errors in the gradients of a loss, from the gradient of each token.

    ‖∂ loss / ∂ logits‖ of a token is about weight · (1 − p), with p = e^(−nll) the probability of its target.
    """
    wide = nll.astype(np.float64).ravel()
    energy = np.square(batch.weights.ravel() * -np.expm1(-wide))
    # In a text of one repeated letter, all predictions are equal and have the same error.
    _, same = np.unique(np.round(wide, 6), return_inverse=True)
    return calibrated_bounds.OF_A_ROW * calibrated_bounds.participation(np.bincount(same, energy))


def compare_with(found: Observations, repeated: Repeated, reference: Reference) -> Iterator[Finding]:
    """Compare each observation of a candidate with twin and truth at the same state and on the same batches."""
    twin, truth = repeated.twin, repeated.truth
    over_layers = OverLayers(reference)
    for stage in stages_of(reference.config):
        for name, phase in ((stage.tap, "forward"), (GRADIENT + stage.tap, "backward")):
            if name in found and name in twin and not (name == "nll" and PROBE_NLL in found):
                kind = calibrated_bounds.tap_kind(stage.id, phase)
                sides = found[name], twin[name], truth[name]
                one = compare_observed(reference, stage.id, kind, stage.tap, *sides, phase)
                over_layers.add(one, kind, min(truth[name].independent, K))
                yield one
    if PROBE_NLL in found:
        last = stages_of(reference.config)[-1].id
        kind = calibrated_bounds.tap_kind(last, "forward")
        of_nll = compare_observed(reference, last, kind, "nll", found[PROBE_NLL], twin[PROBE_NLL], truth[PROBE_NLL])
        if reference.over_steps is not None:
            reference.over_steps.means.add(of_nll, kind, truth[PROBE_NLL].independent)
        yield of_nll
    yield from _parameter_gradients(found, repeated, reference, over_layers)
    yield from over_layers.findings()


def _cancelled(
    reference: Reference, name: str, c: Observation, w: Observation, t: Observation, of_weight: Observation
) -> Finding:
    """Compare a gradient that is 0 in exact arithmetic.

    of_weight: the truth's observation of the weight next to it. For inputs x of about 1, the norm of Σ g·xᵀ is about
    √(columns) times that of Σ g without cancellation.
    """
    if c.size != t.size:
        return exact("gradients", name, 1, t.size, "sizes must be equal", f"candidate {c.size}, reference {t.size}")
    if c.nonfinite:
        return exact("gradients", name, c.nonfinite, t.size, "every number is finite")
    scale = of_weight.norm / math.sqrt(of_weight.size / t.size)
    of_c, of_w, of_t = (one.sketch.astype(np.float64) for one in (c, w, t))
    errors = float(np.linalg.norm(of_c - of_t)), float(np.linalg.norm(of_w - of_t))
    return compare_cancelled(reference, "gradients", name, "end_to_end", errors, scale, t.size)


def _parameter_gradients(
    found: Observations, repeated: Repeated, reference: Reference, over_layers: OverLayers
) -> Iterator[Finding]:
    twin, truth, errors = repeated.twin, repeated.truth, repeated.errors
    shapes = parameter_shapes(reference.config.model)
    given = {name.removeprefix(PARAMETER) for name in found if name.startswith(PARAMETER)}
    if not given:
        return
    absent = sorted(given ^ set(shapes))
    basis = "every parameter has a gradient"
    yield exact("gradients", "names", len(absent), len(shapes), basis, ", ".join(absent[:5]))
    excesses: list[float] = []
    without_gradient = cancelled(reference.config.model)
    for name in shapes:
        if name in given:
            key = PARAMETER + name
            if name in without_gradient:
                sides = found[key], twin[key], truth[key]
                yield _cancelled(reference, name, *sides, truth[PARAMETER + without_gradient[name]])
                continue
            kind = calibrated_bounds.gradient_kind(reference.config.model, name)
            one = compare_observed(reference, "gradients", kind, name, found[key], twin[key], truth[key], most=errors)
            excesses += [m.value for m in one.measures if m.name == "excess"]
            over_layers.add(one, kind, min(truth[key].independent, errors, K))
            yield one
    if excesses:
        together = Distances(geometric_mean(excesses), 0.0, 0.0, 0.0, 0.0, 0.0)
        bounds = reference.measures("gradients/together", together, errors)
        only = tuple(m for m in bounds if m.name == "excess")
        of_all = finding("gradients", OVER_ALL, "end_to_end", only, len(excesses))
        if reference.over_steps is not None:
            reference.over_steps.means.add(of_all, "gradients/together", errors)
        yield of_all
