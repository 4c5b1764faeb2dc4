"""A process with a line protocol: it reads a job as JSON and writes answers as JSON (core/bench/turns.py)."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import IO, Any

from lockstep.core.bench.suite import in_one_line
from lockstep.core.errors import UserError


def work_in_lines(work: Callable[[dict[str, Any], IO[str]], None]) -> None:
    """Read the job, call `work` with it and the stream of answers; an error becomes an answer."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with answers
    try:
        work(json.loads(sys.stdin.readline()), out)
    except Exception as error:
        if not isinstance(error, UserError):
            traceback.print_exc()
        say({"error": in_one_line(str(error) or type(error).__name__)}, out)


def say(answer: dict[str, Any], out: IO[str]) -> None:
    """Write an answer."""
    out.write(json.dumps(answer) + "\n")
    out.flush()
