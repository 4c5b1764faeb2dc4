"""Compare torch's own kernels with plain functions by `assert_honest`, forward and backward.

    python -m lockstep.scripts.studies.honest_kernels                  docs/results/honest_kernels.jsonl and .md
    python -m lockstep.scripts.studies.honest_kernels --device cuda    the lines of a GPU, beside the CPU's
    python -m lockstep.scripts.studies.honest_kernels --page           the page alone

A plain function computes in FP32 and rounds once, so a kernel that keeps its sums in bf16 differs from it.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import tyro
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lockstep import NotHonest, assert_honest
from lockstep.core.files.jsonl import JsonLines, read_lines
from lockstep.core.parity.honest.judged import Judged
from lockstep.scripts.studies.repository import ROOT

LINES, PAGE = ROOT / "docs/results/honest_kernels.jsonl", ROOT / "docs/results/honest_kernels.md"
DTYPES = ("bf16", "fp16", "fp32")
ROWS, WIDTH, WORDS = 8192, 64, 256
SEQUENCE, HEADS = 256, 4
PICTURES = 256
BACKENDS = (
    SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION,
)  # fmt: skip
# Compiled kernels, by the function from which torch compiles them.
COMPILED = "compiled"


def widened(x: Tensor) -> Tensor:
    """Return x in FP32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Normalise rows; one rounding."""
    rows = widened(x)
    rows = rows - rows.mean(-1, keepdim=True)
    rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5)
    return (rows * widened(weight) + widened(bias)).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Divide rows by their root mean square; one rounding."""
    rows = widened(x)
    return (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5) * widened(weight)).to(x.dtype)


def softmax(x: Tensor) -> Tensor:
    """Return the softmax of rows; one rounding."""
    powers = (widened(x) - widened(x).amax(-1, keepdim=True)).exp()
    return (powers / powers.sum(-1, keepdim=True)).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """Return GELU by erf; one rounding."""
    return (widened(x) * (1 + torch.erf(widened(x) / 2**0.5)) / 2).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """Return SiLU; one rounding."""
    return (widened(x) / (1 + torch.exp(-widened(x)))).to(x.dtype)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of rows; one rounding."""
    wide = widened(logits)
    losses = torch.logsumexp(wide, -1) - wide.gather(-1, targets[:, None])[:, 0]
    return losses.mean().to(logits.dtype)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Select rows by a product with one-hot rows; its gradient is a product too."""
    return (F.one_hot(ids, len(table)).to(widened(table).dtype) @ widened(table)).to(table.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Multiply and add; one rounding."""
    return (widened(x) @ widened(weight).T + widened(bias)).to(x.dtype)


def convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve with windows of three; one rounding."""
    windows = F.unfold(widened(x), 3, padding=1)
    return (widened(weight).flatten(1) @ windows).unflatten(-1, x.shape[-2:]).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to the past: scores and products in FP32; one rounding."""
    scores = widened(q) @ widened(k).transpose(-1, -2) / q.shape[-1] ** 0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (torch.softmax(scores.masked_fill(mask, -torch.inf), -1) @ widened(v)).to(q.dtype)


def attention_in_steps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to the past as flash attention declares it: probabilities are rounded before the second product."""
    scores = widened(q) @ widened(k).transpose(-1, -2) / q.shape[-1] ** 0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    weights = torch.softmax(scores.masked_fill(mask, -torch.inf), -1).to(q.dtype)
    return (widened(weights) @ widened(v)).to(q.dtype)


def by(backend: SDPBackend) -> Callable[..., Tensor]:
    """Return torch's attention to the past by one of its kernels."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # FP64 is the truth's dtype, and no fused kernel supports it.
        with nullcontext() if q.dtype == torch.float64 else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


@dataclass(frozen=True)
class Kernel:
    """A function of torch's, an equivalent plain function, and its inputs. devices: where the function exists."""

    name: str
    mine: Callable[..., Any]
    plain: Callable[..., Any]
    inputs: Callable[[], Sequence[Tensor]]
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = DTYPES


def _rows(*more: int) -> Callable[[], list[Tensor]]:
    return lambda: [torch.randn(ROWS, WIDTH), *(torch.randn(WIDTH) for _ in more)]


def _heads() -> list[Tensor]:
    return [torch.randn(2, HEADS, SEQUENCE, WIDTH) for _ in range(3)]


def _words() -> Tensor:
    """Return ids of which word k is 1/k times as frequent as the first."""
    return torch.multinomial(1 / torch.arange(1.0, WORDS + 1), ROWS, replacement=True)


def kernels() -> Iterator[Kernel]:
    """Name the kernels."""
    yield Kernel("F.layer_norm", lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), layer_norm, _rows(1, 2))
    yield Kernel("F.rms_norm", lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-5), rms_norm, _rows(1))
    yield Kernel("F.softmax", lambda x: F.softmax(x, -1), softmax, _rows())
    yield Kernel("F.gelu", F.gelu, gelu, _rows())
    yield Kernel("F.silu", F.silu, silu, _rows())
    yield Kernel(
        "F.cross_entropy", F.cross_entropy, cross_entropy,
        lambda: [torch.randn(ROWS, WORDS), torch.randint(WORDS, (ROWS,))],
    )  # fmt: skip
    yield Kernel("F.embedding", F.embedding, embedding, lambda: [_words(), torch.randn(WORDS, WIDTH)])
    yield Kernel(
        "F.linear", F.linear, linear, lambda: [torch.randn(ROWS, WIDTH), torch.randn(96, WIDTH), torch.randn(96)]
    )
    yield Kernel(
        "F.conv2d", lambda x, weight: F.conv2d(x, weight, padding=1), convolution,
        lambda: [torch.randn(PICTURES, 3, 16, 16), torch.randn(8, 3, 3, 3)],
    )  # fmt: skip
    for backend in BACKENDS:
        there = ("cpu", "cuda") if backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION) else ("cuda",)
        word = backend.name.removesuffix("_ATTENTION").lower()
        # On CUDA, flash and cuDNN do not support FP32.
        dtypes = DTYPES if word in ("math", "efficient") else DTYPES[:2]
        for plain, told in ((attention, "one rounding"), (attention_in_steps, "probabilities rounded")):
            yield Kernel(f"SDPA, {word}, beside {told}", by(backend), plain, _heads, there, dtypes)
    for name, function, inputs in (
        ("layer_norm", layer_norm, _rows(1, 2)), ("rms_norm", rms_norm, _rows(1)), ("softmax", softmax, _rows()),
        ("cross_entropy", cross_entropy, lambda: [torch.randn(ROWS, WORDS), torch.randint(WORDS, (ROWS,))]),
    ):  # fmt: skip
        yield Kernel(f"{COMPILED} {name}", torch.compile(function, dynamic=False), function, inputs)


def judge(kernel: Kernel, dtype: str, device: str) -> dict[str, Any]:
    """Compare a kernel with its plain function. Returns its line."""
    torch.manual_seed(0)
    torch.compiler.reset()
    inputs = [x.to(device) for x in kernel.inputs()]
    line: dict[str, Any] = {"kernel": kernel.name, "dtype": dtype, "device": device, "machine": machine(device)}
    try:
        report = assert_honest(kernel.mine, kernel.plain, inputs, dtype)
    except NotHonest as error:
        report = error.report
    except (RuntimeError, NotImplementedError) as error:
        return line | {"failed": str(error).strip().partition("\n")[0][:200]}
    excess = {one.name: by_name(one).get("excess") for one in report.results}
    wrong = {one.name: list(one.broken) or list(one.failures) for one in report.results if not one.ok}
    return line | {"honest": report.ok, "wrong": wrong, "excess": excess}


def by_name(one: Judged) -> dict[str, float]:
    """Return the measures of one output or gradient."""
    return {} if one.measured is None else {m.name: round(m.value, 4) for m in one.measured.measures}


def machine(device: str) -> str:
    """Name the device and torch's version."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} {platform.system()} CPU"
    return f"{name}, torch {torch.__version__.partition('+')[0]}"


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return docs/results/honest_kernels.md."""
    devices = sorted({line["device"] for line in lines})
    machines = "; ".join(sorted({line["machine"] for line in lines}))
    by = {(line["kernel"], line["dtype"], line["device"]): line for line in lines}
    told = [
        "# Which of torch's own kernels are honest",
        "",
        "Made by `python -m lockstep.scripts.studies.honest_kernels` (resumable; [lines](honest_kernels.jsonl)); "
        f"`--device cuda` adds a GPU's. {machines}."
        + ("" if "cuda" in devices else " No GPU's kernels are measured yet."),
        "",
        "[`assert_honest`](../guide/assert_honest.md) compares each kernel with a plain function that computes in FP32 "
        "and rounds once, on the same device: the output, and the",
        f"gradient of every input. {ROWS:,} rows of {WIDTH}; attention over {SEQUENCE} tokens, {HEADS} heads of "
        f"{WIDTH}; {PICTURES} pictures. A number is the largest excess, which is the error in units of the plain "
        "function's error.",
        "**Bold**: not honest, with the measures that are wrong.",
        "",
        "| kernel | dtype | " + " | ".join(devices) + " |",
        "|---|---|" + "---|" * len(devices),
    ]
    for name, dtype in dict.fromkeys((line["kernel"], line["dtype"]) for line in lines):
        cells = (_cell(by.get((name, dtype, device))) for device in devices)
        told.append(f"| {name} | {dtype} | {' | '.join(cells)} |")
    return "\n".join([*told, ""])


def _cell(line: Mapping[str, Any] | None) -> str:
    if line is None:
        return "not measured"
    if "failed" in line:
        return "does not run: " + line["failed"].replace("|", "/")[:80]
    largest = max((x for x in line["excess"].values() if x is not None), default=0.0)
    if line["honest"]:
        return f"{largest:.2f}"
    wrong = "; ".join(f"{name}: {', '.join(measures)}" for name, measures in line["wrong"].items())
    return f"**{largest:.2f}**, {wrong}".replace("|", "/")


@dataclass
class HonestKernels:
    """Judge the kernels on a device, keep the lines of the others, and write the page."""

    page: bool = False
    """only write the page from the finished lines"""
    device: Literal["cpu", "cuda"] = "cpu"
    """device of the kernels"""
    minutes: float | None = None
    """time after which no kernel is started; the next call runs the rest"""


def main() -> int:
    """Run the missing kernels, and write the page."""
    options, begun = tyro.cli(HonestKernels), time.monotonic()
    lines = read_lines(LINES) if LINES.exists() else []
    if not options.page:
        done = {(line["kernel"], line["dtype"], line["machine"]) for line in lines}
        writer = JsonLines(LINES)
        for kernel, dtype in ((one, dtype) for one in kernels() for dtype in one.dtypes):
            late = options.minutes is not None and time.monotonic() > begun + 60 * options.minutes
            if late or options.device not in kernel.devices:
                continue
            if (kernel.name, dtype, machine(options.device)) in done:
                continue
            line = judge(kernel, dtype, options.device)
            writer.append(line)
            lines.append(line)
            print(kernel.name, dtype, _cell(line), flush=True)
        writer.close()
    PAGE.write_text(page(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
