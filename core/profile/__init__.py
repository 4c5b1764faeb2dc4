"""Summarize a profiler's trace of a training step."""
