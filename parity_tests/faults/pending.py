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
    Pending(11, "autocast's weight cache filled under no_grad (pytorch #112583)", "q", "autocast, which nothing uses"),
    Pending(12, "TF32 by default in the reference (scipy #24724)", "embed", "a reference on a GPU"),
)
