"""Faults of FAULTS.md that are the reference's: it is judged before it judges, and is refused.

They are planted in parity_tests/reference/test_reference_check.py, among others of our own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OfTheReference:
    """number: of FAULTS.md. mechanism: what goes wrong. told: what refuses it. test: what plants it."""

    number: int
    mechanism: str
    told: str
    test: str


REFERENCE = (
    OfTheReference(
        12,
        "TF32 by default in the reference (scipy #24724)",
        "1 + 2⁻¹² does not come back from an FP32 product",
        "test_tf32_in_the_reference_is_refused",
    ),
)
