"""Resolve `auto` on the CPU: the attention kernel, the AdamW and the library of products with FP32 results.

The values depend on the run's configuration, the kernel and the library also on the machine. Both backends, the
plan and run.json resolve `auto` here, so that twin, estimate and record match the kernel that runs.

The attention kernel is `flash_brgemm` for operands without a mask, if there is a C++ compiler to build it: bf16 on x86
processors with bf16 instructions, and on those where torch has only plain loops for bf16; FP32 on those that are not
made by Intel, because torch's kernel takes its products from MKL, which is slow for such blocks on them (measured with
AVX-512 and without: docs/results/cpu_auto.md). Otherwise it is `math`, which stores the scores (S, S) of every head, if
both conditions hold, else `flash` (measured: docs/guide/levers.md):

- speed: operands are bf16 or FP16, and sequences are shorter than SHORT tokens. For such sequences torch's flash kernel
  processes 32 queries at a time (`flash_attention_backward_kernel_impl`), and is slower than whole products. On x86
  without AVX-512 it is slower at every length: its bf16 products are plain loops, those of `math` are in FP32
  (docs/results/narrow_products.md). In FP32 and FP64 it is never slower.
- memory: sequences are at most WIDTHS head dimensions long. For each token a layer then keeps 4·heads·S bytes of
  scores, at most WIDTHS hidden vectors in FP32 (4·heads·head_dim bytes each).

Neither condition depends on the micro-batch, so its size changes only the memory.

AdamW is torch's fused kernel if torch has one.

FP32 products use oneDNN on x86 processors with AVX-512 that are not made by Intel, because MKL uses only AVX2 on them:
its block product, if there is a C++ compiler to build Lockstep's loops around it, else its product of whole matrices.
They use BLAS on other processors (measured on AMD's and Intel's: docs/guide/levers.md).

Products of bf16 operands with an FP32 result, those of the head, use oneDNN's block product on x86 processors with bf16
instructions, if there is a C++ compiler; else they are computed from FP32 copies of the operands.

A trainer that is not Lockstep's and calls torch's attention runs `flash` on every CPU (`with_kernel_of_torch`).

On CUDA `auto` stays for attention: torch's call takes the first kernel that can run (torch_backend/attention.py).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lockstep.core.components.attention_kernels import ATTENTION_KERNELS, AUTO
from lockstep.core.components.precision import FORMATS
from lockstep.core.config.schema import RunConfig, Section

SHORT, WIDTHS = 192, 4
# oneDNN's avx512_core; torch hands bf16 products to oneDNN from there on (torch_backend/precision.py, BF16_BY_ONEDNN).
AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
# x86 instructions that multiply pairs of bf16 numbers and add to FP32 sums.
BF16_INSTRUCTIONS = {"avx512_bf16", "amx_bf16"}
NARROW = tuple(name for name, found in FORMATS.items() if found.bytes == 2)
# The key of run.json for the value of `auto` on the CPU.
ON_CPU = "auto_on_cpu"
KERNEL = "attention.kernel"
# The kernel that runs on the CPU alone, by block products.
BLOCKS = next(kernel.name for kernel in ATTENTION_KERNELS.values() if kernel.only_cpu)
# The key of the library of FP32 products in a compiled program, which was BLAS before run.json recorded it.
PRODUCTS, COMPILED_PRODUCTS = "precision.cpu_products", "precision.cpu_products, compiled"
# The meaning of `auto` in runs from before run.json recorded it.
BEFORE: Mapping[str, Any] = {
    KERNEL: "flash",
    "optim.fused": False,
    PRODUCTS: "onednn",
    COMPILED_PRODUCTS: "blas",
}


def on_cpu(config: RunConfig) -> dict[str, Any]:
    """Return the values of `auto` on this CPU by dotted key: attention kernel, fused AdamW, libraries of products."""
    return {
        KERNEL: BLOCKS if _builds_attention(config) and _attends_faster(config) else _other_kernel(config),
        "optim.fused": True,
        PRODUCTS: _library(config),
        COMPILED_PRODUCTS: _library(config),
    }


def _attends_by_blocks(config: RunConfig) -> bool:
    """Return whether the block product can attend: bf16 or FP32, heads of an even width, no mask, no cap."""
    model, masked = config.model, config.attention.document_mask or config.model.window > 0
    of_operands = config.precision.operand in ATTENTION_KERNELS[BLOCKS].operands
    return of_operands and not masked and not model.attention_cap and model.head_dim % 2 == 0


def _other_kernel(config: RunConfig) -> str:
    """Return the kernel of torch's call: `math` or `flash`."""
    length = config.train.longest
    small = length <= WIDTHS * config.model.head_dim
    slow_flash = length < SHORT or not multiplies_bf16()
    written_out = config.precision.operand in NARROW and slow_flash and small
    # Only `math` supports capped scores.
    return "math" if written_out or config.model.attention_cap else "flash"


def _library(config: RunConfig) -> str:
    builds = _builds(config)
    if config.precision.operand in NARROW:
        return "brgemm" if builds else "blas"
    if not _mkl_is_slow():
        return "blas"
    return "brgemm" if builds else "onednn"


def _attends_faster(config: RunConfig) -> bool:
    """Return whether attention by block products is faster than torch's on this machine."""
    if config.precision.operand in NARROW:
        return builds_bf16_products() or not multiplies_bf16()
    return _is_not_intels()


def _mkl_is_slow() -> bool:
    """Return whether this x86 processor has AVX-512, and MKL uses no more than AVX2 on it."""
    return has_avx512() and _is_not_intels()


def _is_not_intels() -> bool:
    """Return whether this is an x86 processor that Intel did not make."""
    return vendor() not in ("", "GenuineIntel")


def _builds(config: RunConfig) -> bool:
    """Return whether this machine has block products of a run's operands."""
    operand = FORMATS[config.precision.operand]
    return operand.by_blocks and (builds_bf16_products() if operand.name in NARROW else has_cpp_compiler())


def _builds_attention(config: RunConfig) -> bool:
    """Return whether this machine can attend by block products. Without those of bf16 it takes those of FP32."""
    return _attends_by_blocks(config) and has_cpp_compiler() and bool(vendor())


def vendor() -> str:
    """Return the x86 processor's vendor as Linux reports it, for example "AuthenticAMD"; "" elsewhere."""
    return _reported("vendor_id")


def has_avx512() -> bool:
    """Return whether this x86 processor has the AVX-512 instructions that oneDNN uses, as Linux reports them."""
    return set(_reported("flags").split()) >= AVX512


def multiplies_bf16() -> bool:
    """Return whether torch has fast bf16 products on this processor, as Linux reports its instructions.

    On x86 it has them with AVX-512, and with AVX2's later instructions for bf16. Elsewhere the answer is True.
    """
    flags = _reported("flags").split()
    return not flags or has_avx512() or "avx_ne_convert" in flags


def builds_bf16_products() -> bool:
    """Return whether this x86 processor has bf16 instructions, and this machine the C++ compiler that torch calls."""
    return not BF16_INSTRUCTIONS.isdisjoint(_reported("flags").split()) and has_cpp_compiler()


def has_cpp_compiler() -> bool:
    """Return whether this machine has the C++ compiler that torch calls."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


@cache
def _reported(key: str) -> str:
    """Return the value of a key of /proc/cpuinfo, of the first processor; "" without such a key."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(rf"^{key}\s*:\s*(.*)", text, re.MULTILINE)
    return found[1].strip() if found else ""


def settled(config: RunConfig, device: str, chosen: Mapping[str, Any] | None = None) -> RunConfig:
    """Replace `auto` by its values on this device, which also becomes the configuration's device if that is `auto`.

    On other devices than the CPU, only oneDNN's products and its attention change.

    A library or a kernel that does not serve the device or the policy becomes `auto` again: a configuration that was
    resolved on the CPU may be opened with others (`replay --device cuda`).

    chosen: the values that run.json recorded, used instead of those of `on_cpu`; missing keys have the value of
    `BEFORE`. For a block product that this machine lacks, copies stand, and a kernel of torch's.
    """
    if config.device == "auto" != device:
        # Without a device, products of the CPU are refused when the configuration is read again.
        config = config.model_copy(update={"device": device})
    operand = FORMATS[config.precision.operand]
    serves = {"onednn": device == "cpu", "brgemm": device == "cpu" and operand.by_blocks}
    if not serves.get(config.precision.cpu_products, True):
        config = _with_products(config, "auto")
    if config.attention.chosen.only_cpu and (device != "cpu" or not _attends_by_blocks(config)):
        config = _with_kernel(config, AUTO.name)
    if device != "cpu":
        return config
    chosen = on_cpu(config) if chosen is None else {**BEFORE, **chosen}
    changes: dict[str, Section] = {}
    if config.attention.chosen is AUTO:
        kernel = chosen[KERNEL]
        if ATTENTION_KERNELS[kernel].only_cpu and not _builds_attention(config):
            # The run is of another machine, or this is a branch of it with other operands.
            kernel = _other_kernel(config)
        changes["attention"] = config.attention.model_copy(update={"kernel": kernel})
    if config.optim.fused == "auto" and (config.optim.chosen.fused or config.precision.exact):
        changes["optim"] = config.optim.model_copy(update={"fused": chosen["optim.fused"]})
    config = config.model_copy(update=changes) if changes else config
    if not operand.by_blocks or config.precision.cpu_products != "auto":
        return config
    narrow = operand.name in NARROW
    of_fp32_program = COMPILED_PRODUCTS if config.compile.enabled else PRODUCTS
    library = chosen[PRODUCTS if narrow else of_fp32_program]
    if narrow and not (library == "brgemm" and _builds(config)):
        # Copies: the run is of another machine, or from before the block product, when it recorded a library of FP32
        # operands. With `auto` left here, a session would choose by its own machine.
        library = "blas"
    if library == "brgemm" and not _builds(config):
        # The run is of another machine.
        library = _library(config)
    return _with_products(config, library)


def with_kernel_of_torch(config: RunConfig, device: str) -> RunConfig:
    """Replace `auto` of the attention kernel on the CPU by the kernel of torch's own call: `flash`.

    For trainers that call `scaled_dot_product_attention` without a choice of kernels. It has no cap of scores: for
    these, and on other devices, `auto` stays.
    """
    if config.attention.chosen is not AUTO or device != "cpu" or config.model.attention_cap:
        return config
    return _with_kernel(config, "flash")


def moved(config: RunConfig) -> RunConfig:
    """Return a settled configuration of another machine, with `auto` for block products if this one lacks them."""
    if config.attention.chosen.only_cpu and not _builds_attention(config):
        config = _with_kernel(config, AUTO.name)
    lacks_products = config.precision.cpu_products == "brgemm" and not _builds(config)
    return _with_products(config, "auto") if lacks_products else config


def _with_kernel(config: RunConfig, kernel: str) -> RunConfig:
    return config.model_copy(update={"attention": config.attention.model_copy(update={"kernel": kernel})})


def _with_products(config: RunConfig, products: str) -> RunConfig:
    return config.model_copy(update={"precision": config.precision.model_copy(update={"cpu_products": products})})
