"""Faults of FAULTS.md whose lever our code does not have yet. Each joins the catalogue with what it waits for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pending:
    """number: of FAULTS.md. mechanism: what goes wrong. stage: where it must be named. waits_for: the missing lever."""

    number: int
    mechanism: str
    stage: str
    waits_for: str


PENDING = (
    Pending(
        10, "recompute in the backward differs from the forward (pytorch #190758)", "act", "activation checkpointing"
    ),
    Pending(11, "autocast's weight cache filled under no_grad (pytorch #112583)", "q", "autocast"),
    Pending(12, "TF32 by default in the reference (scipy #24724)", "embed", "a reference on a GPU"),
    Pending(13, "the loss's chunks add the head's gradient in bf16 (Liger #1391)", "logits", "a chunked cross-entropy"),
    Pending(14, "fused cross-entropy ignores per-token weights (Liger #1298)", "logits", "a fused cross-entropy"),
    Pending(17, "fused cross-entropy returns a zero gradient (Megatron #1750)", "logits", "a fused cross-entropy"),
    Pending(18, "FP8 amax over the wrong group or stale (Megatron PR#442, TE #825)", "q", "FP8"),
    Pending(22, "clipped before unscaling (Lightning #9330)", "clip_coefficient", "FP16 with a loss scale"),
    Pending(32, "FP8 filter matches nothing, or too much (torchtitan #4008)", "q", "FP8"),
)
