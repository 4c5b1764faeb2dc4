"""Peers of `lockstep bench peers`: the same step, written as others write it."""
