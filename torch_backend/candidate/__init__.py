"""Candidates from any torch module: a map of names, fused tensors, taps by hooks (docs/guide/candidates.md)."""
