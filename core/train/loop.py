"""The training loop: a generator of step records, and `train`, which writes them to a run directory and its sinks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol

import numpy as np

from lockstep.core.backend import Arrays, Batch, NotSupported, Session, StepRecord
from lockstep.core.capabilities import ShowsAttention, Timed, TimesCompilation, UsesMemory, ask
from lockstep.core.checkpoint.format import checkpoint_step
from lockstep.core.config.schema import RunConfig, TrainConfig
from lockstep.core.data.loader import LoaderError, Prefetcher
from lockstep.core.model.budget import mfu
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.run.checkpoints import Reason, Saved, checkpoints_of
from lockstep.core.run.data import RunData
from lockstep.core.run.directory import RunDir
from lockstep.core.run.ranks import ONE, Ranks
from lockstep.core.sampling.generate import continue_tokens
from lockstep.core.sinks.sink import Sink
from lockstep.core.train.finite import NotFinite, is_finite, require_progress
from lockstep.core.train.held_record import WrongRecord, require_prescribed
from lockstep.core.train.metrics import MEMORY, SEQUENCE_LENGTH, attention_logits
from lockstep.core.train.process_memory import process_memory
from lockstep.core.train.spikes import Spikes
from lockstep.core.train.time_accounting import TimeAccounting
from lockstep.core.train.unchanged_state import unchanged
from lockstep.core.train.validation import LOSS, Validation, means

Ending = Literal["finished", "interrupted", "alarmed"]
# A function that diagnoses a check that disagreed: it returns the check with its findings, and a line about them.
Alarm = Callable[[Check], tuple[Check, str | None]]


class Watch(Protocol):
    """A watch that checks steps during training (core/parity/modes/shadow.py)."""

    def due(self, step: int) -> bool:
        """Return whether step `step` is to be checked."""
        ...

    def step(
        self,
        session: Session,
        batch: Batch,
        norms: bool,
        due: str | None = None,
        validation: Validation | None = None,
    ) -> StepRecord:
        """Run the step and collect evidence for a check; `seconds` in the record is the time of the step alone.

        due: digest of the batch that the data order prescribes. validation: the validation that is due after the step;
        if it is run here, the record has its metrics.
        """
        ...

    @property
    def pending(self) -> int:
        """The number of checks without a result."""
        ...

    def collect(self) -> Iterator[Check | tuple[int, str]]:
        """Return the results since the last call: checks, or (step, reason why its check was skipped)."""
        ...

    def drain(self) -> Iterator[Check | tuple[int, str]]:
        """Wait for all pending checks, and return their results."""
        ...


class Interrupted(Protocol):
    """A flag that other code sets, such as `threading.Event`."""

    def is_set(self) -> bool:
        """Return whether to stop after the current step."""
        ...


def due(every: int, step: int, last: int) -> bool:
    """Return whether an event with the interval `every` is due at this step, or at the last step; 0 is never."""
    return every > 0 and (step % every == 0 or step == last)


def step_records(
    session: Session,
    data: RunData,
    first: int,
    device: str,
    watch: Watch | None = None,
    spent: TimeAccounting | None = None,
    spikes: Spikes | None = None,
    ranks: Ranks = ONE,
) -> Iterator[StepRecord]:
    """Run the steps from `first` on, and yield each step's record with timing and the metrics that are due.

    spent: the caller's stopwatch. spikes: tests each loss, and stores the batch of a spike.

    Raises NotFinite for a step whose loss or gradients are not finite, even if the session does not raise it, and after
    too many skipped steps in a row. Raises WrongRecord for a step whose record differs from the prescribed values.
    """
    config, spent = data.config, spent or accounting(session)
    last = config.train.steps
    with Prefetcher(data.batch, first, last + 1, config.data.prefetch) as batches:
        for step in range(first, last + 1):
            with spent.part("data"):
                batch = next_of(batches, ranks, step)
            norms = due(config.log.norms_every, step, last)
            watched = watch is not None and watch.due(step)
            validation = _validation(data, step, spent)
            started = time.perf_counter()
            with spent.part("compute"):
                if watch is not None and watched:
                    # Read the batch again instead of taking it from the loader: the check must find a faulty loader.
                    record = watch.step(session, batch, norms, data.batch(step).digest(), validation)
                else:
                    record = session.step(batch, norms=norms)
                    record = replace(record, seconds=time.perf_counter() - started)
            with suppress(NotSupported):
                spent.split_step(ask(session, Timed).seconds_of_step(), "checks" if watched else "other")
            if not is_finite(record):
                raise NotFinite(record, "the session does not report where, and its weights may be affected")
            require_progress(record, config.train.skips_in_a_row)
            # The check of a watched step compares its record, and names the origin of a difference.
            if not watched:
                require_prescribed(record, batch, step, config, ranks)
            # With a coarse clock, the time may be zero.
            rate = record.tokens / record.seconds if record.seconds > 0 else 0.0
            looked = f"validation, a metric or a sample after step {step}"
            with spent.part("validation"), unchanged(session, looked) if looks_due(config, step) else nullcontext():
                metrics = dict(record.metrics)
                if validation is not None and LOSS not in metrics:
                    metrics |= means(validation.scores(session), validation.sources)
                metrics |= measured(session, data, batch, step)
                text = sample(session, data, step) if due(config.log.sample_every, step, last) else None
            with spent.part("logging"):
                host = memory(session) if due(config.log.memory_every, step, last) else {}
                metrics |= spikes.look(record, batch) if spikes else {}
            yield replace(
                record,
                tokens_per_second=rate,
                mfu=mfu(config.model, batch.tokens.shape[1], rate, device, config.precision.policy),
                metrics=metrics,
                host=spent.lap() | host,
                sample=text,
            )


def accounting(session: Session) -> TimeAccounting:
    """Return a stopwatch that counts the session's compilation separately, if the session measures it."""
    try:
        return TimeAccounting(compiling=ask(session, TimesCompilation).seconds_compiling)
    except NotSupported:
        return TimeAccounting()


def looks_due(config: RunConfig, step: int) -> bool:
    """Return whether a validation, a metric or a sample reads the session's state after this step."""
    log = config.log
    intervals = config.eval.every, log.fp32_loss_every, log.attention_logits_every, log.sample_every
    return any(due(every, step, config.train.steps) for every in intervals)


def next_of(batches: Iterator[Batch], ranks: Ranks, step: int) -> Batch:
    """Return the next batch when every rank has its own. Raises LoaderError on all ranks if one rank has none."""
    try:
        batch, failed = next(batches), None
    except LoaderError as error:
        batch, failed = None, error
    said = ranks.gather(str(failed) if failed else None, f"`load the batch of step {step}`")
    if failed:
        raise failed
    for rank, words in enumerate(said):
        if words is not None:
            raise LoaderError(f"rank {rank}: {words}")
    assert batch is not None
    return batch


def _validation(data: RunData, step: int, spent: TimeAccounting) -> Validation | None:
    """Return the validation that is due after a step, or None."""
    if not due(data.config.eval.every, step, data.config.train.steps):
        return None
    return Validation(data.validation, partial(spent.part, "validation"), data.held_out)


def measured(session: Session, data: RunData, batch: Batch, step: int) -> dict[str, float]:
    """Return the metrics on slices of the batch that are due: FP32 loss, top-1 accuracy, attention logits."""
    config = data.config
    metrics: dict[str, float] = {}
    if len(config.train.lengths) > 1:
        metrics[SEQUENCE_LENGTH] = float(batch.tokens.shape[1])
    if due(config.log.fp32_loss_every, step, config.train.steps):
        tokens = config.log.fp32_loss_sequences * config.train.sequence_length
        part = batch.rows(slice(max(tokens // batch.tokens.shape[1], 1)))
        scores = evaluated(session, part, config.train)
        trained = float(scores["nll"].mean(dtype=np.float64))
        full = float(evaluated(session, part, config.train, "fp32")["nll"].mean(dtype=np.float64))
        metrics |= {"fp32/loss": full, "fp32/difference": trained - full}
        metrics["train/top1"] = float(scores["top1"].mean(dtype=np.float64))
    if due(config.log.attention_logits_every, step, config.train.steps):
        part = batch.rows(slice(config.log.attention_logits_sequences))
        with suppress(NotSupported):
            metrics |= attention_logits(ask(session, ShowsAttention).attention_logits(part))
    return metrics


def evaluated(session: Session, batch: Batch, train: TrainConfig, policy: str | None = None) -> Arrays:
    """Return `session.evaluate` of a batch, computed by micro-batches, so that it needs no more memory than a step."""
    size = train.micro_batch_of(batch.tokens.shape[1])
    micros = [batch.rows(slice(i, i + size)) for i in range(0, len(batch.tokens), size)]
    parts = [session.evaluate(micro, policy) for micro in micros]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def memory(session: Session) -> dict[str, float]:
    """Return the bytes in use that the session reports, else those of this process."""
    try:
        found = ask(session, UsesMemory).memory()
    except NotSupported:
        found = process_memory()
    return {MEMORY + name: size for name, size in found.items()}


def sample(session: Session, data: RunData, step: int) -> str:
    """Generate a text from the configured prompt."""
    log, tokenizer = data.config.log, data.dataset.tokenizer()
    prompt = np.asarray(tokenizer.encode_documents([log.sample_prompt])[0], np.int32)
    if len(prompt) == 0:
        prompt = np.asarray([data.dataset.eot_id], np.int32)
    window = data.config.train.longest
    written = continue_tokens(session.next_token_logits, prompt, log.sample_tokens, window, data.config.seed + step)
    return log.sample_prompt + tokenizer.decode(np.minimum(written, data.dataset.vocab_size - 1))


def train(
    session: Session,
    data: RunData,
    run: RunDir | None,
    sinks: Sequence[Sink],
    interrupted: Interrupted,
    first: int,
    device: str,
    watch: Watch | None = None,
    alarm: Alarm = lambda check: (check, None),
    ranks: Ranks = ONE,
) -> Ending:
    """Train from step `first` to the end, or until `interrupted` or an alarm; return the kind of ending.

    Records and checks go to the sinks at once, with `alarm`'s result for a check that disagreed. Checkpoints are
    written at their interval, at the end, and after an interruption. If an alarm stops the run (`parity.on_alarm`), no
    checkpoint of the state after it is written. docs/guide/guards.md describes how a run handles faults.

    Every rank runs this function. Only rank 0 has the run's directory and sinks; on other ranks `run` is None. Rank 0
    sends the others the facts that only it has (results of checks, errors of the disk) when they need them.

    Raises NotFinite after all pending checks have a result, LoaderError after a checkpoint, and the errors of the
    session, of sinks and of checkpoints.
    """
    config = run.config if run else data.config
    last, kept = config.train.steps, config.checkpoint
    done = first - 1
    checks = Checks(sinks, alarm, ranks)
    stops = config.parity.on_alarm != "log"
    spent, spikes = accounting(session), Spikes(run, data, first) if run else None
    with checkpoints_of(session, data, run, ranks) as checkpoints:
        try:
            for record in step_records(session, data, first, device, watch, spent, spikes, ranks):
                done = record.step
                with spent.part("logging"):
                    for sink in sinks:
                        sink.record(record)
                    if spikes:
                        spikes.tell(sinks)
                if watch is not None:
                    with spent.part("checks"):
                        checks.deliver(watch.collect())
                if stops and checks.bad is not None:
                    break
                best = checkpoints.improved(record) and kept.best
                with spent.part("checkpoint"):
                    if due(kept.every, done, last) or done == last or best:
                        reason: Reason = "end" if done == last else "best" if best else "interval"
                        with unchanged(session, f"the checkpoint after step {done}"):
                            checkpoints.save(done, reason, checks.good)
                    tell(sinks, checkpoints.collect())
                if any(ranks.gather(interrupted.is_set(), f"`end step {done}`")):
                    break
        except (NotFinite, WrongRecord):
            if watch is not None:  # a pending check, of this step or of the one before, may explain the error
                _wait_for(watch, checks, sinks, config.parity.timeout_seconds)
            raise
        except LoaderError:
            if done >= first and ranks.of_first(lambda: checkpoints.last != done):
                checkpoints.save(done, "interrupted", checks.good)
            raise
        accused = stops and checks.bad is not None
        if done >= first and not accused and ranks.of_first(lambda: checkpoints.last != done):
            checkpoints.save(done, "interrupted", checks.good)
        tell(sinks, checkpoints.finish())
    if watch is not None:
        _wait_for(watch, checks, sinks, config.parity.timeout_seconds)
    if stops and checks.bad is not None:
        return _stop(run, checks, sinks) if run else "alarmed"
    if done == last and run:
        run.finish()
    return "finished" if done == last else "interrupted"


def _wait_for(watch: Watch, checks: Checks, sinks: Sequence[Sink], seconds: int) -> None:
    """Wait for every pending check, at most `seconds` for each, and deliver the results."""
    if watch.pending:
        for sink in sinks:
            sink.note(
                f"waiting for the reference: checks under way: {watch.pending}, at most {seconds} s for each "
                "(parity.timeout_seconds)"
            )
    checks.deliver(watch.drain())


def _stop(run: RunDir, checks: Checks, sinks: Sequence[Sink]) -> Ending:
    """End a run after an alarm; under `roll_back`, reset it to a checkpoint not later than the last good check."""

    def note(text: str) -> None:
        for sink in sinks:
            sink.note(text)

    said = f"stopped: the check of step {checks.bad} disagreed"
    if run.config.parity.on_alarm == "roll_back":
        good = [p for p in run.checkpoints() if (checkpoint_step(p) or 0) <= (checks.good or 0)]
        if good:
            step = checkpoint_step(good[-1]) or 0
            run.resume_from(step, note)
            said += f"; rolled back to step {step}, which is not later than the last check that agreed ({checks.good})"
        else:
            said += "; there is no checkpoint from before the last check that agreed, so nothing was rolled back"
    note(said)
    return "alarmed"


def tell(sinks: Sequence[Sink], told: Iterator[Saved | str]) -> None:
    """Report to every sink the checkpoints that were written, and messages about those that could not be written."""
    for one in told:
        for sink in sinks:
            sink.note(one) if isinstance(one, str) else sink.saved(one)


class Checks:
    """The delivery of the reference's results from rank 0 to every sink.

    good: step of the last check that agreed before the first disagreement. bad: step of the first check that disagreed.
    """

    def __init__(self, sinks: Sequence[Sink], alarm: Alarm, ranks: Ranks = ONE) -> None:
        self._sinks, self._alarm, self._ranks = sinks, alarm, ranks
        self.good: int | None = None
        self.bad: int | None = None

    def deliver(self, results: Iterator[Check | tuple[int, str]]) -> None:
        """Deliver the results on rank 0 to the sinks; for a check that disagreed, call `alarm` on every rank."""
        # Deliver one result at a time: another check may still be pending during the diagnosis of an alarm.
        while (
            result := self._ranks.of_first(lambda: next(results, None), "`receive the result of a check`")
        ) is not None:
            said = None
            if isinstance(result, Check) and result.verdict == "disagreed":
                self.bad = self.bad or result.step
                result, said = self._alarm(result)
            elif isinstance(result, Check) and result.verdict == "agreed" and self.bad is None:
                self.good = result.step
            for sink in self._sinks:
                if isinstance(result, Check):
                    sink.check(result)
                else:
                    sink.skipped(*result)
                if said:
                    sink.note(said)
