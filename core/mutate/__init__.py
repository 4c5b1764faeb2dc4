"""Mutants of a training step as data: places, operators and conditions, the draw, and the results."""
