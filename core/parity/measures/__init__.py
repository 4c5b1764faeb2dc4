"""Measure the distance of two tensors or scalars, and bound it."""
