"""Mutants of a training step as data: where, what and when; which are drawn; what came of them."""
