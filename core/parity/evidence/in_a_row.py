"""Compare two steps in a row, as in training, with the same two steps with a check between them.

A check itself acts between two steps. A check computes gradients, which may clear what a step left; a check reads the
tensors of a step; and a check ends with loading a state, which may refresh stale copies. A session that depends on
anything outside its state (a copy of weights that only a load refreshes, gradients that only other passes clear, a
buffer of old gradients) is wrong in every run and right in every check.

A checkpoint, an evaluation and a resume also come between steps (`Follows`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from lockstep.core.backend import Arrays, Batch, NotSupported, Session, State, StepRecord, in_words
from lockstep.core.capabilities import Evaluates, Loads, Samples, ShowsChecksums, ask, ranks_of
from lockstep.core.checkpoint.format import PARAMS
from lockstep.core.config.schema import RunConfig
from lockstep.core.data.memory import available_memory_bytes
from lockstep.core.model.budget import parameter_count
from lockstep.core.parity.measures.drawn_part import parts_of_all
from lockstep.core.run.ranks import Ranks, is_sharded
from lockstep.core.streams import Collected, stream_state
from lockstep.core.train.finite import NotFinite
from lockstep.core.train.unchanged_state import differing

# Keys of the result of `in_a_row`.
LOADED, NOT_SHOWN, AT_ONCE, THIRD = "loaded", "not shown", "at once", "third"
WHILE_WRITTEN, RESTORED = "while written", "restored"
# Keys of scores and samples from a state that a step has left, without a load.
EVALUATION, SAMPLING = "evaluation", "sampling"
# Keys of a run's first step repeated as later steps: the records, the agreement of ranks, and the last checkpoint
# (core/parity/evidence/later_steps.py).
AS_LATER, ALIKE, LAST_WRITTEN = "as later", "alike", "last written"
# Key of a step that is not finite (core/parity/evidence/left_out.py).
LEFT_OUT = "left out"
# Key → tap of its finding.
TAPS = {
    NOT_SHOWN: "the step again, not shown",
    AT_ONCE: "the step after, at once",
    THIRD: "the third step, at once",
    WHILE_WRITTEN: "the step after, while a checkpoint is written",
    RESTORED: "the step after, from a checkpoint that was restored",
    EVALUATION: "scores after a step, not loaded",
    SAMPLING: "samples after a step, not loaded",
    AS_LATER: "the same step, as a later one",
    ALIKE: "later steps, on every rank",
    LAST_WRITTEN: "the checkpoint of the last step",
    LEFT_OUT: "a step that is not finite",
}
# Fields of a record that the step's arithmetic sets, in its order.
ARITHMETIC = ("loss", "grad_norm", "clip_coefficient", "lr")
# Fields of ARITHMETIC that the model's passes set.
OF_MODEL = ARITHMETIC[:2]
ON_RANK, AS_STEP = " on rank ", " as step "
WHAT = "two steps in a row"
# A step needs memory for gradients next to the checkpoint's copy of the state. As much again stays free.
MEMORY_OF_STEP = 2
# A session that reads its own checkpoint may hold all of it, weights and two moments, next to its state.
MEMORY_OF_STATE = 4
# An update changes an element by about the learning rate. At this rate, one in a hundred bf16 weights of size 0.02
# changes.
LEAST_RATE = 1e-6
# Another order of summation changes a loss, a global gradient norm or the length of a step by a smaller share than
# this.
NO_ROUNDING = 0.05
# Three steps are run three times. A fault at every eighth call or more often occurs in some of these steps and not in
# others. A fault at every third call occurs in a step that the reference repeats.
REPEATED = 3

Sums = Mapping[str, float]


def differing_numbers(one: StepRecord, other: StepRecord, names: Sequence[str] = OF_MODEL) -> tuple[str, ...]:
    """Return the names of the fields that differ between two records."""
    return tuple(name for name in names if repr(getattr(one, name)) != repr(getattr(other, name)))


def are_far_apart(one: StepRecord, other: StepRecord) -> bool:
    """Return whether loss or gradient norm differ by more than another order of summation can cause."""
    numbers = [(getattr(one, name), getattr(other, name)) for name in OF_MODEL]
    return any(abs(a - b) > NO_ROUNDING * max(abs(a), abs(b)) for a, b in numbers)


@dataclass(frozen=True)
class Made:
    """A completed step, with checksums of the state after it if they were requested."""

    record: StepRecord
    sums: Sums

    def differs_from(self, other: Made) -> tuple[str, ...]:
        """Return the names of differences: fields of the record, then arrays of the state."""
        return (*differing_numbers(self.record, other.record, ARITHMETIC), *differing(self.sums, other.sums))


def other_batch(batch: Batch) -> Batch:
    """Return another batch of the same shape: inputs and targets exchanged, sequences in reverse order.

    With an equal batch, a session that wrongly reuses the batch of the last step would not be detected.
    """
    arrays = {**batch.arrays, "tokens": batch.targets, "targets": batch.tokens}
    return Batch.of({name: np.ascontiguousarray(array[::-1]) for name, array in arrays.items()})


class Follows:
    """Results of a session at the state after the checked step, before it is loaded, and without loading.

    written, restored: the next step, made while a checkpoint is written, and from a restored checkpoint; None if not
    made.
    seen: scores of the step's first micro-batch, and logits after its first sequence.
    """

    def __init__(self, session: Session, config: RunConfig, batch: Batch, started: Sums, missing: list[str]) -> None:
        """Take the session before its step.

        started: checksums of the state before the step; if empty, states are not compared.
        """
        self.written: Made | None = None
        self.restored: Made | None = None
        self.seen: Arrays = {}
        self._session, self._config, self._batch = session, config, batch
        self._started, self._missing, self._ranks = started, missing, ranks_of(session)

    def look(self) -> None:
        """Score and sample, as training does."""
        self.seen = looked(self._session, self._config, self._batch)

    def once_begun(self) -> None:
        """Make the next step while a checkpoint is being written, as training does."""
        self.written = self._next("a step while a checkpoint is written")

    def once_restored(self) -> None:
        """Make the next step after the session has read the state after the first from its own checkpoint."""
        self.restored = self._next("a step from a checkpoint that was restored")

    def may_restore(self) -> bool:
        """Return whether memory suffices for the state of every rank a second time, in FP32."""
        return self._fits(MEMORY_OF_STATE, "a step from a checkpoint that was restored")

    def _fits(self, times: int, what: str) -> bool:
        # Assume that all ranks share one machine. The parts of a sharded model together are one model.
        models = 1 if is_sharded(self._config) else self._config.train.ranks
        needed = times * models * np.dtype(np.float32).itemsize * parameter_count(self._config.model)
        if all(self._ranks.gather(available_memory_bytes() >= needed, "`look for memory`")):
            return True
        self._missing.append(f"{what}: it takes {needed / 1e9:.1f} GB of free memory")
        return False

    def _next(self, what: str) -> Made | None:
        if not self._fits(MEMORY_OF_STEP, what):
            return None
        try:
            return Made(_step(self._session, other_batch(self._batch)), _sums(self._session, self._started))
        except Exception as reason:  # as in `in_a_row`
            if self._config.train.ranks > 1 and not isinstance(reason, NotSupported):
                raise
            self._missing.append(f"{what}: {in_words(reason)}")
            return None


def looked(session: Session, config: RunConfig, batch: Batch) -> Arrays:
    """Return scores and samples, which show the weights that the session uses; empty if it has neither."""
    micro = batch.cut(config.train)[0]
    found: dict[str, np.ndarray] = {}
    # Sampling comes first here, and last before the step, because each may undo an effect of the other.
    if not config.precision.couples_sequences:
        with suppress(NotSupported):
            found[SAMPLING] = np.array(ask(session, Samples).next_token_logits(micro.tokens[0]))
    with suppress(NotSupported):
        found[EVALUATION] = np.array(ask(session, Evaluates).evaluate(micro)["nll"])
    return found


def _sums(session: Session, started: Sums) -> Sums:
    """Return checksums of the session's state if there were checksums before."""
    return ask(session, ShowsChecksums).state_checksums() if started else {}


def in_a_row(
    session: Session,
    config: RunConfig,
    batch: Batch,
    before: State,
    after: State,
    shown: tuple[StepRecord, Sums],
    started: Sums,
    follows: Follows | None,
    missing: list[str],
) -> Mapping[str, tuple[str, ...]]:
    """Make the step and the next two on other batches at once, then again with the passes of a check between them.

    shown: record of the step in the check, and checksums of the state after it.
    started: checksums of the state before it. Checksums are empty if the session shows none; then only records are
    compared.
    follows: results of the session at the state after the step, before it was loaded.
    Returns key → names of differences:
    - LOADED: of the loaded state from `before`.
    - NOT_SHOWN: of the step without reading its tensors from the step with reading.
    - AT_ONCE: of the second step from the same step after a pass for gradients and a load.
    - THIRD: of the third step, in the same way.
    - WHILE_WRITTEN, RESTORED: of the second step from those in `follows`.
    - EVALUATION, SAMPLING: of scores and samples from those after a load, or that they equal those of the state before.
    Returns nothing, and adds a line to `missing`, if steps do not repeat their bits or cannot be made. The session has
    `after` again at the end. Every rank calls it with its own states and checksums. The names are the same on each.
    """
    try:
        load = ask(session, Loads).load
    except NotSupported as reason:
        missing.append(f"{WHAT}: {reason}")
        return {}
    if before.step + 2 > config.train.steps:
        missing.append(f"{WHAT}: the run ends with this one")
        return {}

    def sums() -> Sums:
        return _sums(session, started)

    second_batch = other_batch(batch)

    def made(batch: Batch) -> Made:
        return Made(_step(session, batch), sums())

    def third(gradients_first: bool) -> Made | None:
        # A CUDA graph first runs eagerly, is then captured, and is replayed from the third step on.
        if before.step + 3 > config.train.steps:
            return None
        if gradients_first:
            with suppress(NotSupported):
                session.gradients(batch.cut(config.train)[0])
        return made(batch)

    def at_once() -> tuple[Made, Made | None]:
        load(before)
        _step(session, batch)
        return made(second_batch), third(gradients_first=False)

    def with_a_check_between() -> _Apart:
        load(before)
        loaded, seen_before = sums(), _looked()
        first = made(batch)
        with suppress(NotSupported):
            session.gradients(batch.cut(config.train)[0])
        load(after)
        seen = _looked()
        return _Apart(loaded, seen_before, first, seen, made(second_batch), third(gradients_first=True))

    def _looked() -> Arrays:
        return looked(session, config, batch) if follows else {}

    def lengths() -> tuple[float, ...]:
        load(before)
        made = [_weights(session, config)]
        for given in (batch, second_batch, batch)[: config.train.steps - before.step]:
            _step(session, given)
            made.append(_weights(session, config))
        return tuple(float(np.linalg.norm(new - old)) for old, new in pairwise(made))

    try:
        again = partial(_is_a_pattern, lengths, ranks_of(session))
        runs = _Runs(at_once, with_a_check_between, again)
        return _compared(started, Made(*shown), follows, runs, missing, ranks_of(session))
    except Exception as reason:
        # The step keeps its verdict even if a later step fails. With several ranks, the other ranks wait for the failed
        # one, so no rank can continue.
        if config.train.ranks > 1 and not isinstance(reason, NotSupported):
            raise
        missing.append(f"{WHAT}: {in_words(reason)}")
        return {}
    finally:
        load(after)


@dataclass(frozen=True)
class _Apart:
    """Two steps with a check between them.

    loaded: checksums after the first load.
    seen_before, seen: scores and samples of the two loaded states.
    """

    loaded: Sums
    seen_before: Arrays
    first: Made
    seen: Arrays
    second: Made
    third: Made | None


@dataclass(frozen=True)
class _Runs:
    """Functions that run the steps again.

    is_a_pattern: returns whether the runs differ more at some calls than at others.
    """

    at_once: Callable[[], tuple[Made, Made | None]]
    with_a_check_between: Callable[[], _Apart]
    is_a_pattern: Callable[[], bool]


def _compared(
    started: Sums,
    shown: Made,
    follows: Follows | None,
    runs: _Runs,
    missing: list[str],
    ranks: Ranks,
) -> dict[str, tuple[str, ...]]:
    second, third = runs.at_once()
    apart = runs.with_a_check_between()
    found = {
        LOADED: on_any(ranks, differing(started, apart.loaded)),
        NOT_SHOWN: on_any(ranks, apart.first.differs_from(shown)),
        AT_ONCE: on_any(ranks, second.differs_from(apart.second)),
    }
    if third is not None and apart.third is not None:
        found[THIRD] = on_any(ranks, third.differs_from(apart.third))
    if follows is not None:
        changed = any(name.startswith("params/") for name in differing(started, shown.sums))
        moved = changed and shown.record.lr >= LEAST_RATE
        stale = {what: _stale(what, follows.seen, apart, moved) for what in follows.seen if what in apart.seen}
        found |= {what: on_any(ranks, words) for what, words in stale.items()}
        for key, made in ((WHILE_WRITTEN, follows.written), (RESTORED, follows.restored)):
            if made is not None:
                found[key] = on_any(ranks, made.differs_from(apart.second))
    if not found[LOADED] and any(found.values()):
        # Some programs do not repeat their bits. Only a difference that recurs with the same bits is reported.
        (second_again, third_again), again = runs.at_once(), runs.with_a_check_between()
        ours = second, third, apart.first, apart.second, apart.third
        theirs = second_again, third_again, again.first, again.second, again.third
        both = zip(ours, theirs, strict=True)
        pairs = [(one, other) for one, other in both if one and other]
        differ = [name for one, other in pairs for name in one.differs_from(other)]
        differ += [what for what, seen in apart.seen.items() if not _same(seen, again.seen.get(what))]
        apart_by_far = any(are_far_apart(one.record, other.record) for one, other in pairs)
        repeats = not on_any(ranks, tuple(differ))
        if not repeats and not on_any(ranks, ("record",) * apart_by_far) and not runs.is_a_pattern():
            missing.append(f"{WHAT}: the session's steps do not repeat their bits")
            return {}
    return found


def _weights(session: Session, config: RunConfig) -> np.ndarray:
    """Return a part of each parameter, concatenated, as float64 (N,)."""
    kept, found = parts_of_all(config, config.train.steps), Collected()

    def take(kind: str, name: str, array: np.ndarray) -> None:
        if kind == PARAMS and name in kept:
            found(kind, name, array.reshape(-1)[kept[name][0]].astype(np.float64))

    stream_state(session, take)
    return np.concatenate([found.arrays(PARAMS)[name] for name in kept])


def _is_a_pattern(lengths: Callable[[], tuple[float, ...]], ranks: Ranks) -> bool:
    """Return whether the same steps, run several times, change the weights more at some calls than at others.

    lengths: runs the steps, and returns the norm of each one's change of the weights. Another order of summation
    changes the direction of a step, not its length. Sharded weights are not examined.
    """
    if ranks.count > 1:
        return False
    made = np.array([lengths() for _ in range(REPEATED)])
    return bool((np.ptp(made, axis=0) > NO_ROUNDING * made.max(axis=0)).any())


def _same(one: np.ndarray, other: np.ndarray | None) -> bool:
    return other is not None and np.array_equal(one, other, equal_nan=True)


def _stale(what: str, seen: Arrays, apart: _Apart, moved: bool) -> tuple[str, ...]:
    """Describe the stale weights that scores or samples after a step use. moved: the step changed the weights."""
    if not _same(seen[what], apart.seen[what]):
        return ("other results than after loading the same state",)
    if moved and _same(apart.seen[what], apart.seen_before.get(what)):
        return ("the results of the state before the step",)
    return ()


def on_any(ranks: Ranks, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the differences on rank 0, then those on another rank only. The result is the same on every rank."""
    first, *others = ranks.gather(names, "`compare two steps in a row`")
    alone: dict[str, int] = {}
    for rank, of_rank in enumerate(others, 1):
        for name in of_rank:
            alone.setdefault(name, rank)
    return (*first, *(f"{name}{ON_RANK}{rank}" for name, rank in alone.items() if name not in first))


def _step(session: Session, batch: Batch) -> StepRecord:
    """Make a step. A step that is not finite is skipped and has a record too."""
    try:
        return session.step(batch)
    except NotFinite as found:
        return found.record
