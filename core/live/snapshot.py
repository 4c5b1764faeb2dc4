"""The report of a run as it is now, made anew only where its files have changed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.core.errors import UserError, printable
from lockstep.core.files.jsonl import damage, in_ranges
from lockstep.core.files.lock import is_held
from lockstep.core.live.follow import FollowedLines
from lockstep.core.overview.row import state_of
from lockstep.core.report.build import contents
from lockstep.core.report.checks import Checks
from lockstep.core.report.curves import Json
from lockstep.core.report.read import doubled, require_record, run_of
from lockstep.core.report.text import embed
from lockstep.core.run.info import read_info
from lockstep.core.run.layout import CHECKS, CONFIG, INFO, LISTED, RECORDS

# The least seconds between two makings, and the share of the time that they may take: the run needs the machine.
LEAST, SHARE = 1.0, 0.1
WAITING = "waiting for the first record"
GONE = "the run's folder is gone; waiting for it to come back"


@dataclass(frozen=True)
class Snapshot:
    """The content of the page. number: rises with every change. checks: rises with every change of the checks.

    problem: why nothing, or nothing new, is shown. parts, data: as `Contents` of core/report/build.py. state, why: as
    core/overview/row.py has them. written: when the last record was, in seconds since 1970.
    """

    number: int = 0
    checks: int = 0
    problem: str = WAITING
    title: str = "Lockstep"
    parts: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    state: str = ""
    why: str = ""
    step: int | None = None
    planned: int | None = None
    written: float | None = None

    def answer(self, boot: str, seen_checks: str) -> bytes:
        """Return the snapshot as JSON. seen_checks: the checks that the page has; then their cells are left out.

        boot: names the server that counts.
        """
        data = dict(self.data)
        checks = f"{boot}-{self.checks}"
        if seen_checks == checks:
            data = {key: value for key, value in data.items() if key not in ("heat", "bias")}
        age = None if self.written is None else max(time.time() - self.written, 0.0)
        told = {
            "version": f"{boot}-{self.number}",
            "checks": checks,
            "problem": self.problem,
            "title": self.title,
            "parts": list(self.parts.items()),
            "data": data,
            "state": self.state,
            "why": self.why,
            "step": self.step,
            "planned": self.planned,
            "age": age,
        }
        return embed(told).encode()


class Watched:
    """A run directory that is read repeatedly, by one thread at a time."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.snapshot = Snapshot()
        self._records, self._checks = FollowedLines(run / RECORDS), FollowedLines(run / CHECKS)
        self._by_step: dict[int, Json] = {}
        self._doubles = 0
        self._judged = Checks()
        self._damaged: dict[str, list[int]] = {RECORDS: [], CHECKS: []}
        self._foreign: dict[str, list[int]] = {RECORDS: [], CHECKS: []}
        self._checks_number = 0
        self._due = 0.0
        self._state: tuple[object, ...] = ()

    def look(self) -> Snapshot:
        """Return the run as it is now, or as it was if it was examined a moment ago."""
        started = time.monotonic()
        if started < self._due:
            return self.snapshot
        try:
            self._look()
        except UserError as error:
            self._tell(problem=str(error))
        except Exception as error:  # files that are whole and no run's; the server goes on, and so may the run
            self._tell(problem=f"cannot be shown: {type(error).__name__}: {printable(str(error))}")
        spent = time.monotonic() - started
        self._due = time.monotonic() + max(LEAST, spent / SHARE)
        return self.snapshot

    def _look(self) -> None:
        if not self.run.is_dir():
            self._tell(problem=GONE)
            return
        changed = self._take_records() | self._take_checks()
        status = _status(self.run)
        if not changed and status == self._state:
            return
        self._state = status
        info = _info(self.run)
        state, why = state_of(bool(self._by_step), is_held(self.run), info)
        if not self._by_step:
            self._tell(problem=WAITING, state=state, why=why)
            return
        notes = [f"{damage(Path(name), numbers)}; left out." for name, numbers in self._damaged.items() if numbers]
        notes += [f"{name}: no run writes line {in_ranges(n)}; left out." for name, n in self._foreign.items() if n]
        of_files = [doubled(self._doubles)] if self._doubles else []
        run = run_of(self.run, self._by_step, of_files)
        lost = len(self._damaged[CHECKS]) + len(self._foreign[CHECKS])
        self._judged.damaged = lost + sum(len(one["checks"]) for one in run.about.get("damaged", []))
        found = contents(run, self._judged, notes)
        planned = run.about.get("settings", {}).get("train.steps") or run.config.get("train", {}).get("steps")
        self._tell(
            problem="",
            title=found.title,
            parts=found.parts,
            data=found.data,
            state=state,
            why=why,
            step=run.records[-1]["step"],
            planned=int(planned) if planned else None,
            written=_time(self.run / RECORDS),
        )

    def _take_records(self) -> bool:
        changed = False
        while True:
            news = self._records.news()
            if news.anew:
                self._by_step.clear()
                self._forget_lines(RECORDS)
                self._doubles = 0
            for number, record in news.lines:
                if record is None:
                    self._damaged[RECORDS].append(number)
                    continue
                try:
                    step = require_record(record, RECORDS)
                except UserError:
                    self._foreign[RECORDS].append(number)
                    continue
                self._doubles += step in self._by_step
                self._by_step[step] = record
            changed |= news.anew or bool(news.lines)
            if not news.more:
                return changed

    def _take_checks(self) -> bool:
        changed = False
        while True:
            news = self._checks.news()
            if news.anew:
                self._judged = Checks()
                self._forget_lines(CHECKS)
            for number, check in news.lines:
                if check is None:
                    self._damaged[CHECKS].append(number)
                    continue
                try:
                    self._judged.add(check)
                except (KeyError, TypeError, ValueError, AttributeError):
                    self._foreign[CHECKS].append(number)
            changed |= news.anew or bool(news.lines)
            if not news.more:
                break
        self._checks_number += changed
        return changed

    def _forget_lines(self, name: str) -> None:
        self._damaged[name].clear()
        self._foreign[name].clear()

    def _tell(self, **changes: Any) -> None:
        old = self.snapshot
        fresh = Snapshot(**{**vars(old), **changes, "checks": self._checks_number})
        if fresh != old:
            self.snapshot = Snapshot(**{**vars(fresh), "number": old.number + 1})


def require_watchable(run: Path) -> None:
    """Raise UserError unless `run` is a folder that is a run's, with or without records."""
    if not run.is_dir():
        raise UserError(f"{run} is not a run directory; {LISTED}")
    if not any((run / name).is_file() for name in (INFO, CONFIG, RECORDS)):
        raise UserError(f"{run} has no {INFO}, {CONFIG} or {RECORDS}: there is no run to watch")


def _info(run: Path) -> Mapping[str, Any]:
    try:
        return read_info(run / INFO)
    except UserError:  # the page's notes mention it
        return {}


def _status(run: Path) -> tuple[object, ...]:
    """Return a value that changes as run.json or the sums over checks are written, or training begins or ends."""
    times = tuple(_time(run / name) for name in (INFO, CONFIG, "observations/bias.npz"))
    return (*times, is_held(run))


def _time(path: Path) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None
