"""Watch torchtitan's Trainer on the CPU. Each rank runs this program.

Its arguments are the rank, the number of ranks, a folder, and cases. It prints the results of this rank's checks by
case. torchtitan assumes CUDA even on a machine without it, so `set_device` runs before the rest of it is imported.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask


def flexible(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, **_: Any) -> tuple[Tensor, None]:
    """Compute attention by plain operations, since FlexAttention has no backward pass on the CPU."""
    mask = create_mask(block_mask.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device="cpu")
    scores = (q @ k.transpose(-1, -2)).float() / q.shape[-1] ** 0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype) @ v, None


def set_device() -> None:
    """Set torchtitan's device to the CPU."""
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", torch.cpu
    from torchtitan.components import metrics

    nothing = SimpleNamespace(**dict.fromkeys(metrics.DeviceMemStats._fields, 0))
    monitor = SimpleNamespace(
        device_name="CPU", get_peak_stats=lambda: nothing, reset_peak_stats=lambda: None, device_capacity_gib=1
    )
    setattr(metrics, "build_device_memory_monitor", lambda: monitor)  # noqa: B010 - a function of the module
    from torchtitan.distributed import utils as of_ranks

    setattr(of_ranks, "set_pg_timeouts", lambda **_: None)  # noqa: B010 - the same


def main(number: str, size: str, folder: str, *names: str) -> None:
    """Train the cases as rank `number` of `size` ranks, and print their results as JSON."""
    os.environ |= {"LOCAL_RANK": number, "RANK": number, "WORLD_SIZE": size}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(number), world_size=int(size))
    set_device()
    from torchtitan.models.common.attention import FlexAttention

    from lockstep.parity_tests.watch.adapters.titan import CASES, told, train

    FlexAttention._compiled_flex_attn = flexible
    found: dict[str, Any] = {name: told(train(Path(folder), **CASES[name])) for name in names or CASES}
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
