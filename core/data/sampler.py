"""From a position in the run to a position in the data: a pure function, so resuming needs no state."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.core.data.permutation import permute
from lockstep.core.errors import UserError

# Sequences of a run whose starts are computed at once.
_STRETCH = 4096


@dataclass(frozen=True)
class BlockSampler:
    """The order in which a run sees the tokens of a split.

    The split is cut into n = (num_tokens - 1) // block_length blocks; block b holds the input tokens
    [b * block_length, (b + 1) * block_length), and the token after each is its target. Every epoch visits every
    block once, in its own order. At most block_length tokens at the end of the split are never an input.

    Attributes:
        seed: in [0, 2**64); names the order.
        num_tokens: tokens in the split.
        block_length: tokens in a block; the longest sequence length of the run.
    """

    seed: int
    num_tokens: int
    block_length: int

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            UserError: the split is shorter than one block and its last target.
            ValueError: a block length below one, or a seed outside [0, 2**64).
        """
        if self.block_length < 1 or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"block_length must be >= 1 and seed in [0, 2**64); got {self}")
        if self.num_blocks < 1:
            raise UserError(
                f"the split has {self.num_tokens} tokens, a sequence of {self.block_length} needs one more than "
                "itself; prepare more text or shorten the sequence"
            )

    @property
    def num_blocks(self) -> int:
        """Blocks in an epoch."""
        return (self.num_tokens - 1) // self.block_length

    def window_starts(self, first_token: int, count: int, sequence_length: int) -> NDArray[np.int64]:
        """Return the starts of the run's next `count` sequences in the split.

        The run's position p = first_token + i * sequence_length lies in the run's block p // block_length, which is
        block number (p // block_length) % n of epoch (p // block_length) // n. A shorter sequence length therefore
        cuts blocks, and changing the length at a block's end repeats nothing and loses nothing.

        Args:
            first_token: input tokens that the run has seen before; a multiple of `sequence_length`.
            count: how many sequences, >= 0.
            sequence_length: input tokens in each; divides `block_length`.

        Returns:
            int64 (count,): the first input token of each sequence; it may be read-only.

        Raises:
            ValueError: a length that does not divide, or a position that is negative or not a multiple.
        """
        if sequence_length < 1 or self.block_length % sequence_length:
            raise ValueError(f"sequence_length {sequence_length} must divide block_length {self.block_length}")
        if first_token < 0 or first_token % sequence_length or count < 0:
            raise ValueError(
                f"first_token {first_token} must be a multiple of {sequence_length} and count {count} not negative"
            )
        first = first_token // sequence_length
        numbers = range(first // _STRETCH, (first + max(count, 1) - 1) // _STRETCH + 1)
        stretches = [_stretch(self, sequence_length, number) for number in numbers]
        begin = first - numbers[0] * _STRETCH
        return (stretches[0] if len(stretches) == 1 else np.concatenate(stretches))[begin : begin + count]


@functools.lru_cache(maxsize=16)
def _stretch(sampler: BlockSampler, sequence_length: int, number: int) -> NDArray[np.int64]:
    """Return the starts of the run's sequences from number * _STRETCH on, int64 (_STRETCH,), read-only.

    To permute 16 places takes a quarter as long as 4,096, so a small batch's are computed with those that follow.
    """
    sequences = number * _STRETCH + np.arange(_STRETCH, dtype=np.int64)
    run_blocks, parts = np.divmod(sequences, sampler.block_length // sequence_length)
    epochs, indices = np.divmod(run_blocks, sampler.num_blocks)
    blocks = permute(indices, epochs, sampler.num_blocks, sampler.seed)
    starts = blocks * sampler.block_length + parts * sequence_length
    starts.flags.writeable = False
    return starts
