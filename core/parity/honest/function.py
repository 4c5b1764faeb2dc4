"""A function under test, from arrays to arrays. The tools/honest.py of a backend runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lockstep.core.errors import UserError
from lockstep.core.parity.watch.snapshot import array_of, dtype_of
from lockstep.core.parity.watch.update_rules import ROUNDINGS

__tracebackhide__ = True

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# Spacing of numbers just above 1, and exponent of the smallest normal number, by dtype.
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}
SMALLEST = {"bfloat16": -126, "float16": -14, "float32": -126, "float64": -1022}


@dataclass(frozen=True)
class Given:
    """An input of the user.

    original: the input as it was given.
    values: float64 numbers rounded to `dtype`, in which the function receives them. None for an input that is not
    floating-point, which the function receives unchanged.
    once: the shape, with 1 for axes along which the tensor was expanded, because its elements there share memory.
    differentiate: whether its gradient is compared.
    parameter: it is a parameter of a module and not an argument.
    """

    name: str
    original: Any
    values: np.ndarray | None
    dtype: str
    once: tuple[int, ...]
    differentiate: bool
    parameter: bool = False


@dataclass(frozen=True)
class Value:
    """An output or a gradient: float64 numbers, or integers and booleans unchanged.

    dtype: the dtype of the computation.
    """

    array: np.ndarray
    dtype: str

    @property
    def floating(self) -> bool:
        """Return whether it holds floating-point numbers."""
        return self.array.dtype.kind == "f"


@dataclass(frozen=True)
class Answer:
    """The results of a call, forward and backward.

    outputs: by name.
    grads: by input; None if no gradient reached it.
    backward: False if the outputs do not have the names of the given gradients, so that no backward pass was run.
    written: inputs whose values the call changed.
    narrowed: with `look`, operations that read FP64 and write only narrower numbers.
    """

    outputs: dict[str, Value]
    grads: dict[str, Value | None]
    backward: bool = True
    written: tuple[str, ...] = ()
    narrowed: tuple[str, ...] = ()


# A function from the shapes of floating-point outputs by name to their gradients, float64. Outputs that it leaves out
# have no gradient.
Cotangents = Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, np.ndarray]]


class Function(Protocol):
    """A torch or JAX function on the user's inputs."""

    def __call__(
        self, values: Mapping[str, np.ndarray], exact: bool, cotangents: Cotangents, look: bool = False
    ) -> Answer:
        """Call it with these values of the floating-point inputs, and run the backward pass.

        exact: compute in FP64 instead of each input's dtype.
        look: record the operations that narrow FP64.
        """
        ...


def dtype_named(dtype: Any) -> str:
    """Return `bfloat16`, `float16` or `float32`, from a key of `DTYPES` or a dtype of torch, JAX or numpy.

    Raises UserError for any other.
    """
    word = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None) or str(dtype).rpartition(".")[2]
    found = DTYPES.get(word, word)
    if found not in DTYPES.values():
        raise UserError(f"dtype={dtype!r}: it is bf16, fp16 or fp32, or such a dtype of torch or JAX")
    return found


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round float64 values to the nearest number of a dtype. Returns float64 of the same shape."""
    with np.errstate(over="ignore"):
        return ROUNDINGS[dtype](np.asarray(x)).reshape(np.shape(x))


def spacing(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return the distance between neighbouring numbers of a dtype at these values; float64 of the same shape."""
    _, exponent = np.frexp(x)
    # frexp returns for 0 the exponent of 1/2.
    return np.ldexp(EPS[dtype], np.where(x == 0, SMALLEST[dtype], np.maximum(exponent - 1, SMALLEST[dtype])))


def given(name: str, original: Any, dtype: str | None, differentiate: bool, parameter: bool = False) -> Given:
    """Read one input. dtype: None for the input's own.

    Raises UserError for complex numbers, for numbers outside the dtype's range, and for an own dtype that is not in
    `DTYPES`.
    """
    inside = original.values() if isinstance(original, dict) else original
    if isinstance(inside, (list, tuple)) and any(hasattr(x, "dtype") for x in inside):
        raise UserError(f"inputs: {name} holds arrays in a {type(original).__name__}: pass each separately")
    if not hasattr(original, "dtype") or not hasattr(original, "shape"):
        return Given(name, original, None, "", (), False)
    kind = dtype_of(original)
    if "complex" in kind:
        raise UserError(f"inputs: {name} is {kind}; floating-point numbers, integers and booleans can be compared")
    if "float" not in kind:
        return Given(name, original, None, "", (), False, parameter)
    if dtype is None and kind not in DTYPES.values():
        raise UserError(f"keep= names {name}, which is {kind}; inputs keep {', '.join(DTYPES.values())}")
    dtype = dtype or kind
    exact = array_of(original).astype(np.float64)
    values = rounded(exact, dtype)
    if np.any(np.isfinite(exact) & ~np.isfinite(values)):
        raise UserError(f"inputs: {name} has numbers outside the range of {dtype}")
    strides = original.stride() if callable(getattr(original, "stride", None)) else (1,) * values.ndim
    once = tuple(1 if stride == 0 else size for size, stride in zip(values.shape, strides, strict=True))
    return Given(name, original, values, dtype, once, differentiate, parameter)
