"""Tests of each package, tests across backends, and planted faults, which prove that the checks can fail."""
