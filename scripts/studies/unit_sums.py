"""Measure the sums of a GPU's matrix units: products against FP64 sums of the same rounded operands. Some seconds.

    python -m lockstep.scripts.studies.unit_sums           measures; writes docs/results/unit_sums.json and .md
    python -m lockstep.scripts.studies.unit_sums --page    the page alone

Operands are random: x (m, K) standard normal, or its magnitude, and y (n, K) normal, of variance 1/K.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from lockstep.core.components.precision import FORMATS
from lockstep.core.parity.measures.accumulators import ACCUMULATORS, FLIPS, FP8, FP8_FAST, Accumulator
from lockstep.scripts.studies.repository import ROOT
from lockstep.torch_backend.switches import Switches
from lockstep.torch_backend.tools.bench import device_facts, versions

FILE = ROOT / "docs/results/unit_sums.json"
# Rows, columns and K: a range of K for small products, then products of the 1.24B model at 4,096 to 32,768 tokens.
SMALL = tuple((512, 512, k) for k in (128, 256, 512, 768, 2048, 4096, 8192, 32768))
CASES = (*SMALL, (2048, 8192, 32768), (8192, 2048, 8192), (4096, 2048, 2048))


@dataclass(frozen=True)
class Product:
    """A way to make operands of a format and multiply them.

    operands: FP32 → the operands. product: (x, y, dtype of the result) → x · yᵀ. accumulator: the error law of the
    sums, or None if they round to nearest. rounded: the format of a layer's output.
    """

    operands: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    product: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    accumulator: Accumulator | None
    rounded: torch.dtype | None = None


def _cut_to_tf32(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & -(1 << 13)).view(torch.float32)


def _narrow(dtype: torch.dtype, name: str) -> Product:
    def product(x: Tensor, y: Tensor, out: torch.dtype) -> Tensor:
        return x @ y.t() if out == x.dtype else torch.mm(x, y.t(), out_dtype=out)

    return Product(lambda x, y: (x.to(dtype), y.to(dtype)), product, ACCUMULATORS[name], dtype)


def _fp8(left: torch.dtype, fast: bool) -> Product:
    def product(x: Tensor, y: Tensor, out: torch.dtype) -> Tensor:
        one = torch.ones((), device=x.device)
        found: Tensor = torch._scaled_mm(x, y.t(), one, one, out_dtype=out, use_fast_accum=fast)
        return found

    def operands(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        # Multiplied by 16, y is in the range of e4m3's normal numbers.
        return x.to(left), (16 * y).to(torch.float8_e4m3fn)

    return Product(operands, product, FP8_FAST if fast else FP8, torch.bfloat16)


def _plain(x: Tensor, y: Tensor, out: torch.dtype) -> Tensor:
    return x @ y.t()


PRODUCTS = {
    "fp16": _narrow(torch.float16, "fp16"),
    "bf16": _narrow(torch.bfloat16, "bf16"),
    "tf32": Product(lambda x, y: (_cut_to_tf32(x), _cut_to_tf32(y)), _plain, ACCUMULATORS["tf32"]),
    "e4m3 fast": _fp8(torch.float8_e4m3fn, True),
    "e4m3 full": _fp8(torch.float8_e4m3fn, False),
    "e5m2 full": _fp8(torch.float8_e5m2, False),
    "fp32": Product(lambda x, y: (x, y), _plain, None),
}


def measure(device: str, name: str, m: int, n: int, k: int, positive: bool) -> dict[str, Any]:
    """Return the relative errors of one product: norm, gain, largest element and row.

    And the share of other roundings.
    """
    kind = PRODUCTS[name]
    torch.manual_seed(0)
    x, y = torch.randn(m, k, device=device), torch.randn(n, k, device=device) / k**0.5
    Switches(name if name in FORMATS else "bf16", torch.device(device)).set()
    left, right = kind.operands(x.abs() if positive else x, y)
    due = left.double() @ right.double().t()
    apart = kind.product(left, right, torch.float32).double() - due
    found = {
        "noise": (apart.norm() / due.norm()).item(),
        "gain": ((apart * due).sum() / (due * due).sum()).item(),
        "worst": (apart.abs().max() / due.abs().max()).item(),
        "row": (apart.norm(dim=1).max() / due.norm(dim=1).max()).item(),
    }
    if kind.rounded is not None:
        low = kind.product(left, right, kind.rounded)
        found["unequal"] = (low != due.to(kind.rounded)).double().mean().item()
    return {"format": name, "m": m, "n": n, "k": k, "positive": positive, **found}


def reading(device: str) -> dict[str, float]:
    """Return how TF32's units read FP32 operands: the shares that are truncated and rounded to nearest.

    Numbers whose truncated and nearest values are equal are left out.
    """
    torch.manual_seed(0)
    Switches("tf32", torch.device(device)).set()
    x = torch.randn(4096, 128, device=device)
    cut = _cut_to_tf32(x)
    nearest = _cut_to_tf32((x.view(torch.int32) + (1 << 12)).view(torch.float32))
    found = PRODUCTS["tf32"].product(x, torch.eye(128, device=device), torch.float32)
    tells = cut != nearest
    shares = {"cut": (found == cut)[tells], "nearest": (found == nearest)[tells]}
    return {name: share.double().mean().item() for name, share in shares.items()}


def rows(device: str) -> Iterator[dict[str, Any]]:
    """Measure every case in every format, and the small ones also with |x| instead of x."""
    for m, n, k in CASES:
        for positive in (False, True) if (m, n, k) in SMALL else (False,):
            for name in PRODUCTS:
                yield measure(device, name, m, n, k, positive)


def page(results: dict[str, Any]) -> str:
    """Return docs/results/unit_sums.md."""
    device, made = results["device"], results["versions"]
    lines = [
        "# How a GPU's matrix units sum",
        "",
        "Made from [unit_sums.json](unit_sums.json) by `python -m lockstep.scripts.studies.unit_sums`. Measured on one",
        f"{device['name']}, driver {device['driver']}: {', '.join(f'{k} {v}' for k, v in made.items())}.",
        "",
        "Each product x·yᵀ of K terms is compared with the FP64 sum of the same rounded operands, so no rounding of an",
        "operand is in it. **Error**: ‖c − e‖ / ‖e‖ of the FP32 result. **Law**: the largest error that checks allow",
        "(core/parity/measures/accumulators.py). **Gain**: the part of the error along the product. It is negative,",
        "because tensor cores drop the bits below a sum's last one. **Otherwise**: elements that are rounded to "
        "another",
        "number of the output's format than the FP64 sum. `fast` is FP8's fast accumulation; `full` moves sums to",
        "FP32 after 128 products.",
        "",
        "| format | product | error | law | error / law | gain | otherwise | law |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results["sums"]:
        if row["positive"]:
            continue
        kind = PRODUCTS[row["format"]]
        law = kind.accumulator.error(row["k"]) if kind.accumulator else 0.0
        share, most = row.get("unequal"), ""
        if share is not None and law and kind.rounded is not None:
            roundoff = torch.finfo(kind.rounded).eps / 2
            most = f"{100 * min(1.0, FLIPS * law / roundoff):.2g} %"
        lines.append(
            f"| {row['format']} | [{row['m']}, K] · [{row['n']}, K], K = {row['k']:,} | {row['noise']:.1e} | "
            + (f"{law:.1e} | {row['noise'] / law:.2f}" if law else " | ")
            + f" | {row['gain']:+.1e} | {'' if share is None else f'{100 * share:.2g} %'} | {most} |"
        )
    same = [row for row in results["sums"] if row["positive"]]
    if "tf32_reads" in results:
        cut, nearest = (f"{100 * results['tf32_reads'][name]:.3g} %" for name in ("cut", "nearest"))
        lines += [
            "",
            f"FP32 operands of TF32's products: {cut} are cut to ten bits, {nearest} are rounded to the nearest.",
        ]
    lines += ["", f"{len(same)} products with |x| in the place of x keep the same laws; they stand in the JSON."]
    return "\n".join([*lines, ""])


@dataclass(frozen=True)
class Arguments:
    """Choose the file. page: measure nothing, write the page alone."""

    json: Path = FILE
    page: bool = False


def main(arguments: Arguments) -> None:
    """Measure on the GPU, and write the page beside the file. Raises SystemExit without a GPU."""
    if not arguments.page:
        if not torch.cuda.is_available():
            raise SystemExit("torch finds no CUDA device; --page writes the page from the recorded measurements")
        found = {
            "device": device_facts(),
            "versions": versions(),
            "tf32_reads": reading("cuda"),
            "sums": list(rows("cuda")),
        }
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    results = json.loads(arguments.json.read_text(encoding="utf-8"))
    arguments.json.with_suffix(".md").write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
