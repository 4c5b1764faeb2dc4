"""Traces with known answers, real ones of tiny steps, and the command."""
