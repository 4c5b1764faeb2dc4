"""A run as a row: its state, how far it has come, and the settings that it was made with."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.core.config.schema import flatten
from lockstep.core.errors import UserError, printable
from lockstep.core.files.atomic import leads_out
from lockstep.core.files.lock import is_held
from lockstep.core.overview.tail import Tail, is_whole, read_tail
from lockstep.core.overview.verdicts import count_verdicts, overall
from lockstep.core.run.history import before_left, branch_of, branches_begun, in_words, settings_at
from lockstep.core.run.info import SETTINGS, STOPPED, read_info
from lockstep.core.run.layout import CHECKS, CONFIG, INFO, RECORDS

RUNNING, ENDED, STOPPED_EARLY, FAILED, KILLED = "running", "ended", "stopped", "failed", "killed"
NOT_BEGUN, LEFT, UNKNOWN = "not begun", "left", "unknown"
STATES = (RUNNING, ENDED, STOPPED_EARLY, FAILED, KILLED, NOT_BEGUN, LEFT, UNKNOWN)
_ENDINGS = {"interrupted": STOPPED_EARLY, "alarmed": STOPPED_EARLY, "failed": FAILED}
# Characters of a run's own words that are kept.
_LONGEST = 300
# Settings in which two runs may differ without being different.
_NOT_COMPARED = ("name",)


@dataclass(frozen=True)
class Row:
    """A run as `lockstep runs` shows it. All text in it may come from anybody.

    path: relative to the folder that was searched. name: what the run calls itself. state: of `STATES`. why: what ended
    it, if that is known. created: as run.json has it. tail: the end of its records. planned: steps of the whole run.
    checks: how many checks have each verdict. settings: values in force, by dotted key. branch: the number that the run
    is on, 1 if none was begun on purpose. history: what changed it on the way, in words. left: folders of steps that a
    resume or a rollback left behind. problems: what could not be read.
    """

    path: str
    name: str = ""
    state: str = UNKNOWN
    why: str = ""
    created: str = ""
    tail: Tail = field(default_factory=Tail)
    planned: int | None = None
    checks: Counter[str] = field(default_factory=Counter)
    settings: Mapping[str, Any] = field(default_factory=dict)
    branch: int = 1
    history: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The verdict over all checks, or `not checked`."""
        return overall(self.checks)


def read_row(folder: Path, path: Path) -> Row:
    """Return the row of the run at `folder`/`path`; what is damaged or foreign there is a problem of the row."""
    run, problems = folder / path, []
    info: Mapping[str, Any] = {}
    try:
        if leads_out(run / INFO, run):
            raise UserError(f"{INFO} is a link that leads out of the run")
        info = read_info(run / INFO)
    except UserError as error:
        problems.append(_within(run, error))
    tail, checks = Tail(), Counter[str]()
    try:
        tail = read_tail(run / RECORDS)
    except UserError as error:
        problems.append(_within(run, error))
    try:
        checks = count_verdicts(run / CHECKS)
    except UserError as error:
        problems.append(_within(run, error))
    if tail.damaged:
        problems.append(f"{tail.damaged} of the last lines of {RECORDS} are damaged")
    row = Row(str(path), name=run.resolve().name, tail=tail, checks=checks, settings=_settings_of_file(run, info))
    try:
        row = _told(row, run, info)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        problems.append(f"{INFO} is no run's: {type(error).__name__}")
    return replace(row, problems=tuple(problems))


def rows_of_branches(folder: Path, row: Row) -> list[Row]:
    """Return a row for each folder of steps that the run left behind, with the settings that were in force there."""
    found = []
    for name in row.left:
        branch = folder / row.path / name
        try:
            info = read_info(folder / row.path / INFO)
            told = replace(row, settings=_in_force(before_left(info, name)), branch=branch_of(before_left(info, name)))
            found.append(
                replace(
                    told,
                    path=f"{row.path}/{name}",
                    name=Path(name).name,
                    state=LEFT,
                    why="",
                    tail=read_tail(branch / RECORDS),
                    checks=count_verdicts(branch / CHECKS),
                    history=(),
                    left=(),
                    problems=(),
                )
            )
        except (UserError, KeyError, TypeError, ValueError, AttributeError) as error:
            found.append(Row(f"{row.path}/{name}", state=UNKNOWN, problems=(printable(str(error)),)))
    return found


def _told(row: Row, run: Path, info: Mapping[str, Any]) -> Row:
    """Return the row with the facts of run.json; without one, with those of the other files."""
    state, why = state_of(row.tail.step is not None, is_held(run), info)
    settings = _in_force(info) if info else row.settings
    planned = settings.get("train.steps")
    begun = branches_begun(info)
    resumes = info.get("resumes", [])
    left = tuple(str(branch["path"]) for branch in info.get("branches", []))
    for lost in info.get("damaged", []):
        row.checks["damaged"] += len(lost["checks"])
    back = [f"set back to step {r['step']:,}" for r in resumes if "left" in r and "branch" not in r]
    return replace(
        row,
        name=str(info.get("name") or settings.get("name") or row.name)[:_LONGEST],
        state=state,
        why=why,
        created=str(info.get("created") or "")[:_LONGEST],
        planned=planned if is_whole(planned) else None,
        settings={key: value for key, value in settings.items() if key not in _NOT_COMPARED},
        branch=branch_of(info),
        history=tuple([*map(in_words, begun), *back]),
        left=tuple(path for path in left if _is_branch(path)),
    )


def _is_branch(path: str) -> bool:
    kind, _, number = path.partition("/")
    return kind == "branches" and number.isascii() and number.isdigit()


def state_of(begun: bool, held: bool | None, info: Mapping[str, Any]) -> tuple[str, str]:
    """Return the state of a run and what ended it.

    begun: whether it has a record. held: whether a process has its lock, None if unknown. info: run.json, empty
    if it is damaged. Raises KeyError, TypeError or AttributeError if that is no run's.
    """
    if held:
        return RUNNING, ""
    if info.get("finished"):
        return ENDED, ""
    if not info or held is None:
        return UNKNOWN, ""
    if stopped := info.get(STOPPED):
        said = str(stopped.get("said") or "")[:_LONGEST]
        return _ENDINGS[stopped["how"]], said or ("Ctrl-C" if stopped["how"] == "interrupted" else "")
    if not begun:
        return NOT_BEGUN, ""
    # Runs of earlier versions do not have the key: nobody knows how they ended.
    return (KILLED, "") if STOPPED in info else (STOPPED_EARLY, "")


def _in_force(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in force now: those that the run was made with, and what resumes have changed since."""
    made = dict(info[SETTINGS])
    return made | {key: _as(made.get(key), text) for key, text in settings_at(info).items()}


def _as(value: Any, text: Any) -> Any:
    """Return a setting that a resume changed, which is text, as the kind of value that it was."""
    if isinstance(value, bool) and text in ("true", "false"):
        return text == "true"
    if isinstance(value, int | float) and not isinstance(value, bool):
        for kind in (int, float):
            try:
                return kind(text)
            except (ValueError, TypeError):
                continue
    return text


def _settings_of_file(run: Path, info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in config.toml where run.json is lost; none if that cannot be read either."""
    if info or leads_out(run / CONFIG, run):
        return {}
    try:
        return flatten(tomllib.loads((run / CONFIG).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError):
        return {}


def _within(run: Path, error: UserError) -> str:
    """Return the words of an error, with names of files as they stand in the run."""
    return str(error).replace(f"{run}/", "")
