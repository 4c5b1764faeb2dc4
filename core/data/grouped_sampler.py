"""An order of blocks that reads shards in groups, so that a group can be read before the next one exists."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.core.data.permutation import permute
from lockstep.core.data.sampler import Sampler
from lockstep.core.errors import UserError


class Shards(Protocol):
    """The shards of a training split, in order; the last ones may not exist yet."""

    @property
    def count(self) -> int:
        """The number of shards, including those that do not exist yet."""
        ...

    @property
    def finished(self) -> bool:
        """True if all shards exist."""
        ...

    @property
    def known_tokens(self) -> int:
        """The number of tokens in the shards that were opened so far."""
        ...

    @property
    def expected_tokens(self) -> float:
        """The number of tokens in all shards, or an estimate."""
        ...

    def tokens_of(self, shard: int) -> int:
        """Return the number of tokens in a shard; wait until it exists. Raises UserError if the wait fails."""
        ...


class GroupedSampler(Sampler):
    """The order of a run's tokens if shards are read in groups.

    Group g consists of the shards [g * group, (g + 1) * group). Its tokens are split into (tokens - 1) // length
    blocks, as `BlockSampler` splits a whole split: at most `length` tokens at the end of a group are never inputs. An
    epoch visits the groups in order, and every block of a group once, in an order that depends on the epoch and the
    group. A sample depends on its number and on the sizes of the shards up to the last of its group. In the first
    epoch, no later shard is needed.
    """

    def __init__(self, seed: int, length: int, group: int, shards: Shards) -> None:
        """Set the order's parameters.

        seed: in [0, 2**64). length: tokens per block. group: shards per group. Raises ValueError for values out of
        range.
        """
        if length < 1 or group < 1 or not 0 <= seed < 1 << 64:
            raise ValueError(f"length {length} and group {group} must be >= 1, and the seed {seed} in [0, 2**64)")
        self._seed, self._length, self._group, self._shards = seed, length, group, shards
        # By group: its first token, and the number of blocks before it; one entry more than the number of known groups.
        self._tokens, self._blocks = [0], [0]

    @property
    def length(self) -> int:
        """The number of tokens in a block."""
        return self._length

    @property
    def tokens(self) -> int:
        """The number of tokens in the shards that were opened so far."""
        return self._shards.known_tokens

    @property
    def ahead(self) -> bool:
        """True if all shards exist, so that block starts can be computed long before the blocks are read."""
        return self._shards.finished

    def epochs(self, blocks: int) -> tuple[float, ...]:
        """Return how often the split's tokens are read in the first `blocks` blocks: one number, an estimate."""
        return (blocks * self._length / self._shards.expected_tokens,)

    def block_starts(self, run_blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first tokens of the run's blocks, int64; wait until their shards exist.

        Raises:
            UserError: the wait for a shard fails, or no group has enough tokens for a block.
        """
        if not run_blocks.size:
            return np.empty(0, np.int64)
        self._know(int(run_blocks.max()))
        blocks = np.array(self._blocks)
        every = int(blocks[-1])
        epochs, places = np.divmod(run_blocks, every) if self._knows_all else (np.zeros_like(run_blocks), run_blocks)
        groups = np.searchsorted(blocks, places, side="right") - 1
        starts = np.empty(run_blocks.shape, np.int64)
        for group in np.unique(groups).tolist():
            rows = np.flatnonzero(groups == group)
            # Each pair of epoch and group has its own permutation.
            orders = epochs[rows] * self._groups + group
            inside = permute(places[rows] - blocks[group], orders, int(blocks[group + 1] - blocks[group]), self._seed)
            starts[rows] = self._tokens[group] + inside * self._length
        return starts

    @property
    def _groups(self) -> int:
        return -(-self._shards.count // self._group)

    @property
    def _knows_all(self) -> bool:
        return len(self._tokens) > self._groups

    def _know(self, run_block: int) -> None:
        """Read the sizes of the groups up to the one of this block of the run."""
        while not self._knows_all and self._blocks[-1] <= run_block:
            first = self._group * (len(self._tokens) - 1)
            numbers = range(first, min(first + self._group, self._shards.count))
            tokens = sum(self._shards.tokens_of(number) for number in numbers)
            blocks = self._blocks[-1] + max(0, tokens - 1) // self._length
            # Append to `_tokens` last: its length defines the known groups, and another thread may read at this time.
            self._blocks.append(blocks)
            self._tokens.append(self._tokens[-1] + tokens)
        if self._knows_all and not self._blocks[-1]:
            raise UserError(
                f"no {self._group} shards in a row have the {self._length + 1} tokens of a sequence and its target; "
                "raise data.window_shards, or prepare more text"
            )
