"""Measures and bounds: how far two tensors or scalars are apart, and how far they may be."""
