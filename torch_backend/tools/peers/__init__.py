"""Contenders of `lockstep bench peers` and `bench data`: the same work in other trainers' code."""
