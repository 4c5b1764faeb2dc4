"""`lockstep`, reporting when a given file operation is due, so that scripts/studies/chaos.py can kill it there.

    LOCKSTEP_MOMENT='{…}' python -m lockstep.scripts.studies.killed_at train …

Python reports every file operation before it is made (audit events, PEP 578); no part of Lockstep is replaced.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

VARIABLE = "LOCKSTEP_MOMENT"
VERBS = {
    "open": "write",
    "os.rename": "rename",
    "os.mkdir": "mkdir",
    "os.remove": "remove",
    "os.rmdir": "rmdir",
}
# Delay in seconds before and after each call of a slowed thread.
PAUSE = 1e-4
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Moment:
    """The moment of a kill: an operation of rank 0 under `folder`.

    Operations are `VERB PATH`, with paths below the folder: `write`, `read`, `rename FROM TO`, `mkdir`, `remove`,
    `rmdir`.
    start: an expression; counting begins at its `times`-th match. further: number of operations after that match.
    at_once: the process kills itself before the operation; else it continues and is killed from outside.
    slowly: that thread is slowed from there on, so that a kill can also fall within the writing of a file.
    told: a named pipe that gets a line of JSON: `operation`, `pid`.
    """

    folder: str
    told: str
    start: str = "."
    times: int = 1
    further: int = 0
    at_once: bool = False
    slowly: bool = False

    def environment(self) -> dict[str, str]:
        """Return this process's environment, and the moment."""
        return os.environ | {VARIABLE: json.dumps(asdict(self))}


def watch(moment: Moment) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook that reports the moment and, with `at_once`, ends the process there."""
    pipe = os.open(moment.told, os.O_WRONLY)
    start, matched, after = re.compile(moment.start), 0, -1

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal matched, after
        if event not in VERBS or after >= moment.further:
            return
        operation = _in_words(event, arguments, moment.folder)
        if operation is None:
            return
        if after >= 0:
            after += 1
        elif start.search(operation):
            matched += 1
            after = 0 if matched == moment.times else -1
        if after == moment.further:
            os.write(pipe, json.dumps({"operation": operation, "pid": os.getpid()}).encode() + b"\n")
            if moment.at_once:
                os.kill(os.getpid(), signal.SIGKILL)
            if moment.slowly:
                sys.setprofile(lambda *_: time.sleep(PAUSE))

    return hook


def _in_words(event: str, arguments: tuple[Any, ...], folder: str) -> str | None:
    """Return `VERB PATH`, or None if the operation is elsewhere. Deleting a tree names files in an open folder."""
    verb, paths = VERBS[event], arguments[: 2 if event == "os.rename" else 1]
    if not all(isinstance(path, str | os.PathLike) for path in paths):
        return None
    named = [os.fspath(path) for path in paths]
    if event in ("os.remove", "os.rmdir") and arguments[1] >= 0:
        return f"{verb} {named[0]}"
    if not named[0].startswith(folder):
        return None
    if event == "open":
        _, mode, flags = arguments
        writes = flags & _WRITES if mode is None else set(mode) & set("wax+")
        verb = "write" if writes else "read"
    return " ".join([verb, *(name.removeprefix(folder).lstrip("/") for name in named)])


def main() -> None:
    """Run the command, with the hook if the environment names a moment."""
    text = os.environ.get(VARIABLE)
    if text is not None and os.environ.get("RANK", "0") == "0":
        sys.addaudithook(watch(Moment(**json.loads(text))))
    from lockstep.scripts import cli

    cli.main()


if __name__ == "__main__":
    main()
