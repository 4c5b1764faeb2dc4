"""Break the paragraphs of `--help` into lines, for the overview of the commands and for the page of each."""

from __future__ import annotations

import io
import shutil
import textwrap
from typing import TextIO

# Columns that help needs, and those that a paragraph has at most.
NARROWEST, WIDEST = 40, 80


def paragraph_width() -> int:
    """Return the columns of a paragraph on this terminal."""
    return min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)


def wrapped(line: str, width: int, begin: str = "") -> str:
    """Break a line between words; `begin` stands before the first line, and the others are indented as far."""
    return textwrap.fill(
        line,
        width,
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
        break_on_hyphens=False,
        break_long_words=False,
    )


def one_line_each(text: str) -> str:
    """Join the lines of each paragraph of a docstring."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


class HelpPage(io.StringIO):
    """Collect a page of help for `stream` from tyro, which writes a paragraph in one line."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]  # an attribute to typeshed; here nobody can set it
        """The stream's encoding, by which tyro chooses the characters of its boxes."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """Return whether the stream is a terminal, for which tyro uses colours."""
        return self._stream.isatty()

    def text(self) -> str:
        """Return the page with its paragraphs in lines; boxes, indented or drawn, fit the terminal already."""
        width = paragraph_width()
        lines = self.getvalue().splitlines()
        return "".join(f"{wrapped(line, width) if line[:1].isalpha() else line}\n" for line in lines)
