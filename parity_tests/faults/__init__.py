"""Planted faults: trainers with one fault each. At least one fault fails each check of the engine.

Each is a `Backend`, so `--candidate parity_tests/faults/FILE.py:NAME` runs it. `FAULTS` lists all of them,
`CATALOG` those that one eager check of the first step must find, `REFERENCE` the faults of the reference itself.
`lockstep faults` runs them, and compares the origin that the check names with the expected one.
"""

from __future__ import annotations

from lockstep.parity_tests.faults.catalog import CATALOG, FAULTS
from lockstep.parity_tests.faults.fault import Fault
from lockstep.parity_tests.faults.reference import REFERENCE

__all__ = ["CATALOG", "FAULTS", "REFERENCE", "Fault"]
