"""The order of samples: a pure function from a position in the run to one in the data, so a resume needs no state."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.core.config.mixture import MOST_SOURCES
from lockstep.core.data.permutation import permute
from lockstep.core.errors import UserError

# Number of sequences of a range, whose starts are computed together.
_STRETCH = 4096
# Number of cached ranges of 32 KiB each: two for each source of the largest mixture, and some for the mixture.
_KEPT = 2 * MOST_SOURCES + 16


class Sampler(ABC):
    """An order of blocks: from a block's number in the run to its position in a split.

    Equal samplers have equal orders.
    """

    @property
    @abstractmethod
    def length(self) -> int:
        """The number of tokens in a block."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """The number of tokens in the split for which the order is made."""

    @property
    def ahead(self) -> bool:
        """True if block starts can be computed long before the blocks are read."""
        return True

    @abstractmethod
    def epochs(self, blocks: int) -> tuple[float, ...]:
        """Return how often the split's blocks are read in the first `blocks` blocks: one number per source."""

    @abstractmethod
    def block_starts(self, run_blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position in the split of the first input token of each of the run's blocks: int64 (blocks,).

        run_blocks: int64 (blocks,), consecutive numbers, from 0 on, ascending; a number may be repeated.
        """

    def window_starts(self, first_token: int, count: int, sequence_length: int) -> NDArray[np.int64]:
        """Return the starts of the run's next `count` sequences in the split.

        The run's position p = first_token + i * sequence_length is in the run's block p // length. A shorter sequence
        length therefore splits blocks, and a change of the length at the end of a block repeats and omits no tokens.

        Args:
            first_token: number of input tokens that the run has read before; a multiple of `sequence_length`.
            count: number of sequences, >= 0.
            sequence_length: input tokens per sequence; a divisor of the length of a block.

        Returns:
            int64 (count,): the first input token of each sequence; the array may be read-only.

        Raises:
            ValueError: a length that is not a divisor, or a position that is negative or not a multiple.
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
        """Compute the starts of `count` sequences, beginning with sequence number `first`, without the cache."""
        run_blocks, parts = np.divmod(first + np.arange(count, dtype=np.int64), self.length // sequence_length)
        return self.block_starts(run_blocks) + parts * sequence_length


@dataclass(frozen=True)
class BlockSampler(Sampler):
    """The order in which a run reads the tokens of a split.

    The split consists of n = (num_tokens - 1) // block_length blocks. Block b has the input tokens
    [b * block_length, (b + 1) * block_length); the target of each token is the next one. Every epoch visits every block
    once, in an order of its own. At most block_length tokens at the end of the split are never inputs.

    Attributes:
        seed: seed of the order, in [0, 2**64).
        num_tokens: number of tokens in the split.
        block_length: tokens per block; the longest sequence length of the run.
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
                f"the split has {self.num_tokens} tokens, a sequence of {self.block_length} needs one more for "
                "its last target; prepare more text or shorten the sequence"
            )

    @property
    def num_blocks(self) -> int:
        """The number of blocks in an epoch."""
        return (self.num_tokens - 1) // self.block_length

    @property
    def length(self) -> int:
        """The number of tokens in a block."""
        return self.block_length

    @property
    def tokens(self) -> int:
        """The number of tokens in the split."""
        return self.num_tokens

    def epochs(self, blocks: int) -> tuple[float, ...]:
        """Return how often the split's blocks are read in the first `blocks` blocks: one number."""
        return (blocks / self.num_blocks,)

    def block_starts(self, run_blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the starts of blocks, int64: run block r is block number r % n in the order of epoch r // n."""
        epochs, indices = np.divmod(run_blocks, self.num_blocks)
        return permute(indices, epochs, self.num_blocks, self.seed) * self.block_length


@functools.lru_cache(maxsize=_KEPT)
def _stretch(sampler: Sampler, sequence_length: int, number: int) -> NDArray[np.int64]:
    """Return the starts of the run's sequences from number * _STRETCH on, int64 (_STRETCH,), read-only.

    The permutation of 16 indices takes a quarter of the time of 4,096, so the starts of a small batch are computed
    together with the following ones.
    """
    starts = sampler._cut(number * _STRETCH, _STRETCH, sequence_length)
    starts.flags.writeable = False
    return starts
