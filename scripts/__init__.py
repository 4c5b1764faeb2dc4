"""Thin entry points: the only place where a backend is chosen by name."""
