"""Modules of torch.nn and transformers whose class declares the operation that they compute.

A fused or patched kernel may replace a module's forward, and ignore its bias, its epsilon or its approximation. Each
operation inside it is then correct, and the module's result is wrong. Therefore the module's result is judged like that
of one operation, from its own inputs. Only the classes themselves are in the table: a subclass may compute something
else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.torch_backend.watch.recompute import Call

aten: Any = torch.ops.aten


def _linear(m: Any, x: Tensor, weight: Tensor) -> tuple[str, Any, tuple[Any, ...]]:
    """Return the operation x·Wᵀ + b, or x·Wᵀ without a bias, with x flattened to rows."""
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
    """Return the public name of a module in the table, such as `torch.nn.LayerNorm`; "" for others."""
    kind = type(module)
    if f"{kind.__module__}.{kind.__qualname__}" not in DECLARED or getattr(module, "dim", 0) is None:
        return ""
    library = kind.__module__.partition(".")[0]
    return f"{'torch.nn' if library == 'torch' else library}.{kind.__name__}"


def call_of(module: nn.Module, args: tuple[Any, ...], result: Any) -> Call | None:
    """Return the operation of a module in the table; None if its forward was called in an unusual way.

    Inputs that are wider than the result are rounded to its dtype, because autocast rounds the operands of a product.
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
    """Return the repr of a module in one line."""
    return " ".join(repr(module).split())
