"""Fuzzing of run files and the command line: what is tried, where, and what it must come to (docs/results/fuzz.md)."""
