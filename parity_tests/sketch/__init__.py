"""Sketches and observations."""
