"""Resolve `auto` on the CPU: the attention kernel, the AdamW and the library of FP32 products.

The values depend on the run's configuration, the library also on the processor's vendor. Both backends, the plan and
run.json resolve `auto` here, so that twin, estimate and record match the kernel that runs.

The attention kernel is `math`, which stores the scores (S, S) of every head, if both conditions hold, else `flash`
(measured: docs/guide/levers.md):

- speed: operands are bf16 or FP16, and sequences are shorter than SHORT tokens. For such sequences torch's flash kernel
  processes 32 queries at a time (`flash_attention_backward_kernel_impl`), and is slower than whole products. In FP32
  and FP64 it is never slower.
- memory: sequences are at most WIDTHS head dimensions long. For each token a layer then keeps 4·heads·S bytes of
  scores, at most WIDTHS hidden vectors in FP32 (4·heads·head_dim bytes each).

Neither condition depends on the micro-batch, so its size changes only the memory.

AdamW is torch's fused kernel if torch has one.

Eager FP32 products use oneDNN on x86 processors that are not made by Intel, because MKL uses only AVX2 on them, and
BLAS on others (measured on AMD's and Intel's: docs/guide/levers.md).

On CUDA `auto` stays for attention: torch's call takes the first kernel that can run (torch_backend/attention.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lockstep.core.components.attention_kernels import AUTO
from lockstep.core.components.precision import FORMATS
from lockstep.core.config.schema import RunConfig, Section

SHORT, WIDTHS = 192, 4
NARROW = tuple(name for name, found in FORMATS.items() if found.bytes == 2)
# The key of run.json for the value of `auto` on the CPU.
ON_CPU = "auto_on_cpu"
# The meaning of `auto` in runs from before run.json recorded it.
BEFORE: Mapping[str, Any] = {"attention.kernel": "flash", "optim.fused": False, "precision.cpu_products": "onednn"}


def on_cpu(config: RunConfig) -> dict[str, Any]:
    """Return the values of `auto` on this CPU by dotted key: the attention kernel, fused AdamW, "onednn" or "blas"."""
    length = config.train.longest
    small = length <= WIDTHS * config.model.head_dim
    written_out = config.precision.operand in NARROW and length < SHORT and small
    return {
        # Only `math` supports capped scores.
        "attention.kernel": "math" if written_out or config.model.attention_cap else "flash",
        "optim.fused": True,
        "precision.cpu_products": "blas" if vendor() in ("", "GenuineIntel") else "onednn",
    }


@cache
def vendor() -> str:
    """Return the x86 processor's vendor as Linux reports it, for example "AuthenticAMD"; "" elsewhere."""
    try:
        found = re.search(r"^vendor_id\s*:\s*(\S+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return ""
    return found[1] if found else ""


def settled(config: RunConfig, device: str, chosen: Mapping[str, Any] | None = None) -> RunConfig:
    """Replace `auto` by its values on this device. On other devices than the CPU, only oneDNN's products change.

    Other devices and compiled programs have no oneDNN products, so there the setting becomes `auto` again: a
    configuration that was resolved on the CPU may be opened on them (`replay --device cuda`).

    chosen: the values that run.json recorded, used instead of those of `on_cpu`; missing keys have the value of
    `BEFORE`.
    """
    products, eager = config.precision.cpu_products, device == "cpu" and not config.compile.enabled
    if products == "onednn" and not eager:
        config = _with_products(config, "auto")
    if device != "cpu":
        return config
    chosen = on_cpu(config) if chosen is None else {**BEFORE, **chosen}
    changes: dict[str, Section] = {}
    if config.attention.chosen is AUTO:
        changes["attention"] = config.attention.model_copy(update={"kernel": chosen["attention.kernel"]})
    if config.optim.fused == "auto" and (config.optim.chosen.fused or config.precision.exact):
        changes["optim"] = config.optim.model_copy(update={"fused": chosen["optim.fused"]})
    config = config.model_copy(update=changes) if changes else config
    in_fp32 = FORMATS[config.precision.operand].bytes == 4
    if products == "auto" and in_fp32 and eager:
        config = _with_products(config, chosen["precision.cpu_products"])
    return config


def _with_products(config: RunConfig, products: str) -> RunConfig:
    return config.model_copy(update={"precision": config.precision.model_copy(update={"cpu_products": products})})
