"""Evidence as a folder: `evidence.json` next to the tensors of its store. No pickle; files are read as untrusted data.

The folder alone can be judged later. `evidence.json` contains the record and all other small data, and for each tensor
only its kind in the store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from lockstep.core.backend import Arrays, Batch, Gradients, RankReport, State, StepRecord
from lockstep.core.checkpoint.format import PARAMS
from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.evidence import Accumulation, Evidence
from lockstep.core.parity.evidence.held_out import HeldOut
from lockstep.core.parity.evidence.into_store import put_all
from lockstep.core.parity.evidence.later_steps import Moved
from lockstep.core.parity.evidence.observations import from_arrays, to_arrays
from lockstep.core.parity.evidence.store import FolderStore, Stored

SCHEMA = 2
DOCUMENT = "evidence.json"
NLL = "nll"
# The arrays that `Batch` requires; `documents` may be absent.
NEEDED = ("tokens", "targets", "weights")


@dataclass(frozen=True)
class _State:
    """A state. kinds: `params` or kind of moment → kind in the store."""

    step: int
    scalars: Mapping[str, float]
    kinds: Mapping[str, str]


@dataclass(frozen=True)
class _Gradients:
    """Gradients; nll, grads and program are kinds in the store."""

    loss: float
    nll: str
    grads: str
    program: str


@dataclass(frozen=True)
class _Accumulation:
    """Gradients separately and together."""

    parts: tuple[str, ...]
    shares: tuple[float, ...]
    whole: _Gradients
    batch: str


@dataclass(frozen=True)
class _HeldOut:
    """The validation that was due after a step."""

    batch: str
    scores: str
    every: str


@dataclass(frozen=True)
class _Moved:
    """The kept part of a later step. grads: kind in the store."""

    number: int
    grads: str
    after: _State


@dataclass(frozen=True)
class _Document:
    """The contents of `evidence.json`. Fields as in `Evidence`; in place of tensors, their kinds in the store."""

    schema: int
    before: _State
    after: _State
    batch: str
    record: StepRecord
    stepped: _Gradients | None
    tapped: str
    probed: _Gradients | None
    taps: str
    not_covered: tuple[str, ...]
    seconds: float
    thorough: bool
    own: tuple[str, ...]
    due: str | None
    accumulated: _Accumulation | None
    reloaded: _State | None
    reduced: _Accumulation | None
    ranks: tuple[RankReport, ...]
    rechecked: bool
    not_finite: str
    # Evidence of earlier versions has none of these.
    evaluated: str = ""
    misread: Mapping[str, int] = field(default_factory=dict)
    taps_keep_bits: bool = False
    own_in_step: bool = False
    held_out: _HeldOut | None = None
    reweighted_by_token: tuple[str, ...] = ()
    later: tuple[StepRecord, ...] = ()
    around_load: tuple[str, ...] = ()
    probed_amaxes: str = ""
    own_amaxes: tuple[str, ...] = ()
    step_amaxes: str = ""
    tapped_amaxes: str = ""
    changed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    in_a_row: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    miscounted: tuple[str, ...] = ()
    moved: tuple[_Moved, ...] = ()
    end_of_text: int | None = None
    hidden_taps: tuple[str, ...] = ()


def store_of(evidence: Evidence) -> FolderStore | None:
    """Return the folder in which the evidence was gathered, or None if it is in memory."""
    params = evidence.before.params
    return params.store if isinstance(params, Stored) else None


def save_evidence(evidence: Evidence, store: FolderStore) -> Evidence:
    """Write what `store` does not hold yet, and finish the store. Returns the evidence as `open_evidence` does.

    Raises UserError if writing fails; then the store is removed.
    """
    document = _Writer(store).document(evidence)
    raw = json.dumps(asdict(document), indent=1, default=dict).encode()
    store.finish({DOCUMENT: raw})
    return _evidence(document, store)


def open_evidence(folder: Path) -> Evidence:
    """Open a folder of evidence. Its tensors are read on access.

    Raises UserError that names a missing, damaged or inconsistent file, or one of another schema.
    """
    store = FolderStore.open(folder)
    path = folder / DOCUMENT
    try:
        document = _adapter().validate_python(json.loads(store.document(DOCUMENT)))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path} is not valid evidence: {where}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not valid evidence: {type(error).__name__}: {error}") from error
    if document.schema != SCHEMA:
        raise UserError(f"{path} has schema {document.schema}; this Lockstep reads {SCHEMA}")
    try:
        return _evidence(document, store)
    except (ValueError, KeyError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not valid evidence: {type(error).__name__}: {error}") from error


@cache
def _adapter() -> TypeAdapter[_Document]:
    return TypeAdapter(_Document)


class _Writer:
    """A writer of tensors that a store does not hold yet. Its methods return the kind of a tensor in the store."""

    def __init__(self, store: FolderStore) -> None:
        self._store = store

    def document(self, evidence: Evidence) -> _Document:
        """Write all tensors. Returns the contents of `evidence.json`."""
        return _Document(
            SCHEMA,
            self._state("before", evidence.before),
            self._state("after", evidence.after),
            self._kind("batch", evidence.batch.arrays),
            evidence.record,
            self._gradients("stepped", evidence.stepped),
            self._kind("tapped", evidence.tapped.arrays),
            self._gradients("probed", evidence.probed),
            self._kind("taps", evidence.taps),
            evidence.not_covered,
            evidence.seconds,
            evidence.thorough,
            tuple(self._kind(f"own/{i}", to_arrays(one)) for i, one in enumerate(evidence.own)),
            evidence.due,
            self._accumulation("accumulated", evidence.accumulated),
            None if evidence.reloaded is None else self._state("reloaded", evidence.reloaded),
            self._accumulation("reduced", evidence.reduced),
            evidence.ranks,
            evidence.rechecked,
            evidence.not_finite,
            self._kind("evaluated", evidence.evaluated) if evidence.evaluated else "",
            evidence.misread,
            evidence.taps_keep_bits,
            evidence.own_in_step,
            self._held_out(evidence.held_out),
            tuple(self._kind(f"reweighted/{i}", to_arrays(one)) for i, one in enumerate(evidence.reweighted)),
            evidence.later,
            tuple(self._kind(f"around_load/{i}", to_arrays(one)) for i, one in enumerate(evidence.around_load)),
            self._kind("probed_amaxes", evidence.probed_amaxes) if evidence.probed_amaxes else "",
            tuple(self._kind(f"own_amaxes/{i}", one) for i, one in enumerate(evidence.own_amaxes)),
            self._kind("step_amaxes", evidence.step_amaxes) if evidence.step_amaxes else "",
            self._kind("tapped_amaxes", evidence.tapped_amaxes) if evidence.tapped_amaxes else "",
            evidence.changed,
            evidence.in_a_row,
            evidence.miscounted,
            tuple(map(self._moved, evidence.moved)),
            evidence.batch.end_of_text,
            evidence.hidden_taps,
        )

    def _kind(self, kind: str, arrays: Arrays) -> str:
        if isinstance(arrays, Stored) and arrays.store is self._store:
            return arrays.kind
        while self._store.names(kind):  # a recheck's taps, next to those of the check
            kind += "+"
        put_all(self._store, kind, arrays)
        return kind

    def _state(self, name: str, state: State) -> _State:
        kinds = {PARAMS: state.params, **state.optimizer}
        return _State(state.step, state.scalars, {k: self._kind(f"{name}/{k}", a) for k, a in kinds.items()})

    def _moved(self, found: Moved) -> _Moved:
        name = f"later/{found.number}"
        return _Moved(found.number, self._kind(f"{name}/grads", found.grads), self._state(name, found.after))

    def _gradients(self, name: str, found: Gradients | None) -> _Gradients | None:
        if found is None:
            return None
        return self._there(name, found)

    def _there(self, name: str, found: Gradients) -> _Gradients:
        return _Gradients(
            found.loss,
            self._kind(f"{name}/{NLL}", {NLL: found.nll}),
            self._kind(f"{name}/grads", found.grads),
            self._kind(f"{name}/program", found.program),
        )

    def _accumulation(self, name: str, found: Accumulation | None) -> _Accumulation | None:
        if found is None:
            return None
        parts = tuple(self._kind(f"{name}/{i}", part) for i, part in enumerate(found.parts))
        whole = self._there(f"{name}/whole", found.whole)
        return _Accumulation(parts, found.shares, whole, self._kind(f"{name}/batch", found.batch.arrays))

    def _held_out(self, found: HeldOut | None) -> _HeldOut | None:
        if found is None:
            return None
        batch = self._kind("held_out/batch", found.batch.arrays)
        return _HeldOut(batch, self._kind("held_out/scores", found.scores), self._kind("held_out/every", found.every))


def _evidence(document: _Document, store: FolderStore) -> Evidence:
    """Rebuild evidence from its document. Batches and NLL are read now, other tensors are `Stored`."""

    def gradients(of: _Gradients | None) -> Gradients | None:
        return None if of is None else there(of)

    def there(of: _Gradients) -> Gradients:
        return Gradients(store.get(of.nll, NLL), of.loss, store.arrays(of.grads), store.arrays(of.program))

    def batch(kind: str) -> Batch:
        arrays = store.arrays(kind)
        tokens, targets, weights = (arrays[name] for name in NEEDED)
        return Batch(tokens, targets, weights, arrays.get("documents"))

    def of_step(kind: str) -> Batch:
        return replace(batch(kind), end_of_text=document.end_of_text)

    def state(of: _State) -> State:
        kinds = {kind: store.arrays(of_store) for kind, of_store in of.kinds.items()}
        return State(of.step, kinds.pop(PARAMS), kinds, of.scalars)

    def accumulation(of: _Accumulation | None) -> Accumulation | None:
        if of is None:
            return None
        return Accumulation(tuple(map(store.arrays, of.parts)), of.shares, there(of.whole), batch(of.batch))

    def held_out(of: _HeldOut | None) -> HeldOut | None:
        return None if of is None else HeldOut(batch(of.batch), store.arrays(of.scores), store.arrays(of.every))

    return Evidence(
        before=state(document.before),
        after=state(document.after),
        batch=of_step(document.batch),
        record=document.record,
        stepped=gradients(document.stepped),
        tapped=of_step(document.tapped),
        probed=gradients(document.probed),
        taps=store.arrays(document.taps),
        not_covered=document.not_covered,
        seconds=document.seconds,
        thorough=document.thorough,
        own=tuple(from_arrays(store.arrays(kind)) for kind in document.own),
        due=document.due,
        accumulated=accumulation(document.accumulated),
        reloaded=None if document.reloaded is None else state(document.reloaded),
        reduced=accumulation(document.reduced),
        ranks=document.ranks,
        rechecked=document.rechecked,
        not_finite=document.not_finite,
        evaluated=store.arrays(document.evaluated) if document.evaluated else {},
        misread=document.misread,
        taps_keep_bits=document.taps_keep_bits,
        own_in_step=document.own_in_step,
        held_out=held_out(document.held_out),
        reweighted=tuple(from_arrays(store.arrays(kind)) for kind in document.reweighted_by_token),
        later=document.later,
        around_load=tuple(from_arrays(store.arrays(kind)) for kind in document.around_load),
        probed_amaxes=store.arrays(document.probed_amaxes) if document.probed_amaxes else {},
        own_amaxes=tuple(map(store.arrays, document.own_amaxes)),
        step_amaxes=store.arrays(document.step_amaxes) if document.step_amaxes else {},
        tapped_amaxes=store.arrays(document.tapped_amaxes) if document.tapped_amaxes else {},
        changed=document.changed,
        in_a_row=document.in_a_row,
        miscounted=document.miscounted,
        hidden_taps=document.hidden_taps,
        moved=tuple(Moved(one.number, store.arrays(one.grads), state(one.after)) for one in document.moved),
    )
