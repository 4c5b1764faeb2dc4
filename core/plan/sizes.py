"""Collect the parts of a configuration that decide how large tensors are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.core.components.attention_kernels import (
    ATTENTION_KERNELS,
    AUTO,
    AttentionKernel,
    taken_on_cuda,
)
from lockstep.core.components.cast_plan import LOCKSTEP, CastPlan
from lockstep.core.components.precision import FORMATS, Format
from lockstep.core.config.auto import multiplies_bf16, settled
from lockstep.core.config.schema import ModelConfig, RunConfig
from lockstep.core.model.families import graph_of
from lockstep.core.plan.gpus import Gpu


@dataclass(frozen=True)
class Sizes:
    """Tokens of a micro-batch and widths of the model; stream, operand: bytes of a number (torch_backend/precision.py).

    fused: a compiler makes one kernel of neighbouring pointwise operations. whole: the forward pass is one program.
    kernel: attention's. capped: it caps its scores. capped_logits: the model caps its logits. logits, residual:
    bytes of a logit, and of a number of the residual stream. autocast: see `sizes_of`. by_fp32: narrow products are
    computed from FP32 copies of their operands, which are freed after each. by_blocks: products with FP32 results are
    oneDNN's in blocks, which add in place. plan: what else is rounded.
    """

    tokens: int
    length: int
    hidden: int
    attended: int
    kv: int
    heads: int
    ffn: int
    vocab: int
    stream: int
    operand: int
    fp8: bool
    fused: bool
    whole: bool
    kernel: AttentionKernel
    capped: bool
    on_cpu: bool
    logits: int
    residual: int
    autocast: bool
    by_fp32: bool
    by_blocks: bool
    capped_logits: bool = False
    plan: CastPlan = LOCKSTEP

    @property
    def copies(self) -> bool:
        """Return whether products with wide outputs are made of copies of their operands, as the CPU's are."""
        return self.on_cpu and self.casts and not self.by_blocks

    @property
    def casts(self) -> bool:
        """Return whether operands are another dtype than the stream."""
        return self.operand != self.stream

    def kept(self, key: str) -> int:
        """Return bytes of a number of what a key of the plan of casts names, as an eager program writes it."""
        return self.operand if self.plan.keeps(key) else self.stream

    @property
    def of_tables(self) -> int:
        """Bytes of a number of RoPE's tables."""
        return self.operand if self.plan.rotates_narrowly else self.stream

    @property
    def shares(self) -> bool:
        """Return whether layers that read one norm keep its output as it is: no cast makes a copy for each."""
        return self.casts and self.plan.keeps("norm")


def sizes_of(config: RunConfig, gpu: Gpu, autocast: bool = False) -> Sizes:
    """Return the sizes of a run on a device.

    autocast: as a model under torch.autocast has them, not Lockstep's: outputs of products stay in the operand dtype,
    logits too.
    """
    model, train, policy = config.model, config.train, config.precision.operand
    stream, operand = FORMATS[config.precision.stream].bytes, FORMATS[policy].bytes
    fused = config.compile.enabled and config.compile.backend == "inductor"
    # Eager, the norms that read a narrow residual stream keep it widened.
    narrow = fused and config.precision.plan.rounds("residual")
    return Sizes(
        tokens=train.micro_batch_size * train.sequence_length,
        length=train.sequence_length,
        hidden=model.hidden,
        attended=model.heads * model.head_dim,
        kv=_width(model, "attention", "k"),
        heads=model.heads,
        ffn=_width(model, "gated", "up"),
        vocab=model.vocab_size,
        stream=stream,
        operand=operand,
        fp8=config.precision.fp8 is not None,
        fused=fused,
        whole=fused and config.compile.scope == "model",
        kernel=kernel_of(config, gpu),
        capped=config.model.attention_cap > 0,
        on_cpu=not gpu.cuda,
        logits=operand if autocast or config.precision.plan.rounds("logits") else stream,
        residual=operand if narrow else stream,
        autocast=autocast,
        by_fp32=not gpu.cuda and not autocast and _is_by_fp32(FORMATS[policy]),
        by_blocks=not gpu.cuda and not autocast and settled(config, "cpu").precision.cpu_products == "brgemm",
        capped_logits=model.logits_cap > 0,
        plan=config.precision.plan,
    )


def _is_by_fp32(operand: Format) -> bool:
    """Return whether this CPU computes products of a format in FP32."""
    return operand.by_fp32 == "always" or (operand.by_fp32 != "never" and not multiplies_bf16())


def _width(model: ModelConfig, kind: str, role: str) -> int:
    """Return numbers of a token that the first operation of a kind reads by a role; 0 without any."""
    graph = graph_of(model.model_copy(update={"layers": 1}))
    found = (one for one in graph.operations if one.kind == kind)
    return next((math.prod(graph.by_tap[one.reads[role]].width) for one in found), 0)


def kernel_of(config: RunConfig, gpu: Gpu) -> AttentionKernel:
    """Return the attention kernel that runs, `auto` resolved; on the CPU, flash stands in for CUDA's own kernels."""
    if config.model.attention_cap:
        return next(kernel for kernel in ATTENTION_KERNELS.values() if kernel.written_out)
    if not gpu.cuda:
        chosen = settled(config, "cpu").attention.chosen
        return ATTENTION_KERNELS["flash"] if chosen.on_cpu else chosen
    chosen = config.attention.chosen
    return taken_on_cuda(config.precision.operand) if chosen is AUTO else chosen
