"""An order of blocks that reads shards in groups, first to last, so that a group can be read before the next exists."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.core.data.permutation import permute
from lockstep.core.data.sampler import Sampler
from lockstep.core.errors import UserError


class Shards(Protocol):
    """The shards of a training split, in order; the last of them may not be there yet."""

    @property
    def count(self) -> int:
        """Shards that there are, or will be."""
        ...

    @property
    def finished(self) -> bool:
        """Return whether all of them are there."""
        ...

    @property
    def known_tokens(self) -> int:
        """Tokens of the shards that are known so far."""
        ...

    @property
    def expected_tokens(self) -> float:
        """Tokens of all shards, as far as that is known."""
        ...

    def tokens_of(self, shard: int) -> int:
        """Return the tokens of a shard once it is there. Raises UserError if it does not come."""
        ...


class GroupedSampler(Sampler):
    """The order in which a run sees the tokens of a split whose shards are read in groups.

    Group g holds the shards [g * group, (g + 1) * group). Its tokens, one after another, are cut into
    (tokens - 1) // length blocks, as `BlockSampler` cuts a split: at most `length` tokens at its end are no input. An
    epoch visits the groups in order, and every block of a group once, in an order of that epoch and group. A sample
    is a function of its number and of the sizes of the shards up to its group's last; in the first epoch no later shard
    is needed.
    """

    def __init__(self, seed: int, length: int, group: int, shards: Shards) -> None:
        """Take the run's seed in [0, 2**64), tokens in a block, and shards in a group. Raises ValueError below 1."""
        if length < 1 or group < 1 or not 0 <= seed < 1 << 64:
            raise ValueError(f"length {length} and group {group} must be >= 1, and the seed {seed} in [0, 2**64)")
        self._seed, self._length, self._group, self._shards = seed, length, group, shards
        # By group: the first token, and the blocks of the groups before it; one more entry than there are known groups.
        self._tokens, self._blocks = [0], [0]

    @property
    def length(self) -> int:
        """Tokens in a block."""
        return self._length

    @property
    def tokens(self) -> int:
        """Tokens of the shards that are known so far."""
        return self._shards.known_tokens

    @property
    def ahead(self) -> bool:
        """Return whether all shards are there, so that blocks may be placed long before they are read."""
        return self._shards.finished

    def epochs(self, blocks: int) -> tuple[float, ...]:
        """Return how often the split's tokens are read in the first `blocks` blocks: one number, about."""
        return (blocks * self._length / self._shards.expected_tokens,)

    def block_starts(self, run_blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the run's blocks start, once their shards are there.

        Raises:
            UserError: a shard does not come, or no group is as long as a block.
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
            # An epoch of each group is a permutation of its own.
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
        """Read the sizes of as many groups as this block of the run needs."""
        while not self._knows_all and self._blocks[-1] <= run_block:
            first = self._group * (len(self._tokens) - 1)
            numbers = range(first, min(first + self._group, self._shards.count))
            tokens = sum(self._shards.tokens_of(number) for number in numbers)
            blocks = self._blocks[-1] + max(0, tokens - 1) // self._length
            # The last to grow decides what is known: another thread may read at the same time.
            self._blocks.append(blocks)
            self._tokens.append(self._tokens[-1] + tokens)
        if self._knows_all and not self._blocks[-1]:
            raise UserError(
                f"no {self._group} shards in a row have the {self._length + 1} tokens of a sequence and its target; "
                "raise data.window_shards, or prepare more text"
            )
