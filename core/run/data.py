"""The data of a run: its batches by step, and its validation batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.core.backend import Batch
from lockstep.core.config.schema import RunConfig
from lockstep.core.data.batches import batches_at, eval_starts, train_batch
from lockstep.core.data.dataset import TokenDataset, memory_to_hold
from lockstep.core.data.grouped_sampler import GroupedSampler
from lockstep.core.data.growing import PlannedDataset, Tell
from lockstep.core.data.memory import total_memory_bytes
from lockstep.core.data.mixed import STRIDE, MixedSampler, TokenMixture
from lockstep.core.data.mixture_order import MixtureOrder
from lockstep.core.data.sampler import BlockSampler, Sampler
from lockstep.core.data.split import Dataset
from lockstep.core.errors import UserError
from lockstep.core.train.schedule import batch_size, sequence_length
from lockstep.core.train.validation import Sources


@dataclass(frozen=True)
class RunData:
    """A data set, or a mixture of several, as one run reads it. A batch is a function of the step alone.

    validation: micro-batches of held-out windows. held_out: of a mixture, the data sets that they are of.
    """

    config: RunConfig
    dataset: Dataset
    sampler: Sampler
    validation: list[Batch]
    held_out: Sources | None = None

    @classmethod
    def open(cls, config: RunConfig, tell: Tell = lambda text: None, *, verify: bool = True) -> RunData:
        """Open and verify the data of a run.

        tell: called with a line where data that is being prepared is waited for. verify: read every shard, and hold in
        memory what fits; without it indexes and headers alone are checked, and shards stay on the disk.

        Raises UserError if it is missing, damaged, or does not fit the run.
        """
        _require_memory(config)
        sources = _open_all(config, tell, verify)
        samplers = tuple(_sampler(config, source) for source in sources)
        parts = config.data.parts
        if not parts:
            dataset: Dataset = sources[0]
            sampler: Sampler = samplers[0]
        else:
            dataset = TokenMixture(parts, sources)
            sampler = MixedSampler(MixtureOrder(tuple(part.weight for part in parts), config.data.seed), samplers)
        starts, of = _held_out(config, sources)
        # Keep one length throughout, so that a curriculum does not move the losses that are compared.
        train, end = config.train, _end_of_text(config, dataset)
        rows, length = train.micro_batch_size, train.sequence_length
        validation = batches_at(dataset.split("val"), starts, rows, length, end)
        return cls(config, dataset, sampler, validation, _sources(config, of) if parts else None)

    def batch(self, step: int) -> Batch:
        """Return the batch of optimizer step `step`, from 1."""
        train = self.config.train
        first = (step - 1) * train.batch_size * train.sequence_length
        split, end = self.dataset.split("train"), _end_of_text(self.config, self.dataset)
        made = train_batch(split, self.sampler, first, batch_size(train, step), sequence_length(train, step), end)
        return replace(made, end_of_text=self.dataset.eot_id)


def _open_all(config: RunConfig, tell: Tell, verify: bool) -> list[Dataset]:
    """Open the data sets of a run. The memory for tokens is one for all of them, which goes to the first ones."""
    limit = (int(min(config.data.memory_limit_gib * 2**30, 2**62)) or memory_to_hold()) if verify else 0
    sources: list[Dataset] = []
    for folder in config.data.folders:
        source = (
            PlannedDataset(Path(folder), config.data.wait_minutes, limit, tell, verify=verify)
            if config.data.window_shards
            else TokenDataset.open(folder, verify=verify, memory_limit_bytes=limit)
        )
        limit -= source.held_bytes
        if source.vocab_size > config.model.vocab_size:
            raise UserError(
                f"model.vocab_size = {config.model.vocab_size} does not cover the tokenizer of {folder}, "
                f"which has {source.vocab_size} tokens"
            )
        sources.append(source)
    return sources


def _sampler(config: RunConfig, source: Dataset) -> Sampler:
    if isinstance(source, PlannedDataset):
        return GroupedSampler(config.data.seed, config.train.longest, config.data.window_shards, source.shards)
    tokens = source.split("train").num_tokens
    if tokens <= config.train.longest:
        raise UserError(
            f"{source.folder} has {tokens} training tokens, "
            f"fewer than one sequence of {config.train.longest} and its target"
        )
    return BlockSampler(config.data.seed, tokens, config.train.longest)


def _held_out(config: RunConfig, sources: Sequence[Dataset]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the places of the held-out windows, and the source of each: int64 (windows,) twice.

    A mixture has as many windows as a single data set, each source as many as its share comes to, and one at least.
    """
    windows, length = config.eval.batches * config.train.micro_batch_size, config.train.sequence_length
    counts = [windows]
    if parts := config.data.parts:
        if windows < len(parts):
            raise UserError(
                f"eval.batches = {config.eval.batches}: {windows} held-out sequences (times train.micro_batch_size) "
                f"are fewer than the {len(parts)} data sets of the mixture"
            )
        counts = apportioned([part.weight for part in parts], windows)
    starts = [
        eval_starts(source.split("val"), count, length) + number * STRIDE
        for number, (source, count) in enumerate(zip(sources, counts, strict=True))
    ]
    return np.concatenate(starts), np.repeat(np.arange(len(counts)), counts)


def _sources(config: RunConfig, of: NDArray[np.int64]) -> Sources:
    """Return the sources of held-out windows by name, given the number of each in the mixture, int64 (windows,)."""
    names = [part.name for part in config.data.parts]
    ordered = sorted(names)
    places = np.array([ordered.index(name) for name in names])
    return Sources(tuple(ordered), places[of].reshape(-1, config.train.micro_batch_size))


def apportioned(weights: Sequence[Fraction], seats: int) -> list[int]:
    """Return a share of the seats for each weight: one each, the rest by Jefferson's and D'Hondt's divisors."""
    counts = [1] * len(weights)
    for _ in range(seats - len(weights)):
        neediest = max(range(len(weights)), key=lambda one: (weights[one] / (counts[one] + 1), -one))
        counts[neediest] += 1
    return counts


def _require_memory(config: RunConfig) -> None:
    """Raise UserError if a step's batch, or the validation batches, alone are more than this machine can hold."""
    train, memory = config.train, total_memory_bytes()
    rows = {"train.batch_size": train.batch_size, "eval.batches": config.eval.batches * train.micro_batch_size}
    for key, count in rows.items():
        # Tokens, targets and weights, four bytes each.
        needed = 12 * count * train.sequence_length
        if memory and needed > memory:
            raise UserError(
                f"{key}: {count:,} sequences of {train.sequence_length:,} tokens take {needed / 2**30:,.0f} GiB, "
                f"and there are {memory / 2**30:,.1f} GiB"
            )


def _end_of_text(config: RunConfig, dataset: Dataset) -> int | None:
    """Return its id where attention needs documents: no other batch carries them, and digests stay what they were."""
    return dataset.eot_id if config.attention.needs_documents else None
