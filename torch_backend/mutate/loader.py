"""Batches of a mutated loader."""

from __future__ import annotations

import torch

from lockstep.core.backend import Batch
from lockstep.core.mutate.mutant import Mutant
from lockstep.core.mutate.places import Place
from lockstep.torch_backend.mutate.change import change_of


def changed(batch: Batch, mutant: Mutant, place: Place) -> Batch:
    """Return the batch with one array changed by the mutant; dtypes stay."""
    array = batch.arrays[place.name]
    new = change_of(mutant.operator, place.axes)(torch.from_numpy(array.copy())).numpy().astype(array.dtype)
    return Batch.of({**batch.arrays, place.name: new}, batch.end_of_text)
