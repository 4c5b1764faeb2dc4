"""Modules of torch.nn, and transformers' Conv1D, by what they declare: the operation that their forward stands for.

A fused or patched kernel may run in a module's place that ignores its bias, its epsilon or its approximation. Each
operation of it is then right by itself. So the module's result is judged as an operation's: from its own inputs.
Known by the class itself: a subclass may mean something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.torch_backend.watch.recompute import Call

aten: Any = torch.ops.aten


def _linear(m: Any, x: Tensor, weight: Tensor) -> tuple[str, Any, tuple[Any, ...]]:
    """Return x·Wᵀ + b, or x·Wᵀ, of rows."""
    rows = x.reshape(-1, x.shape[-1])
    if m.bias is None:
        return "aten.mm", aten.mm.default, (rows, weight)
    return "aten.addmm", aten.addmm.default, (m.bias, rows, weight)


DECLARED: dict[str, Callable[[Any, Tensor], tuple[str, Any, tuple[Any, ...]]]] = {
    "torch.nn.modules.linear.Linear": lambda m, x: _linear(m, x, m.weight.t()),
    "transformers.pytorch_utils.Conv1D": lambda m, x: _linear(m, x, m.weight),
    "torch.nn.modules.normalization.LayerNorm": lambda m, x: (
        "aten.native_layer_norm",
        aten.native_layer_norm.default,
        (x, list(m.normalized_shape), m.weight, m.bias, m.eps),
    ),
    "torch.nn.modules.normalization.RMSNorm": lambda m, x: (
        "aten._fused_rms_norm",
        aten._fused_rms_norm.default,
        (x, list(m.normalized_shape), m.weight, torch.finfo(x.dtype).eps if m.eps is None else m.eps),
    ),
    "torch.nn.modules.activation.GELU": lambda m, x: ("aten.gelu", aten.gelu.default, (x, m.approximate)),
    "transformers.activations.GELUActivation": lambda m, x: ("aten.gelu", aten.gelu.default, (x,)),
    "transformers.activations.GELUTanh": lambda m, x: ("aten.gelu", aten.gelu.default, (x, "tanh")),
    "torch.nn.modules.activation.SiLU": lambda m, x: ("aten.silu", aten.silu.default, (x,)),
    "torch.nn.modules.activation.Tanh": lambda m, x: ("aten.tanh", aten.tanh.default, (x,)),
    "torch.nn.modules.activation.Softmax": lambda m, x: (
        "aten._softmax",
        aten._softmax.default,
        (x, m.dim, False),
    ),
    "torch.nn.modules.sparse.Embedding": lambda m, x: (
        "aten.embedding",
        aten.embedding.default,
        (m.weight, x, -1 if m.padding_idx is None else m.padding_idx),
    ),
}


def name_of(module: nn.Module) -> str:
    """Return `torch.nn.LayerNorm` and the like for a module that is known, else an empty text."""
    kind = type(module)
    if f"{kind.__module__}.{kind.__qualname__}" not in DECLARED or getattr(module, "dim", 0) is None:
        return ""
    library = kind.__module__.partition(".")[0]
    return f"{'torch.nn' if library == 'torch' else library}.{kind.__name__}"


def call_of(module: nn.Module, args: tuple[Any, ...], result: Any) -> Call | None:
    """Return the operation that a known module's forward stands for; None if it is called in another way.

    Under autocast the inputs of a product are narrowed first: where the result is narrower than they are, they are
    rounded to its dtype.
    """
    if len(args) != 1 or not isinstance(args[0], Tensor) or not isinstance(result, Tensor):
        return None
    kind = type(module)
    name, func, values = DECLARED[f"{kind.__module__}.{kind.__qualname__}"](module, args[0].detach())
    kwargs: dict[str, Any] = {}
    if name == "aten.gelu":
        values, kwargs = values[:1], {"approximate": values[1] if len(values) > 1 else "none"}
    given = tuple(_as_given(x, result.dtype) for x in values)
    return Call(name, func, given, kwargs)


def _as_given(x: Any, dtype: torch.dtype) -> Any:
    if not isinstance(x, Tensor):
        return x
    x = x.detach()
    narrower = x.is_floating_point() and torch.finfo(dtype).eps > torch.finfo(x.dtype).eps
    return x.to(dtype) if narrower else x


def declares(module: nn.Module) -> str:
    """Return the words in which a known module declares itself."""
    return " ".join(repr(module).split())
