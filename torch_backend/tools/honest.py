"""A torch function or module as a `Function` of `assert_honest` (core/parity/honest/function.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.core.errors import UserError
from lockstep.core.parity.honest.function import Answer, Cotangents, Given, Value

__tracebackhide__ = True

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}
# The storage offset of an input is kept modulo this number of elements, more than any alignment that kernels require.
OFFSET = 64


class TorchFunction:
    """A torch function with the user's inputs. New values get the device and the strides of the user's tensors.

    inputs: the inputs, with a module's own parameters and buffers, marked as such. keywords: pass inputs by name.
    """

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Given], keywords: bool) -> None:
        self._function, self._inputs, self._keywords = function, inputs, keywords
        tensors = [one.original for one in inputs if isinstance(one.original, Tensor)]
        self._device = tensors[0].device if tensors else torch.device("cpu")

    def __call__(
        self, values: Mapping[str, np.ndarray], exact: bool, cotangents: Cotangents, look: bool = False
    ) -> Answer:
        """Implement `Function`; grad mode, default dtype and random state are set only during the call."""
        narrowing = Narrowing()
        with _aside(self._device, exact):
            arguments = {one.name: self._argument(one, values, exact) for one in self._inputs}
            if look:
                with narrowing:
                    outputs, grads, backward = self._both_ways(arguments, cotangents)
            else:
                outputs, grads, backward = self._both_ways(arguments, cotangents)
            written = tuple(
                name for name, x in values.items() if not np.array_equal(array(arguments[name]), x, equal_nan=True)
            )
            found = {name: Value(array(x), _name(x)) for name, x in outputs.items()}
            back = {n: None if g is None else Value(array(g), _name(g)) for n, g in grads.items()}
        return Answer(found, back, backward, written, tuple(sorted(set(narrowing.found))))

    def _both_ways(
        self, arguments: Mapping[str, Any], cotangents: Cotangents
    ) -> tuple[dict[str, Tensor], dict[str, Tensor | None], bool]:
        outputs = named(self._call(arguments))
        wanted = {one.name: arguments[one.name] for one in self._inputs if one.differentiate}
        if not wanted:
            return outputs, {}, True
        given = cotangents({n: tuple(x.shape) for n, x in outputs.items() if x.is_floating_point()})
        if any(name not in outputs or outputs[name].shape != g.shape for name, g in given.items()):
            return outputs, dict.fromkeys(wanted), False
        reached = [name for name in given if outputs[name].requires_grad]
        if not reached:
            return outputs, dict.fromkeys(wanted), True
        back = torch.autograd.grad(
            [outputs[name] for name in reached],
            list(wanted.values()),
            [torch.from_numpy(given[name]).to(outputs[name]) for name in reached],
            allow_unused=True,
        )
        return outputs, dict(zip(wanted, back, strict=True)), True

    def _call(self, arguments: Mapping[str, Any]) -> Any:
        own = {one.name: arguments[one.name] for one in self._inputs if one.parameter}
        passed = {one.name: arguments[one.name] for one in self._inputs if not one.parameter}
        positional = () if self._keywords else tuple(passed.values())
        by_name = passed if self._keywords else {}
        if own and isinstance(self._function, nn.Module):
            return torch.func.functional_call(self._function, own, positional, by_name)
        return self._function(*positional, **by_name)

    def _argument(self, one: Given, values: Mapping[str, np.ndarray], exact: bool) -> Any:
        if one.values is None:
            if isinstance(one.original, Tensor):
                return one.original.detach().clone()
            if hasattr(one.original, "dtype") and hasattr(one.original, "shape"):
                return torch.from_numpy(np.array(one.original)).to(self._device)
            return one.original
        like = one.original if isinstance(one.original, Tensor) else None
        dtype = torch.float64 if exact else DTYPES[one.dtype]
        tensor = _laid_out(torch.from_numpy(np.array(values[one.name])), like, dtype, self._device)
        return tensor.requires_grad_(one.differentiate)


def _laid_out(values: Tensor, like: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values in a tensor with the strides of `like` and its storage offset modulo OFFSET."""
    if like is None or like.layout != torch.strided:
        return values.to(device, dtype, copy=True)
    strides, offset = like.stride(), like.storage_offset() % OFFSET
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    last = sum((size - 1) * stride for size, stride in zip(like.shape, strides, strict=True)) if like.numel() else 0
    memory = torch.zeros(offset + 1 + last, dtype=dtype, device=like.device)
    if like.numel():
        shape = [1 if stride == 0 else size for size, stride in zip(like.shape, strides, strict=True)]
        memory.as_strided(shape, strides, offset).copy_(values[once])
    return memory.as_strided(like.shape, strides, offset)


def named(result: Any) -> dict[str, Tensor]:
    """Return the outputs of a function by name, without those that are None. Raises UserError for other non-tensors."""
    if isinstance(result, Tensor):
        return {"output": result}
    if isinstance(result, Mapping):
        parts = {str(key): value for key, value in result.items()}
    elif isinstance(result, (tuple, list)):
        parts = {f"output {i}": value for i, value in enumerate(result)}
    else:
        raise UserError(f"a function returned {type(result).__name__}; it returns tensors, or a tuple or dict of them")
    for name, value in parts.items():
        if value is not None and not isinstance(value, Tensor):
            raise UserError(f"a function returned {type(value).__name__} as {name}; outputs are tensors")
    return {name: value for name, value in parts.items() if value is not None}


def own_tensors(function: Any) -> dict[str, tuple[Tensor, bool]]:
    """Return a module's parameters and buffers by name, each with its `requires_grad`; {} for a function."""
    if not isinstance(function, nn.Module):
        return {}
    parameters = {name: (p, p.requires_grad) for name, p in function.named_parameters()}
    return parameters | {name: (b, False) for name, b in function.named_buffers()}


def array(tensor: Tensor) -> np.ndarray:
    """Copy a tensor to an array: floating-point numbers become float64, other dtypes stay."""
    found = tensor.detach().to("cpu")
    return np.array((found.double() if found.is_floating_point() else found).numpy())


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).rpartition(".")[2]


@contextmanager
def _aside(device: torch.device, exact: bool) -> Iterator[None]:
    """Enable gradients and fix the random state; if `exact`, also set default FP64 without autocast. Restore all."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    before = torch.get_default_dtype()
    with (
        torch.random.fork_rng(devices),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False) if exact else nullcontext(),
    ):
        torch.manual_seed(0)
        try:
            if exact:
                torch.set_default_dtype(torch.float64)
            yield
        finally:
            torch.set_default_dtype(before)


class Narrowing(TorchDispatchMode):
    """A mode that records operations that read FP64 and write only narrower floating-point numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation unchanged, and record it if it narrows FP64."""
        result = func(*args, **(kwargs or {}))
        reads = {x.dtype for x in _tensors((*args, *(kwargs or {}).values()))}
        writes = {x.dtype for x in _tensors(result) if x.is_floating_point()}
        if torch.float64 in reads and writes and torch.float64 not in writes:
            to = ", ".join(sorted(str(dtype).rpartition(".")[2] for dtype in writes))
            self.found.append(f"{func.overloadpacket.__name__.strip('_')} to {to}")
        return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for one in tree:
            yield from _tensors(one)
