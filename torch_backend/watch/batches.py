"""Copies of a user's batch on the CPU, with the same types, and with floating-point tensors in another dtype."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def on_cpu(batch: Any, dtype: torch.dtype | None) -> Any:
    """Copy a nest of mappings, sequences, named tuples and dataclasses to the CPU.

    dtype: the dtype of its floating-point tensors; None keeps their own. Mutable mappings keep their class (Hugging
    Face's BatchEncoding). Other objects are not copied.
    """
    return _copied(batch, dtype, "cpu")


def copied(batch: Any) -> Any:
    """Copy a nest as `on_cpu` does; each tensor keeps its device and its dtype."""
    return _copied(batch, None, None)


def _copied(batch: Any, dtype: torch.dtype | None, device: str | None) -> Any:
    if isinstance(batch, Tensor):
        wide = dtype if batch.is_floating_point() else None
        return batch.detach().to(device or batch.device, wide or batch.dtype, copy=True)
    if isinstance(batch, np.ndarray):
        floating = dtype is torch.float64 and batch.dtype.kind == "f"
        return batch.astype(np.float64) if floating else batch.copy()
    if isinstance(batch, MutableMapping):
        found = copy.copy(batch)
        for key, value in batch.items():
            found[key] = _copied(value, dtype, device)
        return found
    if isinstance(batch, Mapping):
        return {key: _copied(value, dtype, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_copied(value, dtype, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_copied(value, dtype, device) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {field.name: _copied(getattr(batch, field.name), dtype, device) for field in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **{f.name: values[f.name] for f in dataclasses.fields(batch) if f.init})
    return batch
