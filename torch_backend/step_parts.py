"""Sketches of the gradients that each micro-batch of a step adds to `.grad`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from lockstep.core.parity.evidence.observations import PARAMETER, Observation
from lockstep.torch_backend.tools.sketch import sketch, sketch_alone


class StepParts:
    """The sketches of a step's micro-batches, in the order of their backward passes.

    A hook reads the gradient that autograd is about to add to `.grad`. It changes neither the step's program nor its
    bits.
    """

    def __init__(self, parameters: Mapping[str, Tensor], table: Tensor) -> None:
        """Set the parameters by canonical name, and the table of signs (`sign_table`) for the largest of them."""
        self._parameters, self._table = parameters, table
        self.found: list[Mapping[str, Observation]] = []
        # Under FP8's delayed scaling: the amaxes (layers, 3) of each micro-batch.
        self.amaxes: list[Tensor] = []

    def begin(self) -> None:
        """Clear the results of an earlier accumulation."""
        self.found.clear()
        self.amaxes.clear()

    @contextmanager
    def next_one(self, scale: float) -> Iterator[None]:
        """Sketch the gradients of the backward pass inside the context, divided by the loss scale `scale`."""
        sums: dict[str, Tensor] = {}

        def see(name: str, gradient: Tensor) -> None:
            part = sketch(gradient, table=self._table)
            # A parameter that is used twice receives its gradient in two parts.
            sums[name] = sums[name] + part if name in sums else part

        hooks = [p.register_hook(partial(see, name)) for name, p in self._parameters.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.found.append(sketched_alone({n: s / scale for n, s in sums.items()}, self._parameters))


def sketched_alone(sketches: Mapping[str, Tensor], of: Mapping[str, Tensor]) -> dict[str, Observation]:
    """Return observations of gradients, `gradient/NAME` → observation, from sketches (K,), with one copy to the host.

    of: name → a tensor of the gradient's shape.
    """
    if not sketches:
        return {}
    rows = torch.stack(list(sketches.values())).cpu()
    found = zip(sketches, rows, strict=True)
    return {PARAMETER + name: sketch_alone(row, tuple(of[name].shape)) for name, row in found}
