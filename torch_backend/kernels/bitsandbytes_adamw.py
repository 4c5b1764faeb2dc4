"""AdamW8bit of bitsandbytes, an optional library, and its state. Twin: jax_backend/kernels/bitsandbytes_adamw.py.

The twin's file has the formulas. Tensors of 4,096 elements or more have moments in 8-bit codes, in blocks of 256 with
one FP32 scale each; the last block of a tensor may be shorter. Smaller tensors have FP32 moments. The library is
imported only for a run that uses it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.core.components.optimizers import BLOCK, LEAST_IN_EIGHT_BITS
from lockstep.core.config.schema import OptimConfig
from lockstep.core.errors import UserError
from lockstep.torch_backend.tools.import_logging import quiet_import

# The library's suffixes for the two moments, and its names for the tables from codes to values.
STATES = {"exp_avg": "1", "exp_avg_sq": "2"}
MAPS = {"exp_avg": "dynamic", "exp_avg_sq": "udynamic"}


def by_bitsandbytes(optim: OptimConfig) -> bool:
    """Return whether the run selects 8-bit moments by bitsandbytes; the fp64 policy has FP64 moments in any case."""
    return optim.chosen.eight_bit and optim.eight_bit == "bitsandbytes"


def check_bitsandbytes(optim: OptimConfig) -> None:
    """Raise UserError, in one line, if the run uses the library and it is not installed."""
    if by_bitsandbytes(optim) and find_spec("bitsandbytes") is None:
        raise UserError("optim.eight_bit = 'bitsandbytes' needs bitsandbytes: pip install 'lockstep[bitsandbytes]'")


def bitsandbytes_adamw(optim: OptimConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build the library's optimizer; each group has its own weight decay."""
    with quiet_import():
        from bitsandbytes.optim.adamw import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(
        groups,
        lr=optim.peak_lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=0.0,
        amsgrad=False,
        min_8bit_size=LEAST_IN_EIGHT_BITS,
        is_paged=False,
    )
    return optimizer


def read_moment(entry: Mapping[str, Any], kind: str) -> Tensor:
    """Return a moment from one parameter's state, decoded to FP32, in the parameter's shape."""
    number = STATES[kind]
    codes: Tensor = entry[f"state{number}"]
    if codes.dtype == torch.float32:
        return codes
    scale = entry[f"absmax{number}"].repeat_interleave(BLOCK)[: codes.numel()]
    values: Tensor = entry[f"qmap{number}"][codes.int()] * scale.view(codes.shape)
    # For a block of zeros, the library stores the code of −0.993 and the scale 0. Their product is −0; + 0.0 gives 0.
    return values + 0.0


def written_moment(optimizer: Any, value: Tensor, kind: str, quantised: bool) -> dict[str, Tensor]:
    """Encode `value`, FP32, as entries of a parameter's state; values that were decoded from codes stay exact."""
    number = STATES[kind]
    if not quantised:
        return {f"state{number}": value}
    levels = optimizer.name2qmap[MAPS[kind]] = optimizer.name2qmap[MAPS[kind]].to(value.device)
    codes, scale = in_codes(value, levels)
    return {f"state{number}": codes, f"qmap{number}": levels, f"absmax{number}": scale}


def in_codes(value: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Encode `value`, FP32, as codes (uint8, the shape of `value`) and scales (FP32, (blocks,)).

    The scale is found as for torchao (torch_backend/optim.py, `eight_bits`): the largest magnitude of a block, or that
    magnitude / 0.993 if the code 0 (−0.993) encodes it. The CPU's quantiser alone would not reproduce such a block, nor
    a 0 that torchao or CUDA encoded. If no scale reproduces a block, the quantiser's codes are kept.
    """
    codes, scale = torch.ops.bitsandbytes.quantize_blockwise(value, levels, BLOCK)
    blocks = F.pad(value.flatten(), (0, -value.numel() % BLOCK)).view(-1, BLOCK)
    by_block = F.pad(codes.flatten(), (0, -value.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    stretched = largest / levels[0].abs()
    up, down = (stretched.nextafter(torch.full_like(stretched, end)) for end in (math.inf, 0.0))
    done = largest == 0
    for tried in (largest, stretched, up, down):
        nearest = torch.bucketize(blocks / tried[:, None], (levels[1:] + levels[:-1]) / 2)
        exact = (levels[nearest] * tried[:, None] == blocks).all(1) & ~done
        by_block = torch.where(exact[:, None], nearest.to(torch.uint8), by_block)
        scale, done = torch.where(exact, tried, scale), done | exact
    return by_block.flatten()[: value.numel()].view(value.shape), scale
