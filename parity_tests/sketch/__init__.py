"""Tests of sketches and observations."""
