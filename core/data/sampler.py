"""The order of samples: a pure function from a position in the run to one in the data; resuming needs no state."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.core.config.mixture import MOST_SOURCES
from lockstep.core.data.permutation import permute
from lockstep.core.errors import UserError

# Sequences of a run whose starts are computed at once.
_STRETCH = 4096
# Stretches that are kept, 32 KiB each: two of each source of the largest mixture, whose own stretches take from them.
_KEPT = 2 * MOST_SOURCES + 16


class Sampler(ABC):
    """An order of blocks of one length: a run's block number to a place in a split. Equal ones have equal orders."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens in a block."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens of the split that the order is made for."""

    @property
    def ahead(self) -> bool:
        """Return whether blocks may be placed long before they are read."""
        return True

    @abstractmethod
    def epochs(self, blocks: int) -> tuple[float, ...]:
        """Return how often the split's blocks are read in the first `blocks` blocks: one number a source."""

    @abstractmethod
    def block_starts(self, run_blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first input token in the split of each of the run's blocks: int64, both of one shape (blocks,).

        run_blocks: consecutive numbers from 0, in order; a number may stand several times in a row.
        """

    def window_starts(self, first_token: int, count: int, sequence_length: int) -> NDArray[np.int64]:
        """Return the starts of the run's next `count` sequences in the split.

        The run's position p = first_token + i * sequence_length lies in the run's block p // length. A shorter sequence
        length therefore cuts blocks, and changing the length at a block's end repeats nothing and loses nothing.

        Args:
            first_token: input tokens that the run has seen before; a multiple of `sequence_length`.
            count: how many sequences, >= 0.
            sequence_length: input tokens in each; divides the length of a block.

        Returns:
            int64 (count,): the first input token of each sequence; it may be read-only.

        Raises:
            ValueError: a length that does not divide, or a position that is negative or not a multiple.
        """
        if sequence_length < 1 or self.length % sequence_length:
            raise ValueError(f"sequence_length {sequence_length} must divide block_length {self.length}")
        if first_token < 0 or first_token % sequence_length or count < 0:
            raise ValueError(
                f"first_token {first_token} must be a multiple of {sequence_length} and count {count} not negative"
            )
        first = first_token // sequence_length
        if not self.ahead:
            return self._cut(first, count, sequence_length)
        numbers = range(first // _STRETCH, (first + max(count, 1) - 1) // _STRETCH + 1)
        stretches = [_stretch(self, sequence_length, number) for number in numbers]
        begin = first - numbers[0] * _STRETCH
        return (stretches[0] if len(stretches) == 1 else np.concatenate(stretches))[begin : begin + count]

    def _cut(self, first: int, count: int, sequence_length: int) -> NDArray[np.int64]:
        """Return the starts of sequences as `window_starts` does, computed now."""
        run_blocks, parts = np.divmod(first + np.arange(count, dtype=np.int64), self.length // sequence_length)
        return self.block_starts(run_blocks) + parts * sequence_length


@dataclass(frozen=True)
class BlockSampler(Sampler):
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

    @property
    def length(self) -> int:
        """Tokens in a block."""
        return self.block_length

    @property
    def tokens(self) -> int:
        """Tokens in the split."""
        return self.num_tokens

    def epochs(self, blocks: int) -> tuple[float, ...]:
        """Return how often the split's blocks are read in the first `blocks` blocks: one number."""
        return (blocks / self.num_blocks,)

    def block_starts(self, run_blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where blocks start: run block r is block number r % n of epoch r // n."""
        epochs, indices = np.divmod(run_blocks, self.num_blocks)
        return permute(indices, epochs, self.num_blocks, self.seed) * self.block_length


@functools.lru_cache(maxsize=_KEPT)
def _stretch(sampler: Sampler, sequence_length: int, number: int) -> NDArray[np.int64]:
    """Return the starts of the run's sequences from number * _STRETCH on, int64 (_STRETCH,), read-only.

    To permute 16 places takes a quarter as long as 4,096, so a small batch's are computed with those that follow.
    """
    starts = sampler._cut(number * _STRETCH, _STRETCH, sequence_length)
    starts.flags.writeable = False
    return starts
