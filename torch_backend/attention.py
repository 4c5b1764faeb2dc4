"""Which kernel computes attention, and what it is told of documents. Twin: jax_backend/attention.py, written out.

`auto` is `math` or `flash` on the CPU (core/config/auto.py: a session settles it), and on CUDA the first of cuDNN,
flash, memory-efficient and written-out attention that can. Any other name is that kernel or an error (`check_kernel`),
but for what the run computes under another precision than its own (`evaluate`): where the kernel does not know the
dtype, `auto` stands in.

Documents are kept apart by a dense mask, and by FlexAttention's blocks with `flex` (Dong et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from lockstep.core.components.attention_kernels import (
    ANY_WIDTH,
    ATTENTION_KERNELS,
    AUTO,
    HOPPER,
    AttentionKernel,
)
from lockstep.core.config.schema import AttentionConfig, RunConfig
from lockstep.core.errors import UserError
from lockstep.torch_backend.precision import DTYPES

Mask = Tensor | BlockMask  # (B, 1, S, S) bool, or FlexAttention's blocks

# Those of torch's call, by the name of core/components/attention_kernels.py, in the order in which it would take them.
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
LOW = (torch.bfloat16, torch.float16)
FA3 = "flash_attn_interface"


def document_mask(documents_BS: Tensor) -> Tensor:
    """(B, 1, S, S) bool: which keys each query sees, those of its own document that do not come after it."""
    same_BST = documents_BS[:, :, None] == documents_BS[:, None, :]
    return same_BST.tril()[:, None]


def document_blocks(documents_BS: Tensor) -> BlockMask:
    """The same for FlexAttention, which passes over blocks of keys that no query of a block sees."""

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (documents_BS[b, query] == documents_BS[b, key]) & (query >= key)

    rows, length = documents_BS.shape
    return create_block_mask(sees, rows, None, length, length, device=documents_BS.device)


@dataclass(frozen=True)
class Kernel:
    """Attention by the kernel of one name (AttentionConfig.kernel). grouped: keys may have fewer heads than queries."""

    name: str = "auto"
    deterministic: bool = False
    grouped: bool = False

    @property
    def chosen(self) -> AttentionKernel:
        """Return the core object of this kernel."""
        return ATTENTION_KERNELS[self.name]

    def mask(self, documents_BS: Tensor) -> Mask:
        """Return the mask that separates documents, in the form that the kernel takes."""
        return document_blocks(documents_BS) if self.chosen.mask == "blocks" else document_mask(documents_BS)

    def __call__(self, q_BHSE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, mask: Mask | None = None) -> Tensor:
        """softmax(q·kᵀ/√E + mask)·v → (B, H, S, E); without a mask, every query sees what does not come after it.

        A single query stands at the last key, and sees all (but for `flex`).
        """
        if self.name == "flex":
            return _flex(q_BHSE, k_BHSE, v_BHSE, mask)
        assert mask is None or isinstance(mask, Tensor)
        if self.name == "fa3" and q_BHSE.dtype in LOW:
            return _fa3(q_BHSE, k_BHSE, v_BHSE)
        backends = self.backends(q_BHSE.device.type, q_BHSE.dtype)
        if not backends:
            return _sdpa(q_BHSE, k_BHSE, v_BHSE, mask, self.grouped)
        with sdpa_kernel(backends, set_priority=True):
            return _sdpa(q_BHSE, k_BHSE, v_BHSE, mask, self.grouped)

    def backends(self, device: str, dtype: torch.dtype) -> list[SDPBackend]:
        """The kernels of torch's call that may run, best first; none: its own choice."""
        if self.name in BACKENDS and (device == "cpu" or dtype in dtypes(self.chosen)):
            return [BACKENDS[self.name]]
        # torch would pass over cuDNN's without a word.
        varies = {name for name in BACKENDS if self.deterministic and ATTENTION_KERNELS[name].not_deterministic}
        ordered = [backend for name, backend in BACKENDS.items() if name not in varies]
        return [] if device == "cpu" else ordered


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grouped: bool) -> Tensor:
    # torch counts queries from the first key on.
    causal = mask is None and q.shape[2] > 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


def _causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
    assert not isinstance(mask, Tensor)
    length = q.shape[2]
    blocks = mask or create_block_mask(_causal, None, None, length, length, device=q.device)
    # Uncompiled it would be written out, scores and all.
    call = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    out: Tensor = call(q, k, v, block_mask=blocks)
    return out


def _fa3(q_BHSE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor) -> Tensor:
    """FlashAttention-3 (Shah et al. 2024); its axes are (B, S, H, E)."""
    from flash_attn_interface import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

    found = flash_attn_func(*(x.transpose(1, 2) for x in (q_BHSE, k_BHSE, v_BHSE)), causal=True)
    # Earlier versions give the logsumexp beside the output.
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out.transpose(1, 2)


@dataclass(frozen=True)
class Machine:
    """Hold the facts that decide which kernels can run. capability: of a CUDA device; (0, 0) on the CPU."""

    device: str
    capability: tuple[int, int] = (0, 0)
    cudnn: bool = False
    triton: bool = False
    fa3: bool = False

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        """This machine, for a run on `device`."""
        if device.type != "cuda":
            return cls(device.type)
        return cls(
            device.type,
            torch.cuda.get_device_capability(device),
            torch.backends.cudnn.is_available(),
            find_spec("triton") is not None,
            find_spec(FA3) is not None,
        )


def check_kernel(config: RunConfig, device: torch.device) -> None:
    """Raise UserError, in one line, if the kernel that was asked for cannot run this model on this device."""
    dtype = DTYPES[config.precision.operand]
    if why := refusal(config.attention, config.model.head_dim, dtype, Machine.of(device)):
        raise UserError(f"attention.kernel = {config.attention.kernel!r} cannot run: {why}")


def dtypes(kernel: AttentionKernel) -> list[torch.dtype]:
    """The inputs that a kernel takes on CUDA."""
    return list(dict.fromkeys(DTYPES[operand] for operand in kernel.operands))


def refusal(attention: AttentionConfig, head_dim: int, dtype: torch.dtype, machine: Machine) -> str | None:
    """Why the kernel cannot run with heads of this width and operands of this dtype, and what can; None if it can."""
    kernel = attention.chosen
    every = [one for one in ATTENTION_KERNELS.values() if one is not AUTO]
    if kernel is AUTO:
        return None
    if machine.device == "cpu":
        here = _named(["auto", *(one.name for one in every if not one.on_cpu)])
        return f"{kernel.title} {kernel.on_cpu}; use {here}" if kernel.on_cpu else None
    masked = [one for one in every if one.mask is not None]
    if dtype not in dtypes(kernel):
        takes = _named([_short(d) for d in dtypes(kernel)])
        # Fused ones first.
        fitting = [
            one.name for one in sorted(masked, key=lambda one: (one.written_out, one.of_call)) if dtype in dtypes(one)
        ]
        return (
            f"{kernel.title} takes {takes}, and precision.policy makes operands {_short(dtype)}; use {_named(fitting)}"
        )
    if missing := _missing(kernel, machine):
        return f"{missing}; use {_named([one.name for one in masked if one is not kernel])} or auto"
    if attention.document_mask and kernel.mask is None:
        blocks, dense = (_named([one.name for one in masked if one.mask == form]) for form in ("blocks", "dense"))
        return (
            f"{kernel.title} takes no mask, and attention.document_mask asks for one; use {blocks}, or {dense} with a "
            "dense one"
        )
    return _refusal_of_width(kernel, head_dim, dtype, machine)


def _missing(kernel: AttentionKernel, machine: Machine) -> str | None:
    major, minor = machine.capability
    there = {
        "": "",
        "cudnn": "" if machine.cudnn else "torch finds no cuDNN here",
        "triton": "" if machine.triton else f"{kernel.title} is generated by Triton, which is not installed",
        "fa3": "" if machine.fa3 else f"{kernel.title} is not installed (no module {FA3})",
    }
    if lacking := there[kernel.needs]:
        return lacking
    if kernel.only_hopper and major != HOPPER[0]:
        return f"{kernel.title} is for Hopper (compute capability 9.0), and this device has {major}.{minor}"
    if machine.capability < kernel.capability:
        least = ".".join(map(str, kernel.capability))
        return f"{kernel.title} needs compute capability {least} (Ampere), and this device has {major}.{minor}"
    return None


def _refusal_of_width(kernel: AttentionKernel, head_dim: int, dtype: torch.dtype, machine: Machine) -> str | None:
    multiple, least, most = kernel.widths
    multiple = max(multiple, kernel.bytes_at_a_time // dtype.itemsize)
    if kernel.widest_on_hopper and machine.capability >= HOPPER:
        most = kernel.widest_on_hopper
    if head_dim % multiple == 0 and least <= head_dim <= most:
        return None
    bounds = [f"a multiple of {multiple}"] if multiple > 1 else []
    bounds += [f"at least {least}"] if least > multiple else []
    bounds += [f"at most {most}"] if most < ANY_WIDTH[2] else []
    return (
        f"{kernel.title} needs a head dimension that is {' and '.join(bounds)}, and model.hidden / model.heads = "
        f"{head_dim}; use math or auto"
    )


def in_force(attention: AttentionConfig, device: torch.device, deterministic: bool = False) -> str:
    """The kernel, and what is done about documents, in words."""
    kernel = attention.chosen
    call = kernel.words or f"scaled_dot_product_attention, {kernel.name} kernel"
    if kernel is AUTO:
        first = "flash kernel" if deterministic else "cuDNN's kernel"
        call = "scaled_dot_product_attention" + ("" if device.type == "cpu" else f", {first} where it can run")
    words = [call]
    if attention.document_mask:
        words.append(f"documents kept apart by {'blocks' if kernel.mask == 'blocks' else 'a dense mask'}")
    if attention.reset_positions:
        words.append("positions from 0 in each document")
    return "; ".join(words)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _named(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
