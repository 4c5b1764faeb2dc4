"""Translate a precision policy for the reference: the dtype of its arrays, the format of operands, and its casts.

In torch a tensor that the plan of casts keeps has the operand dtype: its readers promote it or stay in that dtype, and
every gradient on the way is rounded. Here arrays stay in the stream dtype, and the same roundings are written out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
from jax import Array

from lockstep.core.components.cast_plan import LOCKSTEP, CastPlan
from lockstep.jax_backend.kernels.formats import Format, rounded

Kernel = Literal["cpu", "cuda", "wide", "math"]
Times = Callable[[Array, Array], Array]


@dataclass(frozen=True)
class Policy:
    """A precision policy in JAX's dtypes.

    stream: dtype of every array. operand: format of matrix operands, or None. narrow_output: and of their products.

    kernel: whose roundings attention follows: torch's fused kernels on the CPU or on CUDA, Lockstep's on the CPU with
            gradients summed in FP32 (`wide`), or `math` (jax_backend/attention.py).
    casts:  what else is rounded to the operand format.
    """

    name: str
    stream: Any
    operand: Format | None
    narrow_output: bool = True
    kernel: Kernel = "cpu"
    casts: CastPlan = LOCKSTEP

    def round(self, x: Array) -> Array:
        """Round the values of x, to nearest even, to the operand format."""
        return x if self.operand is None else rounded(x, self.operand)

    def round_output(self, x: Array) -> Array:
        """Round a product's output; TF32 leaves it as FP32."""
        return self.round(x) if self.narrow_output else x

    def kept(self, x: Array, key: str) -> Array:
        """Round x, and its gradient, to the operand format if the plan of casts keeps `key` in it; else return x."""
        return _cast(x, self, True) if self.casts.keeps(key) else x

    def read(self, x: Array, key: str) -> Array:
        """Return x, which is already rounded, for one of its readers; the reader's gradient is rounded."""
        return _cast(x, self, False) if self.casts.keeps(key) else x

    def rotated(self, rotate: Callable[[Array], Array], x: Array) -> Array:
        """Apply a rotation with the plan's casts of what it reads and writes. Its products: `times`."""
        # With a bias that is added in FP32 it is not rounded yet.
        x = self.kept(x, "rope") if self.casts.rounds("rope") else self.read(x, "linear")
        return self.kept(rotate(x), "rotation")

    def tables(self, cos: Array, sin: Array) -> tuple[Array, Array]:
        """Return RoPE's tables in the stream dtype, with the plan's rounding."""
        cos, sin = cos.astype(self.stream), sin.astype(self.stream)
        return (self.round(cos), self.round(sin)) if self.casts.rotates_narrowly else (cos, sin)

    @property
    def times(self) -> Times:
        """The product of RoPE's operands with its tables, whose gradients the plan may round one by one."""
        return partial(_product, self) if self.casts.rounds_rotated_products else operator.mul

    def activated(self, activate: Callable[..., Array], *inputs: Array) -> Array:
        """Apply an activation with the plan's casts of what it reads, makes on the way and writes.

        inputs: one tensor, or gate and up.
        """
        if not self.casts.rounds("act"):
            return activate(*(self.read(x, "linear") for x in inputs))
        between = partial(self.kept, key="act") if self.casts.rounds_inside_act else as_it_is
        return self.kept(activate(*(self.kept(x, "act") for x in inputs), between), "act")


def as_it_is(x: Array) -> Array:
    """Return X unchanged: nothing is rounded between two operations."""
    return x


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _cast(x: Array, policy: Policy, forward: bool) -> Array:
    return policy.round(x) if forward else x


def _cast_forward(x: Array, policy: Policy, forward: bool) -> tuple[Array, None]:
    return _cast(x, policy, forward), None


def _cast_backward(policy: Policy, forward: bool, _: None, grad: Array) -> tuple[Array]:
    return (policy.round(grad),)


_cast.defvjp(_cast_forward, _cast_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(policy: Policy, x: Array, table: Array) -> Array:
    return policy.round(x * table) if policy.casts.rotates_narrowly else x * table


def _product_forward(policy: Policy, x: Array, table: Array) -> tuple[Array, Array]:
    return _product(policy, x, table), table


def _product_backward(policy: Policy, table: Array, grad: Array) -> tuple[Array, None]:
    return policy.round(grad * table), None


_product.defvjp(_product_forward, _product_backward)
