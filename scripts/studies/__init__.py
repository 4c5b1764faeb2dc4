"""Experiments whose results are committed under docs/results. Not part of an installation."""
