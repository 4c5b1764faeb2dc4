"""The rows of `lockstep bench step`: the published table, and what Lockstep adds to it.

Published figures: Omkaar Kamath, "How to Train an LLM" (2025–26), one H100, the 1.24B model of configs/llama-1b.toml at
sequence length 2048. Seconds a step; reserved memory in GB (10⁹ bytes). A figure that was published as a difference is
given as the number that it makes, with the difference in the note.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError


@dataclass(frozen=True)
class Published:
    """A published figure. seconds: of a step. reserved: GB. note: what it was measured on, if not the row itself."""

    seconds: float | None = None
    reserved: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Row:
    """A configuration of the bench.

    settings: dotted key → text, over the run file. sequences: of a micro-batch. accumulation: micro-batches a step.
    """

    name: str
    about: str
    sequences: int
    accumulation: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    published: Published = Published()

    def overrides(self, device: str) -> dict[str, str]:
        """Return every setting of the row, for a run on `device` (cpu or cuda)."""
        batch = {
            "train.batch_size": str(self.sequences * self.accumulation),
            "train.micro_batch_size": str(self.sequences),
            "train.ranks": "1",
            "train.curriculum": "",
        }
        return {**LEVERS, **self.settings, **batch, "device": device}


# Every lever, so that a row means the same under any run file: bf16, compiled, whole logits, flash attention (torch's
# choice when the figures were published), no recomputation, AdamW.
LEVERS = {
    "precision.policy": "bf16",
    "precision.casts": "lockstep",
    "precision.fp8_layers": "blocks.*",
    "compile.enabled": "true",
    "compile.backend": "inductor",
    "compile.mode": "default",
    "compile.scope": "model",
    "loss.head": "full",
    "attention.kernel": "flash",
    "attention.document_mask": "false",
    "attention.reset_positions": "false",
    "recompute.parts": "",
    "recompute.every": "1",
    "recompute.keep_products": "false",
    "recompute.memory_budget": "1.0",
    "optim.name": "adamw",
    "optim.fused": "auto",
}
EAGER = {"compile.enabled": "false"}
GRAPHS = {"compile.mode": "reduce-overhead"}
EVERY_LAYER = {"recompute.parts": "block"}
TENSORWISE, ROWWISE = {"precision.policy": "fp8_tensorwise"}, {"precision.policy": "fp8_rowwise"}
DELAYED = {"precision.policy": "fp8_delayed"}
# The published runs were made under autocast: products' outputs and logits stay in bf16.
AUTOCAST, RESIDUAL = {"precision.casts": "autocast"}, {"precision.casts": "residual=bf16"}
# FP32 attention fell back to the written-out kernel in the published runs.
FP32 = {"precision.policy": "fp32", "attention.kernel": "math"}


def _chunked(tokens: int) -> dict[str, str]:
    return {"loss.head": "chunked", "loss.chunk": str(tokens)}


def _outside(library: str) -> dict[str, str]:
    return {"loss.head": library, "compile.scope": "blocks"}


def _kernel(name: str) -> dict[str, str]:
    return {"attention.kernel": name}


ONE_KERNEL = {"attention.kernel": "cudnn", "loss.head": "one_kernel", "loss.chunk": "4096"}

ROWS: tuple[Row, ...] = (
    Row("fp32-eager", "FP32, eager", 3, settings=FP32 | EAGER, published=Published(1.234, 72.3)),
    Row(
        "fp32-eager-efficient",
        "the same with a fused kernel for attention",
        3,
        settings=FP32 | EAGER | _kernel("efficient"),
    ),
    Row("fp32-compile", "FP32, compile reduce-overhead", 4, settings=FP32 | GRAPHS, published=Published(1.480, 82.9)),
    Row(
        "tf32-compile",
        "TF32, compile, a fused kernel for attention",
        4,
        settings={"precision.policy": "tf32", **_kernel("efficient")},
    ),
    # AdamW one list operation at a time, torch's default.
    Row("bf16", "bf16, compile", 16, settings={"optim.fused": "false"}, published=Published(0.525, 78.6, "autocast")),
    Row("fused", "+ fused AdamW", 16, published=Published(0.504, 73.6)),
    Row("fused-autocast", "the same under torch.autocast's casts, as published", 16, settings=AUTOCAST),
    Row("fp16", "+ fused AdamW, in fp16 with loss scaling", 16, settings={"precision.policy": "fp16"}),
    Row(
        "checkpoint-2",
        "+ checkpoint every second layer",
        16,
        settings=EVERY_LAYER | {"recompute.every": "2"},
        published=Published(0.567, 49.7),
    ),
    Row("checkpoint-1", "+ checkpoint every layer", 16, settings=EVERY_LAYER, published=Published(0.600, 29.7)),
    Row(
        "checkpoint-1-64",
        "the same, 4 micro-batches",
        16,
        4,
        EVERY_LAYER,
        Published(2.36, 73.8, "published as [64, 2048] at once"),
    ),
    Row("autocast-1-64", "the same under torch.autocast's casts, as published", 16, 4, EVERY_LAYER | AUTOCAST),
    Row(
        "recompute-embedding",
        "computed again: embedding",
        16,
        settings={"recompute.parts": "embedding"},
        published=Published(0.504, 73.2, "0 % / −0.5 % against none"),
    ),
    Row(
        "recompute-norms",
        "computed again: norms",
        16,
        settings={"recompute.parts": "norms"},
        published=Published(0.504, 73.6, "0 % / 0 % against none"),
    ),
    Row(
        "recompute-attention",
        "computed again: attention",
        16,
        settings={"recompute.parts": "attention"},
        published=Published(0.534, 65.5, "+6 % / −11 % against none"),
    ),
    Row(
        "recompute-mlp",
        "computed again: SwiGLU",
        16,
        settings={"recompute.parts": "mlp"},
        published=Published(0.534, 44.2, "+6 % / −40 % against none"),
    ),
    Row(
        "recompute-selective",
        "computed again: blocks but for their products",
        16,
        settings=EVERY_LAYER | {"recompute.keep_products": "true"},
    ),
    Row(
        "memory-budget",
        "the compiler keeps half of the activations",
        16,
        settings={"recompute.memory_budget": "0.5"},
    ),
    Row(
        "fp8-tensorwise",
        "checkpoint every layer, FP8 tensorwise",
        16,
        4,
        EVERY_LAYER | TENSORWISE,
        Published(2.12, 59.0, "−10 % / −20 % against bf16"),
    ),
    Row(
        "fp8-rowwise",
        "checkpoint every layer, FP8 rowwise",
        16,
        4,
        EVERY_LAYER | ROWWISE,
        Published(2.41, 59.0, "+2 % / −20 % against bf16"),
    ),
    Row(
        "fp8-delayed",
        "FP8, delayed scaling",
        4,
        settings=DELAYED,
        published=Published(0.141, 42.3, "Transformer Engine"),
    ),
    Row("fp8-tensorwise-4", "FP8 tensorwise at the size of that", 4, settings=TENSORWISE),
    Row(
        "head-full",
        "checkpoint every layer, whole logits",
        16,
        4,
        EVERY_LAYER,
        Published(2.37, 73.8, "beside Apple CCE"),
    ),
    Row("head-chunked-2048", "head in chunks of 2048 tokens", 16, 4, EVERY_LAYER | _chunked(2048)),
    Row(
        "head-chunked-4096",
        "head in chunks of 4096 tokens",
        16,
        4,
        EVERY_LAYER | _chunked(4096),
        Published(3.00, 60.0, "Apple CCE, FP32 accumulation; vanilla 2.81 s, Kahan 3.62 s; 58–60 GB"),
    ),
    Row("head-chunked-8192", "head in chunks of 8192 tokens", 16, 4, EVERY_LAYER | _chunked(8192)),
    Row("head-chunked-16384", "head in chunks of 16384 tokens", 16, 4, EVERY_LAYER | _chunked(16384)),
    Row(
        "head-full-32",
        "whole logits",
        32,
        settings=EVERY_LAYER,
        published=Published(0.610, 29.6, "beside Liger; this model would run at 843 TFLOP/s (ours): another one"),
    ),
    Row(
        "head-chunked-32",
        "head in chunks of 4096 tokens",
        32,
        settings=EVERY_LAYER | _chunked(4096),
        published=Published(0.654, 66.2, "Liger's fused linear cross-entropy"),
    ),
    Row(
        "head-chunked-64",
        "the same, 64 sequences at once",
        64,
        settings=EVERY_LAYER | _chunked(4096),
        published=Published(2.36, 73.8, "whole logits"),
    ),
    Row("head-torch", "head of torch.nn.functional", 16, 4, EVERY_LAYER | {"loss.head": "torch"}),
    Row(
        "head-cce",
        "head of cut-cross-entropy, compiled by blocks",
        16,
        4,
        EVERY_LAYER | _outside("cce"),
        Published(2.81, None, "Apple CCE, vanilla"),
    ),
    Row(
        "head-liger-32",
        "head of Liger-Kernel, compiled by blocks",
        32,
        settings=EVERY_LAYER | _outside("liger"),
        published=Published(0.654, 66.2, "this model would run at 843 TFLOP/s (ours): another one"),
    ),
    Row(
        "attention-fa3-eager",
        "FlashAttention-3, eager",
        8,
        settings=EAGER | _kernel("fa3"),
        published=Published(0.406),
    ),
    Row(
        "attention-flash-eager",
        "torch's flash attention, eager",
        8,
        settings=EAGER,
        published=Published(0.427, None, "SDPA"),
    ),
    Row(
        "attention-fa3",
        "FlashAttention-3, compiled",
        8,
        settings=_kernel("fa3"),
        published=Published(0.358, 38.3),
    ),
    Row(
        "attention-flash",
        "torch's flash attention, compiled",
        8,
        published=Published(0.305, 18.2, "SDPA"),
    ),
    Row("attention-cudnn", "cuDNN's attention, compiled", 8, settings=_kernel("cudnn")),
    Row("attention-efficient", "memory-efficient attention, compiled", 8, settings=_kernel("efficient")),
    Row("attention-flex", "FlexAttention, compiled", 8, settings=_kernel("flex")),
    Row("attention-math", "written-out attention, compiled", 8, settings=_kernel("math")),
    Row(
        "adamw8bit",
        "AdamW with 8-bit moments",
        16,
        settings={"optim.name": "adamw8bit"},
        published=Published(None, 63.6, "MFU −0.1 %, −10 GB"),
    ),
    Row("muon", "Muon", 16, settings={"optim.name": "muon"}),
    Row("graphs-64", "CUDA graphs (reduce-overhead), 4 micro-batches", 16, 4, GRAPHS | _chunked(4096)),
    Row("blocks-64", "compiled block by block, 4 micro-batches", 16, 4, {"compile.scope": "blocks", **_chunked(4096)}),
    Row("kept-64", "nothing computed again, cuDNN, chunked head", 16, 4, _kernel("cudnn") | _chunked(4096)),
    Row(
        "kept-fp8-64",
        "the same in FP8 tensorwise",
        16,
        4,
        TENSORWISE | _kernel("cudnn") | _chunked(4096),
    ),
    Row("kept-one-kernel-64", "nothing computed again, cuDNN, head of one kernel", 16, 4, ONE_KERNEL),
    Row("kept-autocast-64", "the same under torch.autocast's casts", 16, 4, AUTOCAST | ONE_KERNEL),
    Row(
        "kept-residual-64",
        "nothing computed again, cuDNN, head of one kernel, bf16 residual stream",
        16,
        4,
        RESIDUAL | ONE_KERNEL,
    ),
    Row(
        "kept-fp8-one-kernel-64",
        "nothing computed again, cuDNN, head of one kernel, FP8 tensorwise",
        16,
        4,
        TENSORWISE | ONE_KERNEL,
    ),
    Row("kept-fp8-delayed-one-kernel-64", "the same in FP8, delayed scaling", 16, 4, DELAYED | ONE_KERNEL),
    Row(
        "kept-fp8-delayed-residual-64",
        "the same with a bf16 residual stream",
        16,
        4,
        DELAYED | RESIDUAL | ONE_KERNEL,
    ),
)
BY_NAME = {row.name: row for row in ROWS}


def chosen(names: Sequence[str]) -> list[Row]:
    """Return the rows of these names in the table's order; all without names. Raises UserError for an unknown name."""
    for name in names:
        if name not in BY_NAME:
            near = difflib.get_close_matches(name, BY_NAME, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {len(ROWS)}, {ROWS[0].name} to {ROWS[-1].name}"
            raise UserError(f"command line: rows: {name or repr(name)} is not a row; {hint}")
    return [row for row in ROWS if row.name in names or not names]


def bench_config(config: RunConfig) -> dict[str, object]:
    """Return the settings of a run file that a row uses besides its own."""
    dumped = config.model_dump(mode="json")
    return {
        "model": dumped["model"],
        "sequence_length": config.train.sequence_length,
        "seed": config.seed,
        **{name: dumped[name] for name in ("optim", "precision", "loss")},
    }


def names(rows: Iterable[Row]) -> str:
    """Return their names, separated by commas."""
    return ", ".join(row.name for row in rows)
