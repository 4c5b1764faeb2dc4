"""Loops as users write them, each with the lines by which Lockstep watches it."""
