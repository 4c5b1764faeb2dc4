"""Checkpoints: their format, readers, and the states of random number generators."""
