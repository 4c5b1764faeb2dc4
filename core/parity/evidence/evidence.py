"""The evidence of one step of a candidate: all that a check judges, independent of how it was gathered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.core.backend import Arrays, Batch, Gradients, RankReport, State, StepRecord
from lockstep.core.parity.evidence.held_out import HeldOut
from lockstep.core.parity.evidence.later_steps import Moved
from lockstep.core.parity.evidence.loss_weights import weighted_part
from lockstep.core.parity.evidence.observations import Observation
from lockstep.core.train.metrics import has_norms


@dataclass(frozen=True)
class Accumulation:
    """Gradients of several micro-batches, each alone and summed by the candidate, on one rank or over ranks.

    parts: of each micro-batch alone, or their sum, whose share is 1. shares: the part of the loss weight that each has
    in the whole. whole: NLL, loss and gradients of all. batch: the micro-batches together.
    """

    parts: tuple[Arrays, ...]
    shares: tuple[float, ...]
    whole: Gradients
    batch: Batch


@dataclass(frozen=True)
class Evidence:
    """All that a check keeps of one step of a candidate.

    before, after: state around the step. batch: what the step was given, with its own loss weights.
    due:       digest of the batch that the data order prescribes for this step, where that is known.
    stepped:   the candidate's NLL, loss and gradients on that batch: those of the step itself, where it shows them.
    own:       of each of the step's micro-batches, the observations of the candidate's gradients, by
               `gradient/PARAMETER`; empty where the step is one micro-batch. own_in_step: whether they are what each
               adds to the step; otherwise each was computed apart from it, with its own weights.
    thorough:  whether the reference repeats the whole step, and accumulation and the checkpoint are tried. Otherwise it
               repeats one micro-batch of the step, another one from check to check.
    tapped:    a micro-batch whose loss lies, with uneven weights, on some of its sequences. The reference repeats it.
    probed:    the candidate's NLL, loss and gradients on `tapped`.
    taps:      taps and gradients on `tapped`, of those sequences; of parameters under `grad/`.
    accumulated: gradients of several micro-batches apart and together. reloaded: the state after a checkpoint of
    `after` was written, read back and loaded.
    reduced: of several ranks, gradients of each rank's micro-batches by themselves, and reduced. ranks: what each rank
    reports of the step, rank 0 first.
    rechecked: whether `tapped` was chosen by a recheck of other rows (core/parity/diagnose/recheck_rows.py).
    not_covered: what the candidate could not do, in words. seconds: what gathering cost, without the step itself.
    not_finite: where the session reports that its step was not finite, and so left out; empty if it was made.
    evaluated: scores of those sequences before the step, their largest attention logits, and logits as sampling makes
    them (core/parity/evidence/evaluation.py, attention_logits.py, cached_logits.py); empty if there are none.
    misread: elements of each of the batch's arrays that lay otherwise on the device, where they were read back.
    taps_keep_bits: whether the tapped program promises the bits of the one that trains (core/capabilities.py).
    held_out: the validation that was due after the step; None if none was.
    reweighted: of a thorough check, the observations of the candidate's gradients on the step's first micro-batch with
    the weights of each of `reweighted_batches`. later: of a run's first step, the records of the same step as a later
    one; moved: what these did to weights and moments (core/parity/evidence/later_steps.py). around_load: under FP8's
    delayed scaling, of a thorough check, the observations of the gradients of the step's first micro-batch after the
    step, and when that state has been loaded.
    changed: what passes that only read the state changed in it, by what they did; empty where that is not reported.
    in_a_row: what differs in two steps that are made with nothing between them (core/parity/evidence/in_a_row.py).
    hidden_taps: forward taps that the session cannot show, as it reports.
    miscounted: parameters of which the optimizer counts another number of updates after the step, in words.
    probed_amaxes, own_amaxes, step_amaxes: of `tapped`, of each of the step's micro-batches (in the step where
    own_in_step, else apart from it), and of the step, what the pass saw, by layer (`ShowsAmaxes`). tapped_amaxes: the
    same of the program that showed `taps`.
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
        """Return the `probe` with which `gather` makes a check like this one: None for a thorough check."""
        return None if self.thorough else self.tapped

    @property
    def given_norms(self) -> bool:
        """Return the `norms` of the same call."""
        return has_norms(self.record.metrics)

    @property
    def given_tapped(self) -> Batch | None:
        """Return the `tapped` of the same call: None where it is the one of every thorough check."""
        return self.tapped if self.rechecked and self.thorough else None

    @property
    def losses(self) -> dict[str, tuple[Gradients | None, Batch]]:
        """Return each result that has a loss, with its batch, by the loss's tap."""
        found = {"loss": (self.probed, self.tapped), "loss_of_step": (self.stepped, self.batch)}
        for what, sums in (("accumulation", self.accumulated), ("reduction", self.reduced)):
            if sums is not None:
                found[f"loss_of_{what}"] = sums.whole, sums.batch
        return found

    @property
    def batches(self) -> tuple[Batch, ...]:
        """Return every batch that a reference computes."""
        return (self.batch, self.tapped, *([self.held_out.batch] if self.held_out else []))

    @property
    def weighted(self) -> Batch:
        """Return the sequences of `tapped` that hold its loss: those of `taps`."""
        return weighted_part(self.tapped)
