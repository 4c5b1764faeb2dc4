"""Tests of every package, tests across backends, and the planted faults that prove the checks can fail."""
