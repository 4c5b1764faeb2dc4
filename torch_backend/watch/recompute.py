"""Recompute an operation from its own inputs on the CPU: in FP64 for the truth, in FP32 for the twin.

The ways, in order of preference:

- a formula in another framework (core/parity/watch/formulas.py)
- for a custom operation, the function that the user registered
- torch's decomposition of the operation in Python
- the operation's own kernel in FP64; it has no twin, because in FP32 it would be the candidate's own kernel
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lockstep.core.errors import UserError
from lockstep.core.parity.watch.formulas import Formula

log = logging.getLogger("lockstep.watch")

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NARROW = (torch.bfloat16, torch.float16)
# Arguments that set the storage of a result and do not affect its values.
OF_STORAGE = ("device", "layout", "pin_memory", "memory_format", "non_blocking")
# Operations whose CUDA kernels round intermediate results.
ROUND_ON_CUDA = frozenset({"aten._softmax_backward_data"})
BY_JAX, BY_REFERENCE = "by JAX", "by the registered reference"
BY_DECOMPOSITION, BY_KERNEL = "by torch FP64, decomposed", "by torch FP64, the same kernel"

_references: dict[str, Callable[..., Any]] = {}


def watch_operation(name: str, reference: Callable[..., Any]) -> None:
    """Register a reference for a custom operation, for `watch(operations=True)`.

    Args:
        name: torch's name of the operation, such as `mylib::scale`.
        reference: a function of the operation's arguments, with tensors on the CPU, that returns its results, a tensor
            or a tuple. It must compute in the dtype of its tensors: FP64 for the truth, FP32 for the twin.

    Raises UserError for an invalid name, and for an operation of torch.
    """
    library, _, own = name.partition("::")
    if not (library.isidentifier() and own.isidentifier()):
        raise UserError(f"watch_operation({name!r}): give the name that torch uses, such as mylib::scale")
    if library in ("aten", "prims"):
        raise UserError(f"watch_operation({name!r}): Lockstep has its own references for operations of torch")
    if not callable(reference):
        raise UserError(f"watch_operation({name!r}): its reference is a function of the operation's arguments")
    _references[name] = reference


class NotJudged(Exception):
    """An operation that cannot be recomputed, with the reason."""


@dataclass(frozen=True)
class Call:
    """An operation and its arguments, all tensors detached. name: `aten.gelu`, without `_` of in-place operations."""

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def leaves(self) -> list[Any]:
        """All arguments in one list."""
        return tree_leaves((self.args, dict(self.kwargs)))

    @property
    def floating(self) -> list[Tensor]:
        """The floating-point tensors among its arguments."""
        return [x for x in self.leaves if isinstance(x, Tensor) and x.is_floating_point()]

    @property
    def rounds_between(self) -> bool:
        """True if its kernel rounds intermediate results to a narrow dtype, as attention does between its products."""
        inside = "attention" in self.name or (self.name in ROUND_ON_CUDA and self.device == "cuda")
        return inside and self.floating[0].dtype in NARROW

    @property
    def device(self) -> str:
        """The kind of device of its first floating-point tensor."""
        return self.floating[0].device.type


class Recompute:
    """A recomputation of operations. formulas: name of an ATen operation → its formula."""

    def __init__(self, formulas: Mapping[str, Formula]) -> None:
        self._formulas = formulas
        self._refused: set[str] = set()

    def values(self, call: Call) -> list[np.ndarray]:
        """Return the floating-point inputs of a call as FP64 arrays."""
        return [x.detach().to("cpu", torch.float64).numpy() for x in call.floating]

    def ways(self, call: Call) -> list[str]:
        """List the ways to recompute a call, best first. Raises NotJudged if there is none."""
        library, _, name = call.name.partition(".")
        if library not in ("aten", "prims"):
            if f"{library}::{name}" not in _references:
                raise NotJudged(f"no reference for {library}::{name}: watch_operation registers one")
            return [BY_REFERENCE]
        found = [BY_JAX] if name in self._formulas and call.floating else []
        return found + ([BY_DECOMPOSITION] if call.func in decomposition_table else []) + [BY_KERNEL]

    def __call__(self, call: Call, values: Sequence[np.ndarray], wide: bool, way: str) -> list[np.ndarray | None]:
        """Return the results as float64 or integer arrays, computed from these floating-point inputs.

        wide: compute in FP64, else in FP32. way: one of `ways`. Raises NotJudged, or the error of a way that does not
        support these arguments.
        """
        if way == BY_JAX:
            dtype = np.float64 if wide else np.float32
            args, kwargs = self._arguments(call, [x.astype(dtype) for x in values], as_array=True)
            formula = self._formulas[call.name.partition(".")[2]]
            if not wide and call.rounds_between:
                kwargs["operands"] = str(call.floating[0].dtype).rpartition(".")[2]
            found = formula(*args, **kwargs)
            return [None if x is None else _wide(np.asarray(x)) for x in found]
        tensors = [torch.from_numpy(x.copy()).to(torch.float64 if wide else torch.float32) for x in values]
        args, kwargs = self._arguments(call, tensors, as_array=False, dtype=torch.float64 if wide else torch.float32)
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
            result = self._torch(call, way)(*args, **kwargs)
        return [_array(x) for x in tree_leaves(result)]

    def _torch(self, call: Call, way: str) -> Callable[..., Any]:
        if way == BY_REFERENCE:
            return _references[call.name.replace(".", "::", 1)]
        return decomposition_table[call.func] if way == BY_DECOMPOSITION else call.func

    def _arguments(
        self, call: Call, floating: Sequence[Any], as_array: bool, dtype: torch.dtype | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with other floating-point tensors, and with `dtype` in place of dtypes."""
        todo = iter(floating)
        kwargs = {k: v for k, v in call.kwargs.items() if not (as_array and k in OF_STORAGE)}
        leaves, tree = tree_flatten((call.args, kwargs))
        for i, x in enumerate(leaves):
            if isinstance(x, Tensor):
                if x.is_floating_point():
                    leaves[i] = next(todo)
                else:
                    # Copy, because in-place operations write into their input.
                    kept = x.detach().to("cpu", copy=True)
                    leaves[i] = kept.numpy() if as_array else kept
            elif isinstance(x, torch.dtype) and x in FLOATS:
                leaves[i] = dtype
            elif isinstance(x, torch.device):
                leaves[i] = torch.device("cpu")
        args, kwargs = tree_unflatten(leaves, tree)
        schema = getattr(call.func, "_schema", None)
        for i, argument in enumerate(schema.arguments if schema else ()):
            # Set a softmax's half_to_float to False: there are no half-precision inputs here.
            if argument.name == "half_to_float" and i < len(args):
                args = (*args[:i], False, *args[i + 1 :])
        return tuple(args), kwargs


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) if x.dtype.kind == "f" else x


def _array(x: Any) -> np.ndarray | None:
    if not isinstance(x, Tensor):
        return None
    return x.detach().double().numpy() if x.is_floating_point() else x.detach().numpy()


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Round FP64 numbers to a dtype."""
    return torch.from_numpy(x).to(dtype).double().numpy()


# Operations that sum over a row, for any size of their result.
OVER_ROWS = ("softmax", "norm", "logsumexp", "cumsum", "var", "std")


def terms_of(call: Call, result: np.ndarray) -> float:
    """Return an upper bound of the number of terms that are summed into one element of a result."""
    name, floating = call.name.partition(".")[2], call.floating
    if not floating:
        return 1.0
    if name in ("mm", "bmm"):
        return float(floating[0].shape[-1])
    if name in ("addmm", "baddbmm", "linear"):
        return float(floating[1 if name != "linear" else 0].shape[-1] + 1)
    if "attention" in name:
        return float(sum(floating[0].shape[-2:]) + floating[1].shape[-2])
    if "conv" in name:
        return float(math.prod(floating[1].shape[1:]))
    folded = max(x.numel() for x in floating) / max(result.size, 1)
    row = max(x.shape[-1] if x.ndim else 1 for x in floating) if any(word in name for word in OVER_ROWS) else 1
    return max(1.0, folded, float(row))
