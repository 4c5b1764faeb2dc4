"""Attention kernels and attention masks. Twin: jax_backend/attention.py, which computes the formula step by step.

On the CPU, `auto` is `flash_brgemm`, `math` or `flash`; a session chooses one when it opens (core/config/auto.py). On
CUDA, `auto` is the first of cuDNN, flash, memory-efficient and math attention that can run. Any other name selects that
kernel, or is an error (`check_kernel`). One exception: `evaluate` may compute under another precision than the run's.
If the kernel does not support that dtype, `auto` replaces it.

A dense mask separates documents. With `flex`, FlexAttention's block mask does (Dong et al. 2024).
"""

from __future__ import annotations

import math
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
from lockstep.core.config.auto import settled
from lockstep.core.config.schema import AttentionConfig, RunConfig
from lockstep.core.errors import UserError
from lockstep.torch_backend.kernels import block_attention
from lockstep.torch_backend.precision import DTYPES

Mask = Tensor | BlockMask  # (B, 1, S, S) bool, or FlexAttention's blocks

# Kernels of torch's attention, by the name of core/components/attention_kernels.py, in torch's order of preference.
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
LOW = (torch.bfloat16, torch.float16)
FA3 = "flash_attn_interface"


def document_mask(documents_BS: Tensor) -> Tensor:
    """Return (B, 1, S, S) bool: each query sees the keys of its own document up to its own position."""
    same_BST = documents_BS[:, :, None] == documents_BS[:, None, :]
    return same_BST.tril()[:, None]


def document_blocks(documents_BS: Tensor) -> BlockMask:
    """Build the document mask for FlexAttention, which skips every block of keys that a block of queries cannot see."""

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (documents_BS[b, query] == documents_BS[b, key]) & (query >= key)

    rows, length = documents_BS.shape
    return create_block_mask(sees, rows, None, length, length, device=documents_BS.device)


def window_blocks(documents_BS: Tensor | None, window: int, length: int, device: torch.device) -> BlockMask:
    """Build the mask of a sliding window for FlexAttention: (S, S), or (B, S, S) with documents."""

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = (query >= key) & (query - key < window)
        return near if documents_BS is None else near & (documents_BS[b, query] == documents_BS[b, key])

    rows = None if documents_BS is None else len(documents_BS)
    return create_block_mask(sees, rows, None, length, length, device=device)


@dataclass(frozen=True)
class Kernel:
    """Attention by the kernel of one name (AttentionConfig.kernel).

    grouped: keys may have fewer heads than queries. scale: factor of the scores; None is 1/√E, for heads of width E.
    cap: scores become cap·tanh(score / cap); 0 is no cap. operand: the run's operand dtype. A kernel of the CPU alone
    multiplies it and FP32; `evaluate` may have others.
    """

    name: str = "auto"
    deterministic: bool = False
    grouped: bool = False
    scale: float | None = None
    cap: float = 0.0
    operand: torch.dtype = torch.bfloat16

    @classmethod
    def of(cls, run: RunConfig) -> Kernel:
        """Return the kernel of a run."""
        chosen, model = run.attention, run.model
        grouped, scale = chosen.grouped == "kernel", model.attention_scale or None
        operand = DTYPES[run.precision.operand]
        return cls(chosen.kernel, run.deterministic, grouped, scale, model.attention_cap, operand)

    @property
    def chosen(self) -> AttentionKernel:
        """The description of this kernel in core."""
        return ATTENTION_KERNELS[self.name]

    def mask(self, documents_BS: Tensor) -> Mask:
        """Return the mask that separates documents, in the form that the kernel takes."""
        return document_blocks(documents_BS) if self.chosen.mask == "blocks" else document_mask(documents_BS)

    def window(self, documents_BS: Tensor | None, window: int, start: int, length: int, device: torch.device) -> Mask:
        """Return the mask of a sliding window.

        A query sees itself and the keys of its document that are fewer than `window` positions before it. Queries have
        the positions `start` to `length`, keys 0 to `length`; block masks are made for `start` 0 alone.
        """
        if self.chosen.mask == "blocks" and not self.cap:
            return window_blocks(documents_BS, window, length, device)
        place = torch.arange(length, device=device)
        before = place[start:, None] - place
        seen = ((before >= 0) & (before < window))[None, None]
        return seen if documents_BS is None else seen & document_mask(documents_BS)

    def __call__(self, q_BHSE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, mask: Mask | None = None) -> Tensor:
        """Return softmax(q·kᵀ·scale + mask)·v, (B, H, S, E).

        Without a mask, a query sees the keys up to its own position. A single query has the position of the last key,
        and sees all keys; `flex` does not support this case.
        """
        if self.cap:
            assert mask is None or isinstance(mask, Tensor)
            return self.written_out(q_BHSE, k_BHSE, v_BHSE, mask)
        if self.name == "flex":
            return _flex(q_BHSE, k_BHSE, v_BHSE, mask, self.scale)
        assert mask is None or isinstance(mask, Tensor)
        if self.name == "fa3" and q_BHSE.dtype in LOW:
            return _fa3(q_BHSE, k_BHSE, v_BHSE, self.scale)
        multiplies = q_BHSE.dtype in (self.operand, torch.float32)
        # A sample with a cache has fewer queries than keys.
        if self.chosen.only_cpu and multiplies and q_BHSE.shape[2] == k_BHSE.shape[2]:
            scale = self.scale or 1.0 / math.sqrt(q_BHSE.shape[-1])
            return block_attention.block_attention(q_BHSE, k_BHSE, v_BHSE, scale)
        backends = self.backends(q_BHSE.device.type, q_BHSE.dtype)
        if not backends:
            return _sdpa(q_BHSE, k_BHSE, v_BHSE, mask, self.grouped, self.scale)
        with sdpa_kernel(backends, set_priority=True):
            return _sdpa(q_BHSE, k_BHSE, v_BHSE, mask, self.grouped, self.scale)

    def written_out(self, q_BHSE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, mask: Tensor | None) -> Tensor:
        """Compute attention with capped scores in FP32 or wider, and round the output to the dtype of q.

        No kernel of torch caps scores.
        """
        narrow, wide = q_BHSE.dtype, torch.promote_types(q_BHSE.dtype, torch.float32)
        q, k, v = (x.to(wide) for x in (q_BHSE, k_BHSE, v_BHSE))
        if self.grouped:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * (self.scale or 1.0 / math.sqrt(q.shape[-1]))
        scores = self.cap * torch.tanh(scores / self.cap)
        if mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        return (scores.masked_fill(~mask, -math.inf).softmax(-1) @ v).to(narrow)

    def backends(self, device: str, dtype: torch.dtype) -> list[SDPBackend]:
        """List the kernels of torch that may run, best first; an empty list leaves the choice to torch."""
        if self.name in BACKENDS and (device == "cpu" or dtype in dtypes(self.chosen)):
            return [BACKENDS[self.name]]
        # In deterministic mode torch skips cuDNN's kernel without a warning. This list leaves it out explicitly.
        varies = {name for name in BACKENDS if self.deterministic and ATTENTION_KERNELS[name].not_deterministic}
        ordered = [backend for name, backend in BACKENDS.items() if name not in varies]
        return [] if device == "cpu" else ordered


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grouped: bool, scale: float | None) -> Tensor:
    # With is_causal, torch aligns the first query with the first key: a single query would see only one key.
    causal = mask is None and q.shape[2] > 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)


def _causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None) -> Tensor:
    assert not isinstance(mask, Tensor)
    length = q.shape[2]
    blocks = mask or create_block_mask(_causal, None, None, length, length, device=q.device)
    # Without compilation, FlexAttention allocates the whole matrix of scores.
    call = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    out: Tensor = call(q, k, v, block_mask=blocks, scale=scale)
    return out


def _fa3(q_BHSE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, scale: float | None) -> Tensor:
    """Call FlashAttention-3 (Shah et al. 2024), which takes and returns (B, S, H, E); return (B, H, S, E)."""
    from flash_attn_interface import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

    found = flash_attn_func(*(x.transpose(1, 2) for x in (q_BHSE, k_BHSE, v_BHSE)), softmax_scale=scale, causal=True)
    # Earlier versions also return the logsumexp.
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out.transpose(1, 2)


@dataclass(frozen=True)
class Machine:
    """The properties of a machine that decide which kernels can run.

    capability: compute capability (major, minor) of the CUDA device; (0, 0) on the CPU.
    """

    device: str
    capability: tuple[int, int] = (0, 0)
    cudnn: bool = False
    triton: bool = False
    fa3: bool = False

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        """Describe this machine, for a run on `device`."""
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
    """Raise UserError, in one line, if the configured kernel cannot run this model on this device, or be built."""
    dtype = DTYPES[config.precision.operand]
    masked = config.attention.document_mask or config.model.window > 0
    if why := refusal(config.attention, config.model.head_dim, dtype, Machine.of(device), masked):
        raise UserError(f"attention.kernel = {config.attention.kernel!r} cannot run: {why}")
    if settled(config, device.type).attention.chosen.only_cpu:
        block_attention.build(dtype)


def dtypes(kernel: AttentionKernel) -> list[torch.dtype]:
    """List the input dtypes that a kernel takes on CUDA."""
    return list(dict.fromkeys(DTYPES[operand] for operand in kernel.operands))


def refusal(
    attention: AttentionConfig, head_dim: int, dtype: torch.dtype, machine: Machine, masked: bool = False
) -> str | None:
    """Return the reason why the kernel cannot run, with the kernels that can; None if it can run.

    head_dim: width of a head. dtype: dtype of q, k and v. masked: attention needs a mask for documents or a window.
    """
    kernel = attention.chosen
    on_cpu = machine.device == "cpu"
    every = [one for one in ATTENTION_KERNELS.values() if one is not AUTO and (on_cpu or not one.only_cpu)]
    if kernel is AUTO:
        return None
    if on_cpu:
        here = _named(["auto", *(one.name for one in every if not one.on_cpu)])
        return f"{kernel.title} {kernel.on_cpu}; use {here}" if kernel.on_cpu else None
    takes_mask = [one for one in every if one.mask is not None]
    if kernel.only_cpu:
        return f"{kernel.title} runs on the CPU alone; use {_named([one.name for one in every])} or auto"
    if dtype not in dtypes(kernel):
        takes = _named([_short(d) for d in dtypes(kernel)])
        # Fused kernels first.
        fitting = [
            one.name
            for one in sorted(takes_mask, key=lambda one: (one.written_out, one.of_call))
            if dtype in dtypes(one)
        ]
        return (
            f"{kernel.title} takes {takes}, and precision.policy makes operands {_short(dtype)}; use {_named(fitting)}"
        )
    if missing := _missing(kernel, machine):
        return f"{missing}; use {_named([one.name for one in takes_mask if one is not kernel])} or auto"
    if (masked or attention.document_mask) and kernel.mask is None:
        blocks, dense = (_named([one.name for one in takes_mask if one.mask == form]) for form in ("blocks", "dense"))
        asks = "attention.document_mask" if attention.document_mask else "model.window"
        return f"{kernel.title} takes no mask, and {asks} needs one; use {blocks}, or {dense} with a dense one"
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
    """Describe the kernel, the mask of documents and their positions, in words."""
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
