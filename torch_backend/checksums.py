"""Checksums of tensors, computed on the tensors' own device without a copy of the state to the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lockstep.torch_backend.ranks.sharded_tensors import local

# Bytes of a word. A sum over words of eight bytes is four times as fast on a CPU as one over bytes.
WORD = 8


def checksums(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return the checksum of this rank's part of each tensor, by name; equal bits give equal checksums.

    The checksum is a sum of the bits as integers (mod 2⁶⁴), in which each row and each column has its own weight: a
    changed bit changes the sum, and so do exchanged rows or columns. The checksum of an 8-bit moment covers its codes
    and its scales. The tensors are read one at a time and not kept, because some are created only when they are read.
    """
    sums = {name: sum(map(_sum, _plain(local(tensor).detach()))) for name, tensor in tensors}
    by_device: dict[torch.device, list[str]] = {}
    for name, value in sums.items():
        if isinstance(value, Tensor):
            by_device.setdefault(value.device, []).append(name)
    found = {name: 0 for name in sums}
    for names in by_device.values():
        # The host synchronises once with each device.
        found |= dict(zip(names, torch.stack([torch.as_tensor(sums[name]) for name in names]).tolist(), strict=True))
    return found


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors of `tensor`: those inside a tensor subclass, or itself; none if it is empty."""
    if hasattr(tensor, "__tensor_flatten__"):
        inside, _ = tensor.__tensor_flatten__()
        for name in inside:
            yield from _plain(getattr(tensor, name))
    elif tensor.numel():
        yield tensor


def _sum(tensor: Tensor) -> Tensor:
    rows = tensor.contiguous().flatten(0, -2) if tensor.dim() > 1 else tensor.contiguous().reshape(1, -1)
    in_words = rows.shape[1] * rows.element_size() % WORD == 0
    bits = rows.view(torch.int64 if in_words else torch.uint8)
    columns, lines = bits.sum(0, dtype=torch.int64), bits.sum(1, dtype=torch.int64)
    # The weight of a word is the sum of its column's odd weight and its row's even weight. The sum is odd, so that no
    # bit is lost: an even weight would lose the highest bit.
    return (columns * (_even(columns) + 1)).sum() + (lines * _even(lines)).sum()


def _even(sums: Tensor) -> Tensor:
    return 2 * torch.arange(sums.numel(), device=sums.device)
