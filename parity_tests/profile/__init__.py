"""Tests of the profiler: made-up traces with known results, real traces of tiny steps, and the command."""
