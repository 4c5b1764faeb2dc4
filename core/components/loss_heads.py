"""Loss heads: from the final norm's output to the loss.

The arithmetic stands in torch_backend/{loss,chunked_loss}.py and torch_backend/kernels/library_heads.py, and in
jax_backend/loss.py and jax_backend/kernels/library_heads.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.core.components.precision import PrecisionPolicy

# (tokens of a micro-batch, hidden width, vocabulary, `loss.chunk`) → tokens whose logits are there at a time
Rows = Callable[[int, int, int, int], int]


def _all_tokens(tokens: int, hidden: int, vocab: int, chunk: int) -> int:
    return tokens


def _a_chunk(tokens: int, hidden: int, vocab: int, chunk: int) -> int:
    return min(chunk, tokens)


def _as_large_as_the_input(tokens: int, hidden: int, vocab: int, chunk: int) -> int:
    """Return how many tokens' logits take as much memory as the hidden states, as Liger does.

    Source: liger_kernel/ops/fused_linear_cross_entropy.py.
    """
    pieces = math.ceil(vocab / hidden)
    return min(tokens, 1 << max(0, math.ceil(math.log2(max(1, math.ceil(tokens / pieces))))))


def _none(tokens: int, hidden: int, vocab: int, chunk: int) -> int:
    return 0


@dataclass(frozen=True)
class LossHead:
    """A loss head by name (`loss.head`).

    name:    of the setting; backends know it by this name.
    words:   how it computes, for the table at start; `{chunk}` stands for the tokens of a chunk.
    library: whether it is a library's: one operation from hidden states to the per-token NLL, which shows no logits.
    rows:    tokens whose logits are there at a time.
    z_loss:  whether it knows `loss.z_loss`.
    refuses: formats of operands that it does not compute with.
    because: why it refuses them; `{policy}` stands for the policy that needs one.
    reads_on_host: it reads values on the host, so that it cannot be part of one compiled program.
    not_deterministic: why no run on CUDA with it gives the same bits twice, and what does; empty where one can.
    package: of a library other than torch, what is imported and what is installed.
    wide_sums: of a library, it sums the weight's gradient in FP32, not in the operand format.
    wide_logits: of a library, logits are FP32, and products read their gradient in the operand format.
    caps: it caps logits, where a model does.
    one_kernel: one kernel a chunk makes losses and gradient, which takes the place of the logits.
    """

    name: str
    words: str
    rows: Rows
    library: bool = False
    z_loss: bool = True
    refuses: tuple[str, ...] = ()
    because: str = ""
    reads_on_host: bool = False
    not_deterministic: str = ""
    package: tuple[str, str] | None = None
    wide_sums: bool = False
    wide_logits: bool = False
    one_kernel: bool = False
    caps: bool = False

    @property
    def stage(self) -> str:
        """The stage id of a library's head in the chain."""
        return f"{self.name}_head"

    @property
    def whole(self) -> bool:
        """Return whether the logits of all tokens are there at once."""
        return self.rows is _all_tokens

    def refusal(self, policy: PrecisionPolicy) -> str | None:
        """Explain why it does not compute under a policy; None if it does."""
        return self.because.format(policy=policy.name) if policy.operand in self.refuses else None

    def in_force(self, chunk: int, z_loss: float) -> str:
        """Describe how the head of a run computes, in words. chunk, z_loss: of `LossConfig`."""
        words = self.words.format(chunk=f"{chunk:,}")
        return words + (f", z-loss {z_loss:g}" if z_loss else "")


LOSS_HEADS: dict[str, LossHead] = {
    head.name: head
    for head in (
        LossHead("full", "whole logits, FP32 logits", _all_tokens, caps=True),
        LossHead(
            "chunked", "chunks of {chunk} tokens, gradients in the forward pass, FP32 logits", _a_chunk, caps=True
        ),
        LossHead(
            "one_kernel",
            "chunks of {chunk} tokens, losses and gradients by one Triton kernel each, FP32 logits",
            _a_chunk,
            refuses=("fp64",),
            because="its exponentials are FP32, and {policy} would not hold",
            one_kernel=True,
        ),
        LossHead(
            "torch",
            "torch's linear_cross_entropy, chunks of {chunk} tokens",
            _a_chunk,
            library=True,
            z_loss=False,
            wide_logits=True,
        ),
        LossHead(
            "liger",
            "Liger-Kernel's fused linear cross-entropy, FP32 sums",
            _as_large_as_the_input,
            library=True,
            refuses=("fp64",),
            because="Liger's kernel computes in FP32, and {policy} would not hold",
            reads_on_host=True,
            package=("liger_kernel", "liger-kernel"),
            wide_sums=True,
        ),
        LossHead(
            "cce",
            "cut-cross-entropy without its filter",
            _none,
            library=True,
            z_loss=False,
            refuses=("fp64", "fp32", "tf32"),
            because="cut-cross-entropy has gradients in bf16 and FP16 alone, not under {policy}",
            reads_on_host=True,
            # cut_cross_entropy/cce_backward.py: blocks add up under locks.
            not_deterministic="its blocks add gradients in the order in which they come; take chunked or liger",
            package=("cut_cross_entropy", "cut-cross-entropy"),
        ),
    )
}
