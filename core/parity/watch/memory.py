"""Estimate the memory that a check of `watch` takes, before it copies anything."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.core.data.memory import available_memory_bytes
from lockstep.core.errors import UserError
from lockstep.core.parity.watch.together import Ranks

# Bytes of memory that a check takes. For each number of the model: weights and gradients after the backward pass,
# clipped gradients, two moments before the update, weights and two moments after it. For each number of the largest
# tensor: the same in FP64, with twin and truth of its update. Loss and gradients are compared after the update's copies
# are released, and take less.
BYTES_A_NUMBER, BYTES_OF_LARGEST = 32, 128
# Bytes that a rank other than rank 0 takes for each number that it holds. Copies of sharded tensors stay until they are
# sent: weights and gradients, both again with two moments before the update, weights and two moments after it.
BYTES_A_NUMBER_ELSEWHERE = 40


def bytes_of_a_check(sizes: Sequence[int], together: Ranks | None) -> int:
    """Return the memory in bytes that a check takes on this rank. sizes: count of numbers in each parameter."""
    if together is None or together.rank == 0:
        return BYTES_A_NUMBER * sum(sizes) + BYTES_OF_LARGEST * max(sizes)
    return BYTES_A_NUMBER_ELSEWHERE * sum(sizes) // len(together.members)


def require_memory(sizes: Sequence[int], together: Ranks | None) -> None:
    """Raise UserError if a check takes more memory than is free. sizes: count of numbers in each parameter."""
    needed, free = bytes_of_a_check(sizes, together), available_memory_bytes()
    if 0 < free < needed:
        raise UserError(f"a check takes {needed / 1e9:.3g} GB of memory for copies, and {free / 1e9:.3g} GB are free")
