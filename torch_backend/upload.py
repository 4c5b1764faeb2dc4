"""Batches on the device: one transfer sends all micro-batches of a rank's step, and does not block the host.

A copy from pageable memory blocks the host until it is complete. A copy from pinned memory is queued like a kernel
(https://docs.pytorch.org/docs/stable/notes/cuda.html, "Use pinned memory buffers"). torch's caching host allocator
reuses pinned memory only after the copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lockstep.core.backend import Batch


@dataclass(frozen=True)
class Uploaded(Batch):
    """A batch with copies of its arrays on the device. on_device: name → (B, S), as `upload` returns it."""

    on_device: Mapping[str, Tensor] = field(default_factory=dict)


def upload(batches: Sequence[Batch], names: Sequence[str], device: torch.device) -> dict[str, Tensor]:
    """Send arrays of batches to the device in one transfer, concatenated along B.

    int32 arrays become int64, float32 arrays stay. names: names of `Batch.arrays`; all have elements of four bytes.
    """
    shape = len(names), sum(len(batch.tokens) for batch in batches), batches[0].tokens.shape[1]
    host = torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
    for joined, name in zip(host.numpy(), names, strict=True):
        np.concatenate([batch.arrays[name].view(np.int32) for batch in batches], out=joined)
    sent = dict(zip(names, host.to(device, non_blocking=True), strict=True))
    return {n: x.view(torch.float32) if batches[0].arrays[n].dtype == np.float32 else x.long() for n, x in sent.items()}


def uploaded(micros: Sequence[Batch], device: torch.device) -> list[Uploaded]:
    """Send micro-batches of one size in one transfer; each result has its rows of the device's tensors."""
    sent = upload(micros, tuple(micros[0].arrays), device)
    rows = {name: tensor.split(len(micros[0].tokens)) for name, tensor in sent.items()}
    return [
        Uploaded(m.tokens, m.targets, m.weights, m.documents, m.end_of_text, {k: of[i] for k, of in rows.items()})
        for i, m in enumerate(micros)
    ]


def on_device(batch: Batch, names: Sequence[str], device: torch.device) -> list[Tensor]:
    """Return arrays of a batch on the device, as `upload` does; an `Uploaded` batch is not sent again."""
    found = batch.on_device if isinstance(batch, Uploaded) else upload([batch], names, device)
    return [found[name] for name in names]
