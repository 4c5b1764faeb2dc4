"""Run mutants: measure each one's effect on the real step, and judge its step as a check does."""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.core.mutate.conditions import ONE_RANK, first_step
from lockstep.core.mutate.draw import place_of
from lockstep.core.mutate.mutant import Mutant
from lockstep.core.mutate.places import LATER, Place, names
from lockstep.core.mutate.rows import Row
from lockstep.core.run.ranks import ONE, Ranks
from lockstep.core.train.metrics import RECOMPILED
from lockstep.scripts.shared.backends import REFERENCE, TRAINER, open_named
from lockstep.scripts.shared.failures import in_one_line
from lockstep.scripts.shared.peers import judge_of
from lockstep.scripts.shared.planting import Data, Kept

if TYPE_CHECKING:
    from lockstep.core.backend import Arrays, Backend, Batch, Session, State, StepRecord
    from lockstep.core.config.schema import RunConfig
    from lockstep.core.parity.measures.compare import Reference
    from lockstep.core.parity.measures.verdict import Check


@dataclass(frozen=True)
class Made:
    """The results of a step: record, NLL, gradients, the states around it, the scores of a batch."""

    record: StepRecord
    nll: np.ndarray
    grads: Arrays
    before: State
    after: State
    scores: Arrays


@dataclass
class MutantBench:
    """A bench for the mutants of one configuration, which share the reference's sessions and the honest steps.

    ranks: the trainer's ranks; each has a bench and makes the same calls, and all get the rows.
    """

    config: RunConfig
    data: Data
    backend: Backend
    trainer: Backend
    ranks: Ranks = ONE
    _reference: Reference | None = None
    _honest: dict[tuple[int, bool], Made | None] = field(default_factory=dict)

    @property
    def reference(self) -> Reference:
        """Return twin and truth; open them the first time."""
        from lockstep.core.parity.measures.compare import Reference

        if self._reference is None:
            self._reference = Reference.open(self.backend, self.config)
        return self._reference

    def honest_check(self) -> Check:
        """Return the check of the honest trainer's first step, which must agree."""
        return self._check(self.trainer.open(self.config), 1, self.data.batch(1))

    def row(self, mutant: Mutant) -> Row:
        """Plant one mutant, measure and judge it; an exception becomes the row's error.

        With several ranks it is raised, because another rank may be waiting in a collective.
        """
        place = place_of(self.config, mutant)
        row = self._begun(mutant, place)
        started = time.perf_counter()
        try:
            row = self._of_all_ranks(self._measured(row, mutant, place))
            if not row.equivalent:
                row = self._judged(row, mutant, place)
        except Exception as error:  # a mutant may break more than it declares; the others are still tried
            if self.ranks.count > 1:
                raise
            row = replace(row, error=in_one_line(error))
        return replace(row, seconds=round(time.perf_counter() - started, 2))

    def _of_all_ranks(self, row: Row) -> Row:
        """Return the row with a mutant's effect on the rank with the largest effect."""
        rows = self.ranks.gather(row)
        moved = {name: max(getattr(one, name) for one in rows) for name in MOVED}
        return replace(
            row, equivalent=all(one.equivalent for one in rows), stopped=any(one.stopped for one in rows), **moved
        )

    def measured(self, mutant: Mutant) -> Row:
        """Plant one mutant and measure its effect; it is not judged."""
        place = place_of(self.config, mutant)
        return self._measured(self._begun(mutant, place), mutant, place)

    def _begun(self, mutant: Mutant, place: Place) -> Row:
        step = first_step(mutant.operator.name, mutant.condition)
        return Row(str(mutant), recipe_of(self.config), place.origins(mutant.condition), step)

    def _open(self, mutant: Mutant, place: Place) -> Session:
        import torch

        from lockstep.torch_backend.mutate.session import MutatedBackend

        torch._dynamo.reset()
        # A session and its programs refer to each other.
        gc.collect()
        return MutatedBackend(mutant, place).open(self.config)

    def _batch(self, place: Place, mutant: Mutant, step: int) -> Batch:
        """Return the batch that a session gets in a step, which a mutated loader changes."""
        from lockstep.torch_backend.mutate.loader import changed

        batch = self.data.batch(step)
        here = mutant.condition != ONE_RANK or self.ranks.rank == self.ranks.count - 1
        wrong = mutant.kind == "loader" and here and step >= first_step(mutant.operator.name, mutant.condition)
        return changed(batch, mutant, place) if wrong else batch

    def _measured(self, row: Row, mutant: Mutant, place: Place) -> Row:
        """Make the real step, with the run's own loss weights, with and without the mutant."""
        last = row.step + (1 if mutant.kind in LATER else 0)
        resumed = mutant.condition == "resumed" or mutant.kind in ("written", "read")
        if (last, resumed) not in self._honest:
            self._honest[last, resumed] = self._made(
                self.trainer.open(self.config), last, resumed, [self.data.batch(n) for n in range(1, last + 1)]
            )
        right = self._honest[last, resumed]
        if right is None:
            raise ValueError(f"step {last} of the honest trainer is not finite")
        batches = [self._batch(place, mutant, n) for n in range(1, last + 1)]
        wrong = self._made(self._open(mutant, place), last, resumed, batches)
        if wrong is None:
            return replace(row, stopped=True)
        gradients, by_name = relative(wrong.grads, right.grads, right.grads)
        moved = {name: right.after.params[name] - right.before.params[name] for name in right.after.params}
        update, _ = relative(wrong.after.params, right.after.params, moved)
        loss = abs(wrong.record.loss - right.record.loss) / abs(right.record.loss)
        scores = float(np.abs(wrong.scores["nll"] - right.scores["nll"]).sum() / np.abs(right.scores["nll"]).sum())
        effect = scores if mutant.kind == "validation" else update if place.after_gradients else gradients
        return replace(
            row,
            equivalent=same_bits(wrong, right),
            gradients=gradients,
            worst=max(by_name.values()),
            loss=loss,
            update=update,
            effect=effect,
        )

    def _made(self, session: Any, last: int, resumed: bool, batches: Sequence[Batch]) -> Made | None:
        """Return the results of step `last`; None if they are not finite."""
        from lockstep.core.train.finite import NotFinite

        try:
            for number, batch in enumerate(batches, 1):
                if resumed and number == last:
                    through_a_checkpoint(session)
                before = session.state()
                record, shown = session.step_and_gradients(batch)
        except NotFinite:
            return None
        return Made(record, shown.nll, shown.grads, before, session.state(), session.evaluate(batches[0]))

    def _judged(self, row: Row, mutant: Mutant, place: Place) -> Row:
        """Run a session to the step in which the mutant first acts, and judge that step."""
        from lockstep.core.sinks.phrases import bounds

        session = self._open(mutant, place)
        for number in range(1, row.step):
            session.step(self._batch(place, mutant, number))
        if mutant.condition == "resumed":
            through_a_checkpoint(session)
        check = self._check(session, row.step, self._batch(place, mutant, row.step))
        if check.verdict == "could_not":
            return replace(row, error="nothing was compared")
        if check.verdict == "agreed":
            return row
        first = check.origins[0]
        worst = first.worst if first.measures else None
        origins = tuple((one.stage, one.phase, one.layer) for one in check.origins)
        return replace(
            row,
            found=True,
            named=origins[0],
            exact=any(names(right, origins[0]) for right in row.expected),
            others=origins[:8],
            scope=first.scope,
            measure=f"{worst.name} {worst.value:.3g} ({bounds(worst.low, worst.high)})" if worst else "",
        )

    def _check(self, session: Session, step: int, handed: Batch) -> Check:
        """Judge one step of a session, as `lockstep parity` does."""
        from lockstep.core.parity.diagnose.recheck_rows import recheck_rows
        from lockstep.core.parity.evidence.gather import gather
        from lockstep.core.parity.evidence.place import of_all_ranks, store_for
        from lockstep.core.parity.judge.judge import judge

        due = self.data.batch(step).digest()
        with store_for(self.config, self.ranks) as store:
            evidence = of_all_ranks(
                gather(session, self.config, handed, due=due, store=store, ahead=False), store, self.ranks
            )
            _, check = recheck_rows(session, self.config, evidence, judge(evidence, self.reference), self.reference)
        return check


# The fields of a row that give the size of a mutant.
MOVED = ("gradients", "worst", "loss", "update", "effect")


def recipe_of(config: RunConfig) -> str:
    """Return the recipe of a configuration's rows, with the number of ranks if there are several."""
    from lockstep.core.parity.measures import calibrated_bounds

    ranks = config.train.ranks
    return calibrated_bounds.recipe_of(config) + (f", {ranks} ranks" if ranks > 1 else "")


def through_a_checkpoint(session: Any) -> None:
    """Write the state of a session into a folder and restore it from there, as a resume does."""
    from lockstep.core.checkpoint.format import begin_checkpoint, reader_of, writer_of
    from lockstep.core.checkpoint.reader import opened_checkpoint

    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        pending = begin_checkpoint(Path(folder) / "state", session.steps_done, writer_of(session), {})
        with opened_checkpoint(pending.commit(), reader_of(session)) as state:
            session.load(state)


def relative(wrong: Arrays, right: Arrays, scale: Arrays) -> tuple[float, dict[str, float]]:
    """Return ‖wrong − right‖ / ‖scale‖ over all arrays, and of each by name; a missing array counts as 1."""
    off = {name: _square(wrong[name] - right[name] if name in wrong else right[name]) for name in right}
    of = {name: _square(scale[name]) for name in right}
    whole = math.sqrt(sum(off.values()) / sum(of.values()))
    return whole, {name: math.sqrt(off[name] / of[name]) if of[name] else 0.0 for name in right}


def _square(x: np.ndarray) -> float:
    return float(np.square(x, dtype=np.float64).sum())


def same_bits(wrong: Made, right: Made) -> bool:
    """Return whether all results of two steps are equal bit for bit.

    A mutant that begins to act makes torch.compile trace its program again, which is no result.
    """

    def arrays(made: Made) -> Iterator[tuple[str, np.ndarray]]:
        yield "nll", made.nll
        yield from made.grads.items()
        yield from made.after.params.items()
        for kind, of in made.after.optimizer.items():
            yield from ((f"{kind}/{name}", array) for name, array in of.items())
        yield from made.scores.items()

    def record(made: Made) -> StepRecord:
        metrics = {name: value for name, value in made.record.metrics.items() if name != RECOMPILED}
        return replace(made.record, seconds=0.0, metrics=metrics)

    ours, theirs = dict(arrays(wrong)), dict(arrays(right))
    alike = ours.keys() == theirs.keys() and all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    return alike and record(wrong) == record(right)


def open_bench(config: RunConfig, data: Data, ranks: Ranks = ONE) -> MutantBench:
    """Return the bench of a configuration, with the trainer and the reference of Lockstep."""
    return MutantBench(config, data, judge_of(lambda: Kept(open_named(REFERENCE)), ranks), open_named(TRAINER), ranks)


def run(config: RunConfig, data: Data, mutants: Sequence[Mutant], jobs: int, ranks: Ranks = ONE) -> Iterator[Row]:
    """Yield the row of each mutant, as they come.

    jobs: processes that share them; one job, or each of several ranks, works in this process.
    """
    if jobs == 1:
        bench = open_bench(config, data, ranks)
        for mutant in mutants:
            yield bench.row(mutant)
        return
    workers = ProcessPoolExecutor(jobs, get_context("spawn"), _begin_worker, (config, jobs))
    with workers:
        waiting = [workers.submit(_row_in_worker, str(mutant)) for mutant in mutants]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            for one in waiting:
                one.cancel()


_bench: list[MutantBench] = []


def _begin_worker(config: RunConfig, jobs: int) -> None:
    import os

    import torch

    from lockstep.core.run.data import RunData

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    _bench.append(open_bench(config, RunData.open(config)))


def _row_in_worker(text: str) -> Row:
    return _bench[0].row(Mutant.parse(text))
