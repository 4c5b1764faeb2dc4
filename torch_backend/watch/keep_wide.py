"""Keep FP64 where a module requests less, and find where that is.

A module may hard-code a dtype: `logits.float()` before the loss, a table in bf16. In a truth that would be a rounding
of the module's own. `KeepWide` sees every operation below autograd, gives it FP64 where it requests a narrower float,
and notes the module that did. An operation that returns a narrower float all the same is noted as well: its result
is no FP64 truth. (Autocast leaves FP64 alone: at::autocast::cached_cast.)
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
    """A mode that computes in FP64 where operations request less.

    asked: where a module did. lost: where FP64 went narrow all the same.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()
        self.where = where
        self.asked: dict[Asked, None] = {}
        self.lost: dict[Asked, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = dict(kwargs or {})
        wide = any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in tree_leaves((args, kwargs)))
        dtype = kwargs.get("dtype")
        if dtype in NARROW:
            # A factory that requests FP32 gets FP64 without a note: it is the default dtype's other name.
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
    """Return `to` for aten._to_copy, else the operation's own name."""
    name = str(func.overloadpacket.__name__)
    return {"_to_copy": "to"}.get(name, name)


@contextmanager
def places(model: nn.Module) -> Iterator[Callable[[], str]]:
    """Yield a function that names the innermost module whose forward is running."""
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
    """Return `blocks.0.norm: to (float32)` and the like, up to five places."""
    items = [f"{where}: {name} ({str(dtype).rpartition('.')[2]})" for where, name, dtype in asked]
    return ", ".join(items[:5]) + (f" and {len(items) - 5} more" if len(items) > 5 else "")
