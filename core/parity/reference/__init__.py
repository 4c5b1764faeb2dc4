"""Compute the expected results of a step: the chain of stages, and the self-check of the reference."""
