"""Run single operations of a reference without unnecessary copies of large weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lockstep.core.backend import Arrays
from lockstep.core.capabilities import RunsStages
from lockstep.core.model.graph import Operation

LOOK_UP = "embedding"
# XLA on the CPU uses an array in place if its address is a multiple of this, and copies it otherwise.
ALIGNMENT = 64


def run_operation(session: RunsStages, stage: str, one: Operation, inputs: Arrays) -> Mapping[str, np.ndarray]:
    """Run an operation's stage.

    A look-up receives only the rows that it reads, one for each token, in place of the table. The gradient of the table
    is still complete: that of each row, summed in the order of the tokens.
    """
    if one.kind != LOOK_UP:
        return session.run_stage(stage, inputs)
    table, tokens = inputs["weight"], inputs["tokens"]
    rows = tokens.reshape(-1)
    places = np.arange(rows.size, dtype=tokens.dtype).reshape(tokens.shape)
    found = dict(session.run_stage(stage, {**inputs, "weight": table[rows], "tokens": places}))
    if (sent := found.get("grad/weight")) is not None:
        found["grad/weight"] = np.zeros(table.shape, sent.dtype)
        np.add.at(found["grad/weight"], rows, sent)
    return found


def with_amaxes(one: Operation, inputs: Arrays, amaxes: Arrays) -> Arrays:
    """Add the amaxes for delayed scaling to the inputs of a linear layer in FP8, if there are any."""
    found = amaxes.get(one.module or "")
    return inputs if found is None else {**inputs, "amax": found}


def aligned(x: np.ndarray, dtype: type[np.floating]) -> np.ndarray:
    """Return an array in a dtype, in C order, at an address that XLA does not have to copy.

    An array that fits is returned unchanged.
    """
    wanted = np.dtype(dtype)
    if x.dtype == wanted and x.ctypes.data % ALIGNMENT == 0 and x.flags.c_contiguous:
        return x
    size = x.size * wanted.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    found = raw[start : start + size].view(wanted).reshape(x.shape)
    found[...] = x
    return found
