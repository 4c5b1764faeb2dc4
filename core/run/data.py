"""The data of a run: its batches by step, and its validation batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lockstep.core.backend import Batch
from lockstep.core.config.schema import RunConfig
from lockstep.core.data.batches import eval_batches, train_batch
from lockstep.core.data.dataset import TokenDataset
from lockstep.core.data.memory import total_memory_bytes
from lockstep.core.data.sampler import BlockSampler
from lockstep.core.errors import UserError
from lockstep.core.train.schedule import batch_size, sequence_length


@dataclass(frozen=True)
class RunData:
    """A data set as one run reads it. A batch is a function of the step alone."""

    config: RunConfig
    dataset: TokenDataset
    sampler: BlockSampler
    validation: list[Batch]

    @classmethod
    def open(cls, config: RunConfig) -> RunData:
        """Open and verify the data of a run. Raises UserError if it is missing, damaged, or does not fit the run."""
        data, train = config.data, config.train
        _require_memory(config)
        limit = int(min(data.memory_limit_gib * 2**30, 2**62)) or None
        dataset = TokenDataset.open(data.path, memory_limit_bytes=limit)
        if dataset.vocab_size > config.model.vocab_size:
            raise UserError(
                f"model.vocab_size = {config.model.vocab_size} does not cover the tokenizer of {data.path}, "
                f"which has {dataset.vocab_size} tokens"
            )
        split = dataset.split("train")
        if split.num_tokens <= train.longest:
            raise UserError(
                f"{data.path} has {split.num_tokens} training tokens, "
                f"fewer than one sequence of {train.longest} and its target"
            )
        # Keep one length throughout, so that a curriculum does not move the losses that are compared.
        validation = eval_batches(
            dataset.split("val"),
            train.micro_batch_size,
            train.sequence_length,
            config.eval.batches,
            _end_of_text(config, dataset),
        )
        return cls(config, dataset, BlockSampler(data.seed, split.num_tokens, train.longest), validation)

    def batch(self, step: int) -> Batch:
        """The batch of optimizer step `step`, from 1."""
        train = self.config.train
        first = (step - 1) * train.batch_size * train.sequence_length
        split, end = self.dataset.split("train"), _end_of_text(self.config, self.dataset)
        made = train_batch(split, self.sampler, first, batch_size(train, step), sequence_length(train, step), end)
        return replace(made, end_of_text=self.dataset.eot_id)


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


def _end_of_text(config: RunConfig, dataset: TokenDataset) -> int | None:
    """Its id where attention asks for documents: no other batch carries them, and digests stay what they were."""
    return dataset.eot_id if config.attention.needs_documents else None
