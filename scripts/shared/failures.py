"""Print an unexpected error in one line and keep its traceback in a file: the command line never shows one."""

from __future__ import annotations

import tempfile
import traceback

from lockstep.core.errors import UserError, printable

_LONGEST = 500  # most characters of a message


def in_one_line(error: BaseException) -> str:
    """Describe the kind, message and place of `error`; the line names the file with the traceback."""
    trace = traceback.extract_tb(error.__traceback__)
    where = f"{trace[-1].filename}:{trace[-1].lineno}; " if trace else ""
    message = printable(next(iter(str(error).strip().splitlines()), ""))
    kind = type(error).__name__
    try:
        with tempfile.NamedTemporaryFile("w", prefix="lockstep-", suffix=".txt", delete=False) as file:
            traceback.print_exception(error, file=file)
        kept = f"traceback in {file.name}"
    except OSError as reason:
        kept = f"the traceback could not be written: {reason}"
    return f"{kind}{': ' if message else ''}{message} ({where}{kept})"


def in_short(error: BaseException) -> str:
    """Return the first line of the message of `error`, with its kind unless it is written for the user."""
    message = printable(next(iter(str(error).strip().splitlines()), ""))[:_LONGEST]
    return message if isinstance(error, UserError) else f"{type(error).__name__}{': ' if message else ''}{message}"
