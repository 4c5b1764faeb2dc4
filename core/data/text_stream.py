"""Text out of tokens as they come, never half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Decoding's replacement for bytes that are no UTF-8; at the end of a text, of a character whose rest is still to come.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """An incremental decoder: the joined results of `add` and `end` are the text of all tokens together.

    A character of several bytes may lie across tokens: what may yet become another character is held back. Decoders
    that write a token otherwise at a text's beginning (SentencePiece's spaces) see the tokens before it as well.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        # Tokens whose text was given, as far as what follows may depend on them; and those after them.
        self._before: list[int] = []
        self._pending: list[int] = []
        self._given = 0

    def add(self, token: int) -> str:
        """Return the text that is certain after `token`."""
        self._pending.append(token)
        text = self._text()
        # Bytes before the last, where they are no character, will not become one.
        certain = text.removesuffix(REPLACEMENT)
        new, self._given = certain[self._given :], max(self._given, len(certain))
        if certain == text:
            self._before, self._pending, self._given = self._pending, [], 0
        return new

    def end(self) -> str:
        """Return the text that was held back: half a character, as the replacement character."""
        return self._text()[self._given :]

    def _text(self) -> str:
        return self._decode(self._before + self._pending)[len(self._decode(self._before)) :]
