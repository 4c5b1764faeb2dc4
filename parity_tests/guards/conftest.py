"""Folders of runs on a tiny data set, as the tests of the loop have them."""

from lockstep.parity_tests.loop.conftest import folder, straight, text, tokens

__all__ = ["folder", "straight", "text", "tokens"]
