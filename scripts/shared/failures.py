"""Print an unforeseen error in one line: the command line never shows a traceback, and never loses one."""

from __future__ import annotations

import tempfile
import traceback

from lockstep.core.errors import UserError, printable

_LONGEST = 500  # characters of a message that is kept


def in_one_line(error: BaseException) -> str:
    """Describe kind, message and place of `error`; the traceback goes into a file that the line names."""
    trace = traceback.extract_tb(error.__traceback__)
    where = f"{trace[-1].filename}:{trace[-1].lineno}; " if trace else ""
    message = printable(next(iter(str(error).strip().splitlines()), ""))
    kind = type(error).__name__
    try:
        with tempfile.NamedTemporaryFile("w", prefix="lockstep-", suffix=".txt", delete=False) as file:
            traceback.print_exception(error, file=file)
        kept = f"traceback in {file.name}"
    except OSError as reason:
        kept = f"its traceback could not be kept: {reason}"
    return f"{kind}{': ' if message else ''}{message} ({where}{kept})"


def in_short(error: BaseException) -> str:
    """Return the first line of the message of `error`, with its kind unless it is written for the user."""
    message = printable(next(iter(str(error).strip().splitlines()), ""))[:_LONGEST]
    return message if isinstance(error, UserError) else f"{type(error).__name__}{': ' if message else ''}{message}"
