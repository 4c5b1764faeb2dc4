"""The evidence of one step while the passes of a check are still running."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.core.backend import Arrays, Batch, Gradients, NotSupported, RankReport, Session, State, StepRecord
from lockstep.core.capabilities import HidesTaps, ShowsParts, TapsKeepBits, ask, ranks_of
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.evidence.changed import Changed
from lockstep.core.parity.evidence.evidence import Accumulation, Evidence
from lockstep.core.parity.evidence.held_out import HeldOut
from lockstep.core.parity.evidence.into_store import state_into
from lockstep.core.parity.evidence.later_steps import Moved
from lockstep.core.parity.evidence.parts import Observations
from lockstep.core.parity.evidence.probe import micro_to_probe, probe_of
from lockstep.core.parity.evidence.store import FolderStore, Store
from lockstep.core.streams import StreamStep


@dataclass
class Gathering:
    """The evidence of one step while it is gathered.

    session, config, batch, store, ahead: as in `gather`.
    micros: the micro-batches of `batch`.
    missing: what the candidate could not do, in words, in the order of the requests.
    changed: record of the changes by passes.
    sums_before: checksums of `before`.
    shows_parts: the session, if its step will show the contribution of each micro-batch; else None.
    in_passing: the session's step, if it shows its gradients; else None.
    All other fields are those of `Evidence`.
    """

    session: Session
    config: RunConfig
    batch: Batch
    store: Store
    thorough: bool
    ahead: bool
    missing: list[str]
    micros: list[Batch]
    before: State
    changed: Changed
    sums_before: Mapping[str, float]
    tapped: Batch
    shows_parts: ShowsParts | None = None
    in_passing: StreamStep | None = None
    seconds: float = 0.0
    own: tuple[Observations, ...] = ()
    own_amaxes: tuple[Arrays, ...] = ()
    reweighted: tuple[Observations, ...] = ()
    probed: Gradients | None = None
    probed_amaxes: Arrays = field(default_factory=dict)
    stepped: Gradients | None = None
    taps: Arrays = field(default_factory=dict)
    tapped_amaxes: Arrays = field(default_factory=dict)
    evaluated: Arrays = field(default_factory=dict)
    accumulated: Accumulation | None = None
    reduced: Accumulation | None = None
    # The step itself sets these two.
    record: StepRecord = field(init=False)
    after: State = field(init=False)
    not_finite: str = ""
    step_amaxes: Arrays = field(default_factory=dict)
    held_out: HeldOut | None = None
    misread: Mapping[str, int] = field(default_factory=dict)
    miscounted: tuple[str, ...] = ()
    ranks: tuple[RankReport, ...] = ()
    reloaded: State | None = None
    later: tuple[StepRecord, ...] = ()
    moved: tuple[Moved, ...] = ()
    in_a_row: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    around_load: tuple[Observations, ...] = ()

    def evidence(self, due: str | None) -> Evidence:
        """Return the evidence. due: digest of the batch that the data order gives."""
        return Evidence(
            self.before,
            self.after,
            self.batch,
            self.record,
            self.stepped,
            self.tapped,
            self.probed,
            self.taps,
            tuple(self.missing),
            self.seconds,
            self.thorough,
            self.own,
            due=due,
            accumulated=self.accumulated,
            reloaded=self.reloaded,
            reduced=self.reduced,
            ranks=self.ranks,
            not_finite=self.not_finite,
            evaluated=self.evaluated,
            misread=self.misread,
            taps_keep_bits=_taps_keep_bits(self.session),
            own_in_step=self.shows_parts is not None,
            held_out=self.held_out,
            reweighted=self.reweighted,
            later=self.later,
            moved=self.moved,
            around_load=self.around_load,
            probed_amaxes=self.probed_amaxes,
            own_amaxes=self.own_amaxes,
            step_amaxes=self.step_amaxes,
            tapped_amaxes=self.tapped_amaxes,
            changed=self.changed.found,
            in_a_row=self.in_a_row,
            miscounted=self.miscounted,
            hidden_taps=_hidden_taps(self.session),
        )


def begin(
    session: Session,
    config: RunConfig,
    batch: Batch,
    probe: Batch | None,
    tapped: Batch | None,
    store: Store,
    ahead: bool,
) -> Gathering:
    """Read the state before the step, and choose the micro-batch to examine. Arguments as in `gather`."""
    missing: list[str] = []
    before = state_into(store, "before", session)
    changed = Changed(session, missing)
    if isinstance(store, FolderStore) and store.ranks > 1:
        store.lend(ranks_of(session), "before/")
    if probe is not None:
        tapped = probe
    elif tapped is None:
        tapped = probe_of(micro_to_probe(batch, config), config, turn=before.step)
    return Gathering(
        session,
        config,
        batch,
        store,
        thorough=probe is None,
        ahead=ahead,
        missing=missing,
        micros=batch.cut(config.train),
        before=before,
        changed=changed,
        sums_before=changed.sums,
        tapped=tapped,
    )


def _hidden_taps(session: Session) -> tuple[str, ...]:
    try:
        return tuple(ask(session, HidesTaps).hidden_taps())
    except NotSupported:
        return ()


def _taps_keep_bits(session: Session) -> bool:
    try:
        return ask(session, TapsKeepBits).taps_keep_bits
    except NotSupported:
        return False
