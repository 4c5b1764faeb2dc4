"""The outcome of a call, and whether a call may have it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lockstep.core.errors import printable
from lockstep.parity_tests.cli.fuzz.cases import SETTINGS, Case, options_of
from lockstep.parity_tests.cli.fuzz.sandbox import STEPS, Left
from lockstep.scripts.cli import COMMANDS

OUTCOMES = ("done", "accepted", "disagreed", "shown", "refused", "WRONG")
LONGEST = 300
MOST_LINES = 12
# Names that Python gives, not the user; what somebody else's module raised may say so.
_CLASS = re.compile(r"\b\w*[a-z](Error|Exception|Warning)\b")
_SOMEBODY_ELSES = re.compile(
    r"(importing .* failed|calling .*\(\) failed|the check could not run|the replay could not run)"
)
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_KNOWN = {word for key in SETTINGS for word in (key, key.replace("_", "-"))} | {
    name for command in COMMANDS for name in options_of(command)
}
_WORDS = ("CONFIG", "RUN", "PATH", "run file", "lockstep --help", "WORLD_SIZE", "RANK", "stdout", "COLUMNS", "TMPDIR")


def judge(case: Case, left: Left) -> tuple[str, str]:
    """(outcome, what is wrong with it): one of `OUTCOMES`, and words if it is WRONG."""
    faults = list(_faults(case, left))
    if faults:
        return "WRONG", "; ".join(faults)
    if left.reached:
        return "accepted", ""
    if left.code == 2 and not case.argv:
        return "shown", ""
    if left.code == 2:
        return "refused", ""
    if left.code == 1:
        return "disagreed", ""
    return ("shown" if not left.changed and left.done.out else "done"), ""


def _faults(case: Case, left: Left) -> Iterator[str]:
    if left.hung:
        yield "did not end in time"
        return
    if left.raised:
        yield f"raised {left.raised}"
        return
    said = left.done.out + left.done.err
    if "Traceback" in said:
        yield "a traceback"
    if left.aside:
        yield f"an error that nobody foresaw: {left.done.err.strip()[:400]}"
    for line in left.done.err.splitlines():
        yield from _faults_of_line(line, case)
    if left.reached:
        return
    if left.code not in (0, 1, 2, 130):
        yield f"exit code {left.code}"
    if left.code == 2 and case.argv:
        lines = left.done.err.splitlines()
        if not lines and case.stdout in ("captured", "closed"):
            yield "refused without a word"
        if len(lines) > MOST_LINES:
            yield f"{len(lines)} lines"
        # Where it cannot say what it does, it ends in the midst of it, and so does a run of absurd but valid settings.
        begun = any("not finite" in line for line in lines)
        if left.changed and not begun and case.stdout not in ("full", "broken"):
            yield f"refused, and yet {', '.join(left.changed[:5])}"
    if left.code in (0, 130) and case.argv[:1] == ("train",):
        yield from _faults_of_run(left)


def _faults_of_line(line: str, case: Case) -> Iterator[str]:
    if not line.startswith("lockstep: "):
        yield f"not a line of lockstep: {line[:200]!r}"
        return
    plain = line.removeprefix("lockstep: ")
    if len(line) > LONGEST:
        yield f"{len(line)} characters in a line: {line[:100]!r}…"
    if _UNPRINTABLE.search(line):
        yield f"control characters in {line[:200]!r}"
    if (name := _CLASS.search(plain)) and not _SOMEBODY_ELSES.search(plain):
        yield f"{name[0]} in {line[:200]!r}"
    if not any(word in plain for word in _names(case)):
        yield f"names neither flag nor key nor file: {line[:200]!r}"


def _faults_of_run(left: Left) -> Iterator[str]:
    """Check that a run is a whole one: settings, facts, records of its steps and a checkpoint."""
    runs = {
        path.rpartition("/")[0] for path in left.changed if path.endswith("/records.jsonl") and "branches" not in path
    }
    for run in runs:
        for name in ("config.toml", "run.json", "checkpoints"):
            if not any(path.startswith(f"{run}/{name}") for path in left.changed) and not run.startswith("runs/"):
                yield f"{run} has no {name} after {STEPS} steps"


def _names(case: Case) -> set[str]:
    """List the names that a message may contain: flags, keys, files and commands, Lockstep's or the user's."""
    words = {part for word in case.argv for part in (word, word.lstrip("-"), *re.split("[=:]", word.lstrip("-")))}
    parts = words | {word.replace("-", "_") for word in words}
    own = {printable(shown).strip("'\"")[:40] for part in parts if part for shown in (part, repr(part))}
    return {word for word in own if word} | {"''", "' '"} | _KNOWN | set(_WORDS) | {name for name, _ in case.files}
