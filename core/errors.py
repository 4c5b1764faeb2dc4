"""The one exception that is meant for the person at the keyboard."""

from __future__ import annotations

import re

# Words are cut in their middle, so that a line stays one that a person reads.
_LONG_WORD = re.compile(r"\S{241,}")
_HEAD, _TAIL = 80, 40


class UserError(ValueError):
    """An error that the user can put right: what is wrong, where, and what would be right, in one line.

    The command line prints it without a traceback and ends with exit code 2. Several things that are wrong at once are
    several `lines`. The user's own text may stand in them as it is: it cannot break a line or reach the terminal as a
    command to it.
    """

    def __init__(self, *lines: str) -> None:
        super().__init__(*map(printable, lines))

    @property
    def lines(self) -> tuple[str, ...]:
        """The faults, one a line."""
        return self.args

    def __str__(self) -> str:
        return "\n".join(self.args)


def printable(text: str) -> str:
    """Return `text` with what is no visible character escaped as in Python's strings, and very long words cut short."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return _LONG_WORD.sub(lambda word: f"{word[0][:_HEAD]}…{word[0][-_TAIL:]}", shown)
