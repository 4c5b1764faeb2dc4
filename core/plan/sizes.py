"""What of a configuration decides how large tensors are."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.core.components.precision import FORMATS
from lockstep.core.config.auto import settled
from lockstep.core.config.schema import RunConfig
from lockstep.core.plan.gpus import Gpu

# Where `auto` ends up (torch_backend/attention.py): on CUDA the first kernel that takes the operands' dtype.
_AUTO_ON_CUDA = {"fp64": "math", "fp32": "efficient", "tf32": "efficient"}


@dataclass(frozen=True)
class Sizes:
    """Tokens of a micro-batch and widths of the model; stream, operand: bytes of a number (torch_backend/precision.py).

    fused: a compiler makes one kernel of neighbouring pointwise operations. whole: the forward pass is one program.
    kernel: attention's. logits: bytes of a logit. autocast: see `sizes_of`. slow: FP16 on the CPU, whose products are
    made in FP32.
    """

    tokens: int
    length: int
    hidden: int
    kv: int
    heads: int
    ffn: int
    vocab: int
    stream: int
    operand: int
    fp8: bool
    fused: bool
    whole: bool
    kernel: str
    on_cpu: bool
    slow: bool
    logits: int
    autocast: bool

    @property
    def copies(self) -> bool:
        """Whether products with wide outputs are made of copies of their operands, as the CPU's are."""
        return self.on_cpu and self.casts

    @property
    def read(self) -> int:
        """Bytes of a number that a linear layer keeps of its input and weight: FP32 where FP16 is slow."""
        return self.stream if self.slow else self.operand

    @property
    def casts(self) -> bool:
        """Whether operands are another dtype than the stream."""
        return self.operand != self.stream


def sizes_of(config: RunConfig, gpu: Gpu, autocast: bool = False) -> Sizes:
    """The sizes of a run on a device.

    autocast: as a model under torch.autocast has them, not Lockstep's: outputs of products stay in the operand dtype,
    logits too.
    """
    model, train, policy = config.model, config.train, config.precision.operand
    stream, operand = FORMATS[config.precision.stream].bytes, FORMATS[policy].bytes
    return Sizes(
        tokens=train.micro_batch_size * train.sequence_length,
        length=train.sequence_length,
        hidden=model.hidden,
        kv=model.kv_heads * model.head_dim,
        heads=model.heads,
        ffn=model.ffn_hidden,
        vocab=model.vocab_size,
        stream=stream,
        operand=operand,
        fp8=config.precision.fp8 is not None,
        fused=config.compile.enabled and config.compile.backend == "inductor",
        whole=config.compile.enabled and config.compile.backend == "inductor" and config.compile.scope == "model",
        kernel=kernel_of(config, gpu),
        on_cpu=not gpu.cuda,
        slow=not gpu.cuda and policy == "fp16",
        logits=operand if autocast else stream,
        autocast=autocast,
    )


def kernel_of(config: RunConfig, gpu: Gpu) -> str:
    """The attention kernel that runs, `auto` resolved; the CPU has flash attention and the written-out one."""
    if not gpu.cuda:
        return "math" if settled(config, "cpu").attention.kernel == "math" else "flash"
    name, policy = config.attention.kernel, config.precision.operand
    if name == "auto":
        return _AUTO_ON_CUDA.get(policy, "cudnn")
    return name
