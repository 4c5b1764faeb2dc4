"""Text of unknown origin on its way to a terminal or into a page of Markdown: shown, never obeyed."""

from __future__ import annotations

import re

# Control characters (C0, DEL, C1) except newline and tab, and marks that change the direction of the text after them.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Return `text` with every control character escaped as in Python's strings."""
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def markdown(text: str) -> str:
    """Escape names from elsewhere in a page of Markdown, so that it can hold neither HTML nor pictures.

    For pages that have none of their own.
    """
    return visible(text).replace("<", "&lt;").replace("![", "!\\[")
