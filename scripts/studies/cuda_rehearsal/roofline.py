"""Estimate the seconds of a logged step from a roofline: its kernels' bytes and its products' FLOPs at stated rates.

    block products, head products    FLOPs of each product at its format's rate, or its bytes at the bandwidth
    cross-entropy                    bytes of the generated kernels over a chunk's logits, which each pass reads again:
                                     132 rows of 0.5 MB exceed the caches; or by formula those of the head's own kernel
    Triton kernels                   bytes of the other generated kernels, as Inductor counts them
    attention                        3.5 forward passes at its kernel's share of the peak (core/plan/seconds.py)
    rest                             fills and copies on the device as logged; by formula the work of torch's own
                                     kernels outside the program: gradients added over micro-batches, clipping, the
                                     optimizer

Not counted: launches, gaps, kernels that are neither generated nor named here, and arithmetic outside products, such as
the cross-entropy's exponentials in FP64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lockstep.core.config.schema import RunConfig
from lockstep.core.model.budget import optimizer_bytes, parameter_count
from lockstep.core.plan import GPUS
from lockstep.core.plan.seconds import seconds

# FLOP/s and bytes/s that large products and simple kernels reach on an H100 SXM: below the 794 and 1,403 TFLOP/s of the
# MAMF table (core/plan/gpus.py), and 90 % of 3.35 TB/s.
RATES = {"bf16": 700e12, "fp16": 700e12, "fp8_e4m3": 1200e12, "fp8_e5m2": 1200e12}
BANDWIDTH = 3.0e12
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
# Target seconds of a step at [64, 2048], by policy.
GOALS = {"bf16": 1.80, "fp8_tensorwise": 1.55, "fp8_delayed": 1.55}
# Hand-written kernels (torch_backend/kernels/one_kernel_triton.py): how often each reads a chunk's logits. Each writes
# one gradient.
READINGS = {"one_kernel_held": 1, "one_kernel_again": 2}
ITEMS = ("block products", "head products", "Triton kernels", "cross-entropy", "attention", "rest")


def roofline(line: Mapping[str, Any], config: RunConfig) -> dict[str, float]:
    """Return seconds by ITEMS of a line's step. Raises KeyError for products in a format without a rate."""
    vocabulary = config.model.vocab_size
    logits = _rounded_up(config.loss.chunk) * _rounded_up(vocabulary)
    read = BYTES[config.precision.operand if config.precision.plan.rounds("logits") else config.precision.stream]
    found = dict.fromkeys(ITEMS, 0.0)
    for product in line["products"]:
        head = vocabulary in (product["m"], product["n"], product["k"])
        found["head products" if head else "block products"] += product["calls"] * product_seconds(product)
    for kernel in line["generated"]:
        over_logits = kernel["elements"] == logits
        again = (kernel["passes"] - 1) * logits * read if over_logits else 0.0
        item = "cross-entropy" if over_logits else "Triton kernels"
        found[item] += kernel["launches"] * (kernel["gb"] * 1e9 + again) / BANDWIDTH
    logits_once = config.loss.chunk * vocabulary
    for name, readings in READINGS.items():
        moved = logits_once * (readings * read + BYTES[config.precision.operand])
        found["cross-entropy"] += line["triton"].get(name, 0) * moved / BANDWIDTH
    timed = seconds(config, replace(GPUS["h100"], in_a_step={}))
    assert timed is not None
    found["attention"] = timed.attention
    rest = line["copies"]["memset"][1] + 2 * line["copies"]["d2d"][1] + outside_the_program(config)
    found["rest"] = rest / BANDWIDTH
    return found


def product_seconds(product: Mapping[str, Any]) -> float:
    """Return seconds of one call: FLOPs at its first operand's rate, or operands and result at the bandwidth."""
    m, n, k, batch = (product[name] for name in ("m", "n", "k", "batch"))
    sizes = {"a": m * k, "b": k * n, "c": m * n * (2 if product["adds"] else 1)}
    moved = batch * sum(size * BYTES[product[name]] for name, size in sizes.items())
    return max(2.0 * m * n * k * batch / RATES[product["a"]], moved / BANDWIDTH)


def outside_the_program(config: RunConfig) -> float:
    """Return bytes of FP32 gradients added over micro-batches (3 passes) and clipped, and of the optimizer."""
    gradients = 4.0 * parameter_count(config.model)
    return 3 * gradients * (config.train.accumulation - 1) + 3 * gradients + optimizer_bytes(config)


def without_bytes(line: Mapping[str, Any]) -> dict[str, int]:
    """Count launches of Triton kernels of unknown bytes: templates, and those that Inductor did not generate."""
    found: dict[str, int] = {}
    for kernel in line["generated"]:
        if not kernel["gb"]:
            found[kernel["name"]] = found.get(kernel["name"], 0) + kernel["launches"]
    known = {kernel["name"] for kernel in line["generated"]} | READINGS.keys()
    return found | {name: launches for name, launches in line["triton"].items() if name not in known}


def _rounded_up(size: int) -> int:
    return 1 << (size - 1).bit_length()
