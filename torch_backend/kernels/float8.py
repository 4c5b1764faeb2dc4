"""Linear layers in FP8 through torchao, emulated where there is no FP8 hardware. Twin: jax_backend/kernels/float8.py.

A scale maps the largest magnitude of its group to the format's largest number. Tensorwise (one scale a tensor): inputs
and weights in e4m3, gradients in e5m2. Rowwise (one scale a row of the left operand and a column of the right one, cut
down to a power of two): e4m3 throughout. Weights are cast from FP32, all else from bf16; outputs are bf16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.config.schema import PrecisionConfig, RunConfig
from lockstep.core.errors import UserError
from lockstep.core.model.names import fp8_modules
from lockstep.torch_backend.tools.import_logging import quiet_import

# The first GPU generation with FP8 tensor cores is Ada; Hopper is (9, 0).
FIRST_CAPABILITY = (8, 9)
# cuBLAS takes FP8 matrices whose sides are multiples of this.
ALIGNMENT = 16


@dataclass(frozen=True)
class Float8:
    """Hold torchao's form of the recipe. config: Float8LinearConfig; products: its LinearMMConfig."""

    config: Any
    products: Any

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """X (…, in) in bf16, weight (out, in) in FP32 → (…, out) in bf16."""
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        out: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), self.products, self.config)
        return out


def float8(precision: PrecisionConfig, device: torch.device) -> Float8 | None:
    """The recipe of the run, None without FP8. Raises UserError if this GPU or installation cannot do it."""
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
        Float8LinearConfig.from_recipe_name(precision.fp8),
        gemm_config_output=Float8GemmConfig(use_fast_accum=precision.fp8_fast_accumulation),
        emulate=not on_cuda,
    )
    # The public door: it converts modules, and repairs Inductor where torchao has to.
    with torch.device("meta"):
        made: Any = convert_to_float8_training(nn.Linear(ALIGNMENT, ALIGNMENT, bias=False), config=config)
    return Float8(made.config, made.linear_mm_config)


def apply_float8(model: nn.Module, run: RunConfig, recipe: Float8 | None) -> None:
    """Make the products of the linear layers that the run chooses (`precision.fp8_layers`) in FP8."""
    modules: dict[str, Any] = dict(model.named_modules())
    for name in fp8_modules(run):
        modules[name].float8 = recipe
