"""Folders of runs on a tiny data set: the fixtures of parity_tests/loop."""

from lockstep.parity_tests.loop.conftest import folder, straight, text, tokens

__all__ = ["folder", "straight", "text", "tokens"]
