"""Shared by both backends: schema, shapes, numbers, data and the parity engine. Imports neither torch nor jax."""
