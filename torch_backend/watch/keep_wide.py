"""Keep FP64 where a module requests a narrower dtype, and record the place.

A module may hard-code a dtype: `logits.float()` before the loss, or a table in bf16. In the FP64 copy this would be a
rounding. `KeepWide` intercepts every operation below autograd. If an operation requests a narrower floating-point
dtype, it gets FP64, and the module is recorded. If an operation returns a narrower dtype nevertheless, this is recorded
too: its result is not an FP64 truth. (Autocast does not cast FP64: at::autocast::cached_cast.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NARROW = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)

# Module, operation, dtype.
Asked = tuple[str, str, torch.dtype]


class KeepWide(TorchDispatchMode):
    """A mode that computes in FP64 where operations request a narrower dtype.

    where: returns the name of the module that is running. asked: requests for a narrower dtype. lost: operations that
    read FP64 and returned a narrower dtype nevertheless.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()
        self.where = where
        self.asked: dict[Asked, None] = {}
        self.lost: dict[Asked, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, with FP64 in place of a narrower dtype."""
        kwargs = dict(kwargs or {})
        wide = any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in tree_leaves((args, kwargs)))
        dtype = kwargs.get("dtype")
        if dtype in NARROW:
            # A factory function that requests FP32 gets FP64 without a record: FP32 is torch's default dtype.
            if wide or dtype != torch.float32:
                self.asked[(self.where(), _name(func), dtype)] = None
            kwargs["dtype"] = torch.float64
        result = func(*args, **kwargs)
        if wide:
            for x in tree_leaves(result):
                if isinstance(x, Tensor) and x.dtype in NARROW:
                    self.lost[(self.where(), _name(func), x.dtype)] = None
        return result


def _name(func: Any) -> str:
    """Return the name of an operation; `to` for aten._to_copy."""
    name = str(func.overloadpacket.__name__)
    return {"_to_copy": "to"}.get(name, name)


@contextmanager
def places(model: nn.Module) -> Iterator[Callable[[], str]]:
    """Yield a function that returns the name of the innermost module whose forward is running."""
    stack: list[str] = []
    handles: list[Any] = []
    for name, module in model.named_modules():
        label = name or type(module).__name__

        def enter(*_: Any, label: str = label) -> None:
            stack.append(label)

        def leave(*_: Any) -> None:
            stack.pop()

        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield lambda: stack[-1] if stack else "the loss function, or the backward pass"
    finally:
        for handle in handles:
            handle.remove()


def in_words(asked: dict[Asked, None]) -> str:
    """List up to five places, such as `blocks.0.norm: to (float32)`, and the number of the others."""
    items = [f"{where}: {name} ({str(dtype).rpartition('.')[2]})" for where, name, dtype in asked]
    return ", ".join(items[:5]) + (f" and {len(items) - 5} more" if len(items) > 5 else "")
