"""The evidence of one step of a candidate: all that a check judges, however it was gathered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lockstep.core.backend import Arrays, Batch, Gradients, RankReport, State, StepRecord
from lockstep.core.parity.evidence.held_out import HeldOut
from lockstep.core.parity.evidence.later_steps import Moved
from lockstep.core.parity.evidence.loss_weights import weighted_part
from lockstep.core.parity.evidence.observations import Observation
from lockstep.core.train.metrics import has_norms


@dataclass(frozen=True)
class Accumulation:
    """Gradients of several micro-batches, separately and summed by the candidate, on one rank or over ranks.

    parts: gradients of each micro-batch, or their sum with the share 1.
    shares: share of each part in the loss weight of the whole.
    whole: NLL, loss and gradients of all micro-batches together.
    batch: the micro-batches together.
    """

    parts: tuple[Arrays, ...]
    shares: tuple[float, ...]
    whole: Gradients
    batch: Batch


@dataclass(frozen=True)
class Evidence:
    """All that a check keeps of one step of a candidate.

    before, after: state before and after the step.
    batch: the batch of the step, with its own loss weights.
    record: the record that the step returned.
    stepped: the candidate's NLL, loss and gradients on that batch; those of the step itself, if it shows them.
    tapped: a micro-batch with uneven loss weights on some of its sequences. The reference repeats it.
    probed: the candidate's NLL, loss and gradients on `tapped`.
    taps: taps and their gradients on `tapped`, of the sequences with weight; gradients of parameters under `grad/`.
    not_covered: what the candidate could not do, in words.
    seconds: wall time of gathering, without the step itself.
    thorough: the reference repeats the whole step, and gradient accumulation and the checkpoint are tested. Otherwise
    the reference repeats one micro-batch of the step, another one from check to check.
    own: for each micro-batch of the step, observations of the candidate's gradients, by `gradient/PARAMETER`; empty if
    the step is a single micro-batch.
    due: digest of the batch that the data order gives for this step, if known.
    accumulated: gradients of several micro-batches, separately and together.
    reloaded: the state after a checkpoint of `after` was written, read and loaded.
    reduced: gradients of each rank's micro-batches, separately and reduced over ranks.
    ranks: reports of all ranks about the step, rank 0 first.
    rechecked: `tapped` was chosen by a recheck of other rows (core/parity/diagnose/recheck_rows.py).
    not_finite: the place of the first non-finite number, if the session skipped the step; empty otherwise.
    evaluated: scores of the sequences of `taps` before the step, their largest attention logits, and logits as sampling
    computes them (core/parity/evidence/evaluation.py, attention_logits.py, cached_logits.py); may be empty.
    misread: array of the step's batch or of `tapped` → number of elements that differ on the device, if read back.
    taps_keep_bits: the tapped program has the bits of the training program (core/capabilities.py).
    own_in_step: `own` is what each micro-batch contributes to the step. Otherwise each was computed separately, with
    its own weights.
    held_out: the validation that was due after the step, or None.
    reweighted: in a thorough check, observations of the candidate's gradients on the step's first micro-batch with the
    weights of each of `reweighted_batches`.
    later: for a run's first step, records of the same step as a later one.
    moved: gradients, weights and moments of these later steps (core/parity/evidence/later_steps.py).
    around_load: in a thorough check under FP8's delayed scaling, observations of the gradients of the step's first
    micro-batch after the step, and after loading the same state.
    probed_amaxes: amaxes of the pass over `tapped`, by layer (`ShowsAmaxes`).
    own_amaxes: the same of each micro-batch of the step.
    step_amaxes: the same of the step.
    tapped_amaxes: the same of the program that showed `taps`.
    changed: operation that must only read the state → what it changed; empty if the session shows no checksums.
    in_a_row: differences of two steps in a row (core/parity/evidence/in_a_row.py).
    miscounted: parameters whose optimizer counts another number of updates after the step, in words.
    hidden_taps: forward taps that the session cannot show.
    """

    before: State
    after: State
    batch: Batch
    record: StepRecord
    stepped: Gradients | None
    tapped: Batch
    probed: Gradients | None
    taps: Arrays
    not_covered: tuple[str, ...]
    seconds: float
    thorough: bool
    own: tuple[Mapping[str, Observation], ...] = ()
    due: str | None = None
    accumulated: Accumulation | None = None
    reloaded: State | None = None
    reduced: Accumulation | None = None
    ranks: tuple[RankReport, ...] = ()
    rechecked: bool = False
    not_finite: str = ""
    evaluated: Arrays = field(default_factory=dict)
    misread: Mapping[str, int] = field(default_factory=dict)
    taps_keep_bits: bool = False
    own_in_step: bool = False
    held_out: HeldOut | None = None
    reweighted: tuple[Mapping[str, Observation], ...] = ()
    later: tuple[StepRecord, ...] = ()
    moved: tuple[Moved, ...] = ()
    around_load: tuple[Mapping[str, Observation], ...] = ()
    probed_amaxes: Arrays = field(default_factory=dict)
    own_amaxes: tuple[Arrays, ...] = ()
    step_amaxes: Arrays = field(default_factory=dict)
    tapped_amaxes: Arrays = field(default_factory=dict)
    changed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    in_a_row: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    miscounted: tuple[str, ...] = ()
    hidden_taps: tuple[str, ...] = ()

    @property
    def given_probe(self) -> Batch | None:
        """The argument `probe` of `gather` for a check like this one: None for a thorough check."""
        return None if self.thorough else self.tapped

    @property
    def given_norms(self) -> bool:
        """The argument `norms` of the same call."""
        return has_norms(self.record.metrics)

    @property
    def given_tapped(self) -> Batch | None:
        """The argument `tapped` of the same call: None if it is the default of a thorough check."""
        return self.tapped if self.rechecked and self.thorough else None

    @property
    def losses(self) -> dict[str, tuple[Gradients | None, Batch]]:
        """Each result that has a loss, with its batch, by the loss's tap."""
        found = {"loss": (self.probed, self.tapped), "loss_of_step": (self.stepped, self.batch)}
        for what, sums in (("accumulation", self.accumulated), ("reduction", self.reduced)):
            if sums is not None:
                found[f"loss_of_{what}"] = sums.whole, sums.batch
        return found

    @property
    def batches(self) -> tuple[Batch, ...]:
        """Every batch that a reference computes."""
        return (self.batch, self.tapped, *([self.held_out.batch] if self.held_out else []))

    @property
    def weighted(self) -> Batch:
        """The sequences of `tapped` with loss weight, which are those of `taps`."""
        return weighted_part(self.tapped)

    @property
    def outweighs(self) -> np.ndarray | None:
        """Mask of `taps`, bool (B, S): the token that outweighs all the others and each token of the step.

        A recheck chooses such weights, so that the gradients of the other tokens are small
        (core/parity/diagnose/recheck_rows.py). None for all other weights.
        """
        weights = self.weighted.weights
        heaviest = float(weights.max(initial=0.0))
        others = weights.sum(dtype=np.float64) - heaviest
        return weights == heaviest if heaviest > max(others, 2.0 * self.batch.weights.max(initial=0.0)) else None
