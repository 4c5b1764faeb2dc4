"""Gather the evidence of a step from a session, in memory or on disk."""
