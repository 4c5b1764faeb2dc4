"""Shard the arrays of the reference over several devices. The computation is the same.

One mesh axis, as in FSDP (Zhao et al. 2023, arXiv 2304.11277) and ZeRO's third stage (Rajbhandari et al. 2020, arXiv
1910.02054): every device holds a part of each parameter, moment and gradient, and of the batch. XLA partitions the
programs (GSPMD, Xu et al. 2021, arXiv 2105.04663): it gathers a weight where it is used, and sums gradients over the
devices. A sum over devices is made in the stream dtype and rounded after it, as on one device: products are FP32 and
rounded in a step of their own (jax_backend/precision.py). So results differ only by the order of additions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lockstep.core.errors import UserError
from lockstep.jax_backend.model import Tap

AXIS = "shards"


class Shards:
    """The placement of arrays on devices. With one device, all methods leave everything as it is."""

    def __init__(self, count: int) -> None:
        """Take the first `count` devices. Raises UserError if JAX does not see as many."""
        there = jax.devices()
        if count > len(there):
            seen = f"{len(there)} device{'s' if len(there) > 1 else ''} ({there[0].device_kind})"
            more = f"; JAX_NUM_CPU_DEVICES={count} cuts a CPU into as many" if there[0].platform == "cpu" else ""
            raise UserError(f"parity.reference_devices = {count}, and JAX finds {seen}{more}")
        self.count = count
        self._mesh = Mesh(np.array(there[:count]), (AXIS,), axis_types=(AxisType.Auto,)) if count > 1 else None

    def of(self, shape: tuple[int, ...]) -> NamedSharding | None:
        """Shard a parameter, moment or gradient along its largest dimension that the devices divide; else replicate.

        If several are as large, the first. A whole one lies on every device.
        """
        fitting = [axis for axis, size in enumerate(shape) if size % self.count == 0]
        return self._along(max(fitting, key=lambda axis: (shape[axis], -axis)) if fitting else None)

    def jit(self, function: Callable[..., Any], out: Any) -> Any:
        """Compile by `jax.jit`, with `out` as the outputs' shardings; None where the compiler may choose."""
        return jax.jit(function) if self._mesh is None else jax.jit(function, out_shardings=out)

    def parameter(self, x: np.ndarray, dtype: Any) -> Array:
        """Place a parameter or moment from host memory, each device taking its part; a copy."""
        sharding = self.of(x.shape)
        # On the CPU, `asarray` and `device_put` share an aligned array's memory with its owner, who may write to it.
        return jnp.array(x, dtype) if sharding is None else jax.device_put(np.array(x, dtype), sharding)

    def rows(self, x: Any) -> Any:
        """Shard something of a batch, sequences first, over the devices if they divide them; else replicate it."""
        return x if self._mesh is None or x is None else jax.device_put(x, self._of_rows(x.shape))

    def tap(self, tap: Tap) -> Tap:
        """Return a tap that also keeps tensors cut by sequences, so that weights are gathered and not activations."""
        if self._mesh is None:
            return tap

        def kept(name: str, value: Array) -> Array:
            value = tap(name, value)
            if name == "logits.weight":
                return value
            return jax.lax.with_sharding_constraint(value, self._of_rows(value.shape))

        return kept

    def _of_rows(self, shape: tuple[int, ...]) -> NamedSharding | None:
        return self._along(0 if shape[0] % self.count == 0 else None)

    def _along(self, axis: int | None) -> NamedSharding | None:
        if self._mesh is None:
            return None
        return NamedSharding(self._mesh, PartitionSpec(*([None] * axis + [AXIS]) if axis is not None else ()))

    def in_force(self) -> dict[str, str]:
        """Describe the sharding for the table at start; nothing for one device."""
        if self._mesh is None:
            return {}
        return {"devices": f"{self.count}: sequences, weights and moments cut over them"}
