"""Decode tokens to text one at a time, in whole characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# The decoder's replacement for bytes that are not UTF-8; at the end of a text, also for an incomplete character.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """An incremental decoder: the concatenated results of `add` and `end` are the text of all tokens.

    A character of several bytes may extend over several tokens, so incomplete characters are held back. Some decoders
    write the first token of a text differently (SentencePiece's spaces), so the tokens before are decoded as well.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        # The last tokens whose text was returned, on which later text may depend; and the tokens after them.
        self._before: list[int] = []
        self._pending: list[int] = []
        self._given = 0

    def add(self, token: int) -> str:
        """Add a token, and return the new text that later tokens cannot change."""
        self._pending.append(token)
        text = self._text()
        # Only a replacement character at the end may still become another character.
        certain = text.removesuffix(REPLACEMENT)
        new, self._given = certain[self._given :], max(self._given, len(certain))
        if certain == text:
            self._before, self._pending, self._given = self._pending, [], 0
        return new

    def end(self) -> str:
        """Return the text that was held back: an incomplete character, as the replacement character."""
        return self._text()[self._given :]

    def _text(self) -> str:
        return self._decode(self._before + self._pending)[len(self._decode(self._before)) :]
