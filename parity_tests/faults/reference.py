"""Faults of FAULTS.md in the reference. The check of the reference itself must find and refuse them.

parity_tests/reference/test_reference_check.py plants them, and others.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OfTheReference:
    """A fault in the reference.

    number: the entry of FAULTS.md. mechanism: its description. told: the check that refuses it. test: the name of the
    test that plants it.
    """

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
