"""Lines of text for a terminal: broken between words, never in one, and bars of block characters."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from lockstep.core.sinks.visible import visible

if TYPE_CHECKING:
    from rich.console import Console

# A command that a message gives: it follows a colon, and ends with the message or before a semicolon.
_COMMAND = re.compile(r"(?<!^lockstep: )(?<=: )((?:lockstep|pip|pipx|python|torchrun|scripts/\S+) [^;]+;?)")
# Columns of a terminal that does not report its width.
_USUAL = 80
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


def fitted(line: str, width: int) -> str:
    """Break a line that is wider than `width` between words; lines after the first are indented by two columns more.

    A command in it (`…; continue with: lockstep train --resume RUN`) begins a line of its own. If it is too long for
    one, its lines end with a backslash, so that a shell takes them as they are copied. An indented line that begins
    with `lockstep` is a command as a whole.
    """
    if len(line) <= width:
        return line
    words = line.lstrip(" ")
    begin = line[: len(line) - len(words)]
    if begin and words.startswith("lockstep "):
        return _command_lines(words, width, begin)
    hang = f"{begin}  "
    lines = []
    for number, part in enumerate(_COMMAND.split(words)):
        if number % 2:
            lines.append(_command_lines(part.rstrip(), width, hang))
        elif part.strip():
            lines.append(wrapped(part.strip(), width, hang if lines else begin, len(hang)))
    return "\n".join(lines)


def _command_lines(command: str, width: int, begin: str) -> str:
    """Break a command so that a shell joins it again; one with quotes stays whole, as a break may lie within them."""
    if len(begin + command) <= width or re.search(r"['\"]", command):
        return begin + command
    return wrapped(command, width - 2, begin, len(begin) + 2).replace("\n", " \\\n")


def announce(text: str) -> None:
    """Print text on stdout: in lines that fit a terminal, or as it is into a file or a pipe."""
    _print(visible(text), sys.stdout)


def complain(text: str) -> None:
    """Print `lockstep: text` on stderr: in lines that fit a terminal, or in one line into a file or a pipe."""
    _print(f"lockstep: {visible(text)}", sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    """Print in lines that fit where the stream is a terminal."""
    if stream.isatty():
        width = _columns(stream)
        text = "\n".join(fitted(line, width) for line in text.split("\n"))
    print(text, file=stream, flush=True)


def terminal_width(stream: TextIO) -> int | None:
    """Return the columns of a terminal; None for a file or a pipe."""
    return _columns(stream) if stream.isatty() else None


def _columns(stream: TextIO) -> int:
    """Return the columns of a terminal; COLUMNS sets another number, as for the rest of the output."""
    try:
        return int(os.environ["COLUMNS"])
    except (KeyError, ValueError):
        pass
    try:
        return os.get_terminal_size(stream.fileno()).columns or _USUAL
    except (OSError, ValueError):
        return _USUAL


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print text in lines that fit the console; a line that is continued is indented by two columns more."""
    for line in visible(text).split("\n"):
        console.print(fitted(line, console.width), style=style, markup=False, highlight=False, soft_wrap=True)


def tell(console: Console, text: str, style: str | None = None) -> None:
    """Print text in lines that fit a terminal.

    Into a file or a pipe as whole lines, which a search finds by their start.
    """
    if console.is_terminal:
        say(console, text, style)
    else:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_if_read(console: Console, words: Callable[[], None]) -> None:
    """Call `words`, which prints to the console. If its reader has gone, this and all later output is dropped."""
    try:
        words()
    except OSError:
        # As Python's manual recommends for a closed pipe, so that buffered output does not fail again at exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, console.file.fileno())
        os.close(nowhere)


def bar(share: float, width: int, ascii_only: bool) -> str:
    """Draw `share` (0 to 1; more is drawn as 1) as a bar of `width` columns, filled up with spaces.

    A share above 0 draws at least the smallest mark. ascii_only: for terminals without block characters.
    """
    full = max(0.0, min(1.0, share)) * width
    if ascii_only:
        return ("#" * max(round(full), int(share > 0))).ljust(width)
    eighths = max(round(full * 8), int(share > 0))
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).ljust(width)
