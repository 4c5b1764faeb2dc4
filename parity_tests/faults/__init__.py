"""Planted faults: trainers that are wrong in one way each. Every check of the engine is tripped by at least one.

Each is a `Backend` that can stand as `--candidate parity_tests/faults/FILE.py:NAME`. `FAULTS` are all of them,
`CATALOG` those that one eager check of the first step must find, `REFERENCE` those of the reference.
`lockstep faults` plants them and compares what is named with what is promised.
"""

from __future__ import annotations

from lockstep.parity_tests.faults.catalog import CATALOG, FAULTS
from lockstep.parity_tests.faults.fault import Fault
from lockstep.parity_tests.faults.reference import REFERENCE

__all__ = ["CATALOG", "FAULTS", "REFERENCE", "Fault"]
