"""Break the paragraphs of `--help` into lines, for the overview of the commands and for the page of each."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Sequence
from typing import TextIO

from lockstep.core.sinks.lines import wrapped

# Fewest columns of a help page, and most columns of a paragraph.
NARROWEST, WIDEST = 40, 80
# A terminal's colours, and the first characters of a box, which tyro draws or, without box characters, indents.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_BEGINS_A_BOX = re.compile(r"╭| (positional arguments|options|[a-z]+ options) *$")
_EMPTY_IN_A_BOX = re.compile("│ +│$")


def paragraph_width() -> int:
    """Return the columns of a paragraph on this terminal."""
    return min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)


def one_line_each(text: str) -> str:
    """Join the lines of each paragraph of a docstring."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


class HelpPage(io.StringIO):
    """A help page for `stream`, collected from tyro, which writes each paragraph in one line."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]  # an attribute in typeshed; read-only here
        """The stream's encoding; tyro chooses the characters of its boxes by it."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """Return whether the stream is a terminal, for which tyro uses colours."""
        return self._stream.isatty()

    def text(self, examples: Sequence[tuple[str, str]] = (), last: str = "") -> str:
        """Return the page with its paragraphs broken into lines; boxes already fit the terminal.

        examples: commands, each with its effect; they stand before the first box. last: a paragraph at the end.
        """
        width = paragraph_width()
        lines = [line for line in self.getvalue().splitlines() if not _EMPTY_IN_A_BOX.match(_COLOURS.sub("", line))]
        first = next((n for n, line in enumerate(lines) if _BEGINS_A_BOX.match(_COLOURS.sub("", line))), len(lines))
        lines[first:first] = example_lines(examples, width)
        # Colours of a paragraph, as of `usage:`, would count as columns.
        plain = [_COLOURS.sub("", line) for line in lines]
        page = [wrapped(text, width) if text[:1].isalpha() else line for text, line in zip(plain, lines, strict=True)]
        return "".join(f"{line}\n" for line in [*page, *([wrapped(last, width)] if last else [])])


def example_lines(examples: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Return lines for examples: a command each, with its effect beside it, or below it on a narrow terminal."""
    if not examples:
        return []
    column = max(len(command) for command, _ in examples) + 2
    lines = ["examples:" if len(examples) > 1 else "example:"]
    for command, does in examples:
        beside = f"  {command:<{column}}# {does}"
        if not does:
            lines.append(f"  {command}")
        elif max(len(f"  {c:<{column}}# {d}") for c, d in examples) <= width:
            lines.append(beside)
        else:
            lines += [wrapped(does, width, "  # "), f"  {command}"]
    return [*lines, ""]
