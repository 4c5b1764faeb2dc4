"""Sketch what each micro-batch of a step adds to the gradients, on its way into `.grad`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from lockstep.core.parity.evidence.observations import PARAMETER, Observation
from lockstep.torch_backend.tools.sketch import sketch, sketch_alone


class StepParts:
    """The sketches of a step's micro-batches, in the order in which their backward passes come.

    A hook sees the gradient that autograd is about to add, and changes nothing: the step's program and its bits stay.
    """

    def __init__(self, parameters: Mapping[str, Tensor], table: Tensor) -> None:
        """Take the leaves and the signs.

        parameters: the leaves, by canonical name. table: signs, enough for the largest (`sign_table`).
        """
        self._parameters, self._table = parameters, table
        self.found: list[Mapping[str, Observation]] = []
        # Under FP8's delayed scaling: (layers, 3) of each.
        self.amaxes: list[Tensor] = []

    def begin(self) -> None:
        """Drop the results of an earlier pass over micro-batches."""
        self.found.clear()
        self.amaxes.clear()

    @contextmanager
    def next_one(self, scale: float) -> Iterator[None]:
        """Sketch the gradients of one backward pass, each divided by the loss scale."""
        sums: dict[str, Tensor] = {}

        def see(name: str, gradient: Tensor) -> None:
            part = sketch(gradient, table=self._table)
            # A leaf that is reached twice receives its gradient in two parts.
            sums[name] = sums[name] + part if name in sums else part

        hooks = [p.register_hook(partial(see, name)) for name, p in self._parameters.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.found.append(sketched_alone({n: s / scale for n, s in sums.items()}, self._parameters))


def sketched_alone(sketches: Mapping[str, Tensor], of: Mapping[str, Tensor]) -> dict[str, Observation]:
    """Return the observations of gradients by `gradient/NAME`, from sketches (K,) that leave the device together.

    of: tensors of the gradients' shapes, by name.
    """
    if not sketches:
        return {}
    rows = torch.stack(list(sketches.values())).cpu()
    found = zip(sketches, rows, strict=True)
    return {PARAMETER + name: sketch_alone(row, tuple(of[name].shape)) for name, row in found}
