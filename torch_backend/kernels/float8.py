"""Linear layers in FP8 by torchao, emulated on the CPU. Twin: jax_backend/kernels/float8.py.

A scale maps the largest magnitude of its group (the amax) to the largest number of the format.

- tensorwise: one scale per tensor; inputs and weights in e4m3, gradients in e5m2
- rowwise: one scale per row of the left operand and per column of the right one, rounded down to a power of two; e4m3
- delayed: as tensorwise, with scales from the amaxes of earlier steps (core/train/fp8_amax.py)

Weights are cast from FP32, other tensors from bf16; outputs are bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.core.config.schema import PrecisionConfig, RunConfig
from lockstep.core.errors import UserError
from lockstep.core.model.families import graph_of
from lockstep.core.model.names import fp8_modules
from lockstep.core.train.fp8_amax import layers
from lockstep.torch_backend.tools.import_logging import quiet_import

# Compute capability of Ada, the first GPU generation with FP8 tensor cores; Hopper is (9, 0).
FIRST_CAPABILITY = (8, 9)
# cuBLAS requires that both sides of an FP8 matrix are multiples of this.
ALIGNMENT = 16


@dataclass(frozen=True)
class Float8:
    """An FP8 recipe in torchao's terms.

    config: Float8LinearConfig. products: the LinearMMConfig of that config.

    amax: under delayed scaling, the amaxes (3,) that give the layer's scales of input, weight and output gradient. The
    backward pass returns the amaxes of this step as the gradient of `amax`.

    of_input: the `amax` of the first layer with the same input. All layers with that input use its scale, so that a
    compiler casts the input once.
    """

    config: Any
    products: Any
    amax: Tensor | None = None
    of_input: Tensor | None = None

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply x (…, in) in bf16 by weight (out, in) in FP32 → (…, out) in bf16."""
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        if self.amax is not None:
            of_input = self.amax if self.of_input is None else self.of_input
            y: Tensor = _Delayed.apply(x, weight.t(), self.amax, of_input.detach(), self.products)
            return y
        out: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), self.products, self.config)
        return out


def float8(precision: PrecisionConfig, device: torch.device) -> Float8 | None:
    """Return the FP8 recipe of the run; None without FP8.

    Raises UserError if the GPU has no FP8 tensor cores, or if torchao is missing.
    """
    if precision.fp8 is None:
        return None
    on_cuda = device.type == "cuda"
    if on_cuda and torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        raise UserError(
            f"precision.policy = {precision.policy!r}: {torch.cuda.get_device_name(device)} has no FP8 tensor cores; "
            "use bf16, or a GPU of the Hopper or Ada generation or later"
        )
    try:
        with quiet_import():
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
            from torchao.float8.config import Float8GemmConfig
    except ImportError as error:
        raise UserError(
            f"precision.policy = {precision.policy!r} needs torchao: pip install torchao ({error})"
        ) from None
    config = replace(
        Float8LinearConfig.from_recipe_name("tensorwise" if precision.fp8 == "delayed" else precision.fp8),
        gemm_config_output=Float8GemmConfig(use_fast_accum=precision.fp8_fast_accumulation),
        emulate=not on_cuda,
    )
    # Use torchao's public function: it also patches Inductor where torchao needs a patch.
    with torch.device("meta"):
        made: Any = convert_to_float8_training(nn.Linear(ALIGNMENT, ALIGNMENT, bias=False), config=config)
    return Float8(made.config, made.linear_mm_config)


class _Delayed(torch.autograd.Function):
    """torchao's `matmul_with_hp_or_float8_args` with scales from given amaxes; it also returns the step's amaxes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_t: Tensor, amax: Tensor, of_input: Tensor, products: Any) -> Tensor:
        seen = torch.stack([x.abs().amax().to(amax.dtype), weight_t.abs().amax().to(amax.dtype)])
        ctx.save_for_backward(x, weight_t, amax, of_input, seen)
        ctx.products = products
        flat = x.reshape(-1, x.shape[-1])
        y = torch.mm(*_casts(products, input=(flat, of_input[0]), weight=(weight_t, amax[1])))
        return y.reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, weight_t, amax, of_input, seen = ctx.saved_tensors
        grad, flat = grads[0].reshape(-1, grads[0].shape[-1]), x.reshape(-1, x.shape[-1])
        seen = torch.cat([seen, grad.abs().amax().to(amax.dtype)[None]])
        narrow, narrow_weight = _casts(ctx.products, gradient=(grad, amax[2]), weight=(weight_t, amax[1]))
        (narrow_x,) = _casts(ctx.products, input=(flat, of_input[0]))
        grad_x = torch.mm(narrow, narrow_weight.t()).reshape(x.shape)
        return grad_x, torch.mm(narrow.t(), narrow_x).t(), seen, None, None


def _casts(products: Any, **tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Cast each (tensor, amax) to FP8 with the scale of its amax; values beyond the range saturate.

    Keywords: `input`, `weight` and `gradient`, the roles of a tensor in its layer.
    """
    from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8
    from torchao.float8.float8_utils import amax_to_scale

    roles = {
        "input": (torch.float8_e4m3fn, GemmInputRole.INPUT),
        "weight": (torch.float8_e4m3fn, GemmInputRole.WEIGHT),
        "gradient": (torch.float8_e5m2, GemmInputRole.GRAD_OUTPUT),
    }
    found = []
    for what, (tensor, amax) in tensors.items():
        form, role = roles[what]
        found.append(hp_tensor_and_scale_to_float8(tensor, amax_to_scale(amax, form), form, products, role, None))
    return tuple(found)


def apply_float8(model: nn.Module, run: RunConfig, recipe: Float8 | None) -> dict[str, Tensor]:
    """Switch the linear layers of `precision.fp8_layers` to FP8 products.

    Returns, under delayed scaling, the amaxes (3,) of each layer by its name, all 1; else an empty dict.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    amaxes = {}
    for name in layers(run):
        amaxes[name] = torch.ones(3, device=modules[name].weight.device, requires_grad=True)
    for name in fp8_modules(run):
        modules[name].float8 = recipe
    first: dict[str, Tensor] = {}
    for name, amax in amaxes.items():
        of_input = first.setdefault(graph_of(run.model).linears[name].reads["x"], amax)
        modules[name].float8 = recipe and replace(recipe, amax=amax, of_input=of_input)
    return amaxes


def set_amaxes(amaxes: Mapping[str, Tensor], values: Mapping[str, np.ndarray]) -> None:
    """Set the amaxes of each layer in place. values: layer → (3,) float32."""
    if amaxes:
        with torch.no_grad():
            given = torch.from_numpy(np.stack([values[name] for name in amaxes]))
            device = next(iter(amaxes.values())).device
            # A copy from pinned memory does not block the host.
            given = given.pin_memory() if device.type == "cuda" else given
            torch._foreach_copy_(list(amaxes.values()), list(given.to(device, non_blocking=True).unbind()))


def amaxes_seen(amaxes: Mapping[str, Tensor]) -> Tensor:
    """Return the amaxes of this step, (layers, 3), from the gradients of `amaxes`, and clear these gradients."""
    found = torch.stack([torch.zeros_like(one) if one.grad is None else one.grad for one in amaxes.values()])
    for one in amaxes.values():
        one.grad = None
    return found
