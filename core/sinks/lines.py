"""Lines of text for a terminal: broken between words, never in one, and bars of block characters."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from lockstep.core.sinks.visible import visible

if TYPE_CHECKING:
    from rich.console import Console

# Eighths of a block, from none to seven.
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")


def wrapped(line: str, width: int, begin: str = "", hang: int | None = None) -> str:
    """Break a line between words; a word that is wider than `width` stays whole.

    begin: stands before the first line. hang: columns by which the others are indented, None for as many as `begin`.
    """
    return textwrap.fill(
        line,
        width,
        initial_indent=begin,
        subsequent_indent=" " * (len(begin) if hang is None else hang),
        break_on_hyphens=False,
        break_long_words=False,
    )


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print text in lines that fit the console; a line that is continued is indented by two columns more."""
    for line in visible(text).split("\n"):
        if len(line) > console.width:
            words = line.lstrip(" ")
            begin = line[: len(line) - len(words)]
            line = wrapped(words, console.width, begin, len(begin) + 2)
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def tell(console: Console, text: str, style: str | None = None) -> None:
    """Print text in lines that fit a terminal; into a file or a pipe in whole lines, which are found by their begin."""
    if console.is_terminal:
        say(console, text, style)
    else:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def bar(share: float, width: int, ascii_only: bool) -> str:
    """Draw `share` (0 to 1; more is drawn as 1) as a bar of `width` columns, filled up with spaces.

    A share above 0 shows something. ascii_only: for terminals that have no block characters.
    """
    full = max(0.0, min(1.0, share)) * width
    if ascii_only:
        return ("#" * max(round(full), int(share > 0))).ljust(width)
    eighths = max(round(full * 8), int(share > 0))
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).ljust(width)
