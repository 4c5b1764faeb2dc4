"""Reading a run directory for the report: records, checks, and run.json."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import leads_out
from lockstep.core.files.jsonl import damage, in_ranges, scan_lines
from lockstep.core.run.info import read_info, require_unchanged
from lockstep.core.run.layout import LISTED


@dataclass(frozen=True)
class Run:
    """A run directory's contents for the report, except its checks, which are streamed (`check_lines`).

    records:     one mapping a step, by step; the last line counts where a resumed run wrote a step twice.
    about:       `run.json`, empty if there is none or it is damaged.
    config_text: `config.toml` as it stands. config: the same, parsed; empty if it does not parse.
    notes:       what a reader of the page should know about the files.
    """

    path: Path
    records: tuple[Mapping[str, Any], ...]
    about: Mapping[str, Any]
    config_text: str
    config: Mapping[str, Any]
    notes: tuple[str, ...]


def read_run(run_dir: Path) -> Run:
    """Read all but the checks. Raises UserError if there is no record, or one that is intact is none of a run."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is not a run directory; {LISTED}")
    notes: list[str] = []
    path = run_dir / "records.jsonl"
    if not path.is_file():
        raise UserError(f"{run_dir} has no records.jsonl: there is no run to report on")
    by_step: dict[int, Mapping[str, Any]] = {}
    lines = 0
    for number, record in json_lines(path, notes, []):
        by_step[require_record(record, f"{path}, line {number}")] = record
        lines += 1
    if not by_step:
        raise UserError(f"{path} holds no complete record: there is no run to report on")
    if lines > len(by_step):
        notes.append(doubled(lines - len(by_step)))
    return run_of(run_dir, by_step, notes)


def run_of(run_dir: Path, by_step: Mapping[int, Mapping[str, Any]], notes: list[str]) -> Run:
    """Return the run of these records, with run.json and config.toml; a line for each damage is added to `notes`."""
    config_text = _text(run_dir / "config.toml", notes)
    return Run(
        path=run_dir,
        records=tuple(by_step[step] for step in sorted(by_step)),
        about=_about(run_dir, notes),
        config_text=config_text,
        config=_toml(config_text, notes),
        notes=tuple(notes),
    )


def require_record(record: Mapping[str, Any], where: str) -> int:
    """Return the step of a record. Raises UserError, which begins with `where`, if it is none."""
    step = record.get("step")
    if not isinstance(step, int) or not _is_number(record.get("loss")):
        raise UserError(f"{where}: a record has a whole number `step` and a number `loss`")
    return step


def doubled(steps: int) -> str:
    """Return the note on steps of which there are two records."""
    return f"{steps} steps stand in records.jsonl twice (a resumed run): the last counts."


def json_lines(path: Path, notes: list[str], damaged: list[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of each line that is what was written.

    `notes` gets the others, and `damaged` their numbers; a torn last line is none of these.
    """
    for line in scan_lines(path):
        if line.value is not None:
            yield line.number, line.value
        elif line.torn:
            notes.append(f"The last line of {path.name} (line {line.number}) is torn and was left out.")
        else:
            damaged.append(line.number)
    if damaged:
        notes.append(f"{damage(Path(path.name), damaged)}; left out.")


def section(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping under `key`, empty if there is none."""
    value = tree.get(key)
    return value if isinstance(value, Mapping) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(path: Path, notes: list[str]) -> str:
    # The page shows it whole, and may be sent on: not any file of this machine that a link names.
    if leads_out(path, path.parent):
        notes.append(f"{path.name} is a link that leads out of the run, and was left out.")
        return ""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        notes.append(f"{path.name} could not be read.")
        return ""


def _about(run_dir: Path, notes: list[str]) -> Mapping[str, Any]:
    """Read run.json, empty if it is damaged; add to `notes` if config.toml is not the run's."""
    about: Mapping[str, Any] = {}
    try:
        about = read_info(run_dir / "run.json")
        require_unchanged(run_dir / "config.toml", about)
    except UserError as error:
        notes.append(f"{error}.")
    for lost in about.get("damaged", []):
        numbers = "; ".join(f"{name} {in_ranges(lost[name])}" for name in ("records", "checks") if lost[name])
        notes.append(f"Damaged lines were set aside in {lost['path']} when the run was resumed: {numbers}.")
    return about


def _toml(text: str, notes: list[str]) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        notes.append(f"config.toml is not TOML ({error}).")
        return {}
