"""Batches on the device: all that a rank computes in a step is sent in one transfer, and the host does not wait for it.

A copy from pageable memory blocks the host until it is done. A copy from page-locked memory is queued like a kernel
(https://docs.pytorch.org/docs/stable/notes/cuda.html, "Use pinned memory buffers"); torch's caching host allocator
reuses the memory only after the copy.
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
    """A batch whose arrays are on the device too. on_device: each of them, (B, S), as `upload` returns it."""

    on_device: Mapping[str, Tensor] = field(default_factory=dict)


def upload(batches: Sequence[Batch], names: Sequence[str], device: torch.device) -> dict[str, Tensor]:
    """Send these arrays of batches in one transfer, the batches joined along B: int32 arrives as int64, float32 as is.

    names: of `Batch.arrays`; all of them have four bytes a number.
    """
    shape = len(names), sum(len(batch.tokens) for batch in batches), batches[0].tokens.shape[1]
    host = torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
    for joined, name in zip(host.numpy(), names, strict=True):
        np.concatenate([batch.arrays[name].view(np.int32) for batch in batches], out=joined)
    sent = dict(zip(names, host.to(device, non_blocking=True), strict=True))
    return {n: x.view(torch.float32) if batches[0].arrays[n].dtype == np.float32 else x.long() for n, x in sent.items()}


def uploaded(micros: Sequence[Batch], device: torch.device) -> list[Uploaded]:
    """Send micro-batches of one size together; each keeps its rows of what was sent."""
    sent = upload(micros, tuple(micros[0].arrays), device)
    rows = {name: tensor.split(len(micros[0].tokens)) for name, tensor in sent.items()}
    return [
        Uploaded(m.tokens, m.targets, m.weights, m.documents, m.end_of_text, {k: of[i] for k, of in rows.items()})
        for i, m in enumerate(micros)
    ]


def on_device(batch: Batch, names: Sequence[str], device: torch.device) -> list[Tensor]:
    """Return arrays of a batch on the device as `upload` returns them. An `Uploaded` batch is not sent again."""
    found = batch.on_device if isinstance(batch, Uploaded) else upload([batch], names, device)
    return [found[name] for name in names]
