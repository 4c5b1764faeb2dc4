"""The second computation of an operation from its own inputs: in FP64 for the truth, in FP32 for the twin, on the CPU.

By a formula of another framework where there is one (core/parity/watch/formulas.py), for an operation of somebody's
own by the function that they registered, else by torch: its decomposition in Python, or, named as such, the operation's
own kernel in FP64. A kernel has no twin: in FP32 it would be the candidate's own.
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
# Arguments that say where and how a result is stored, and nothing of its numbers.
OF_STORAGE = ("device", "layout", "pin_memory", "memory_format", "non_blocking")
# Operations whose CUDA kernels round between their steps.
ROUND_ON_CUDA = frozenset({"aten._softmax_backward_data"})
BY_JAX, BY_REFERENCE = "by JAX", "by the registered reference"
BY_DECOMPOSITION, BY_KERNEL = "by torch FP64, decomposed", "by torch FP64, the same kernel"

_references: dict[str, Callable[..., Any]] = {}


def watch_operation(name: str, reference: Callable[..., Any]) -> None:
    """Register a reference for an operation of one's own, for `watch(operations=True)`.

    Args:
        name: as torch has it, `mylib::scale`.
        reference: takes the operation's arguments with tensors in FP64 on the CPU, and returns its results, a tensor
            or a tuple. It computes in the dtype of its tensors: in FP32 it is the twin.

    Raises UserError for what is no operation's name, and for one of torch's own.
    """
    library, _, own = name.partition("::")
    if not (library.isidentifier() and own.isidentifier()):
        raise UserError(f"watch_operation({name!r}): an operation is named as torch has it, mylib::scale")
    if library in ("aten", "prims"):
        raise UserError(f"watch_operation({name!r}): operations of torch have references of Lockstep's own")
    if not callable(reference):
        raise UserError(f"watch_operation({name!r}): its reference is a function of the operation's arguments")
    _references[name] = reference


class NotJudged(Exception):
    """An operation that cannot be computed again, with the reason."""


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
        """The floating tensors among its arguments."""
        return [x for x in self.leaves if isinstance(x, Tensor) and x.is_floating_point()]

    @property
    def rounds_between(self) -> bool:
        """Return whether its kernel rounds to a narrow dtype between its steps: attention between its two products."""
        inside = "attention" in self.name or (self.name in ROUND_ON_CUDA and self.device == "cuda")
        return inside and self.floating[0].dtype in NARROW

    @property
    def device(self) -> str:
        """The kind of device that its first floating tensor lies on."""
        return self.floating[0].device.type


class Recompute:
    """A second computation of operations. formulas: by the name of an ATen operation."""

    def __init__(self, formulas: Mapping[str, Formula]) -> None:
        self._formulas = formulas
        self._refused: set[str] = set()

    def values(self, call: Call) -> list[np.ndarray]:
        """Return the floating inputs of a call as FP64 arrays."""
        return [x.detach().to("cpu", torch.float64).numpy() for x in call.floating]

    def ways(self, call: Call) -> list[str]:
        """List how a call can be computed, best first. Raises NotJudged if it cannot."""
        library, _, name = call.name.partition(".")
        if library not in ("aten", "prims"):
            if f"{library}::{name}" not in _references:
                raise NotJudged(f"no reference for {library}::{name}: watch_operation registers one")
            return [BY_REFERENCE]
        found = [BY_JAX] if name in self._formulas and call.floating else []
        return found + ([BY_DECOMPOSITION] if call.func in decomposition_table else []) + [BY_KERNEL]

    def __call__(self, call: Call, values: Sequence[np.ndarray], wide: bool, way: str) -> list[np.ndarray | None]:
        """Return the results as float64, or integers, computed in FP64 (wide) or in FP32 from these floating inputs.

        Raises NotJudged, or whatever the way raises that does not know these arguments.
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
        """Return the arguments of a call, with other floating tensors, and dtypes that do not narrow them."""
        todo = iter(floating)
        kwargs = {k: v for k, v in call.kwargs.items() if not (as_array and k in OF_STORAGE)}
        leaves, tree = tree_flatten((call.args, kwargs))
        for i, x in enumerate(leaves):
            if isinstance(x, Tensor):
                if x.is_floating_point():
                    leaves[i] = next(todo)
                else:
                    # In-place operations write into a copy.
                    kept = x.detach().to("cpu", copy=True)
                    leaves[i] = kept.numpy() if as_array else kept
            elif isinstance(x, torch.dtype) and x in FLOATS:
                leaves[i] = dtype
            elif isinstance(x, torch.device):
                leaves[i] = torch.device("cpu")
        args, kwargs = tree_unflatten(leaves, tree)
        schema = getattr(call.func, "_schema", None)
        for i, argument in enumerate(schema.arguments if schema else ()):
            # A softmax from half precision has it; there is no half precision here.
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


# Operations that sum over a row, however many numbers their result has.
OVER_ROWS = ("softmax", "norm", "logsumexp", "cumsum", "var", "std")


def terms_of(call: Call, result: np.ndarray) -> float:
    """Return how many numbers are summed into one number of a result, at most."""
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
