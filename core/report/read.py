"""Reading a run directory for the report: records, checks, what the run says of itself."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import UserError


@dataclass(frozen=True)
class Run:
    """What the report needs of a run directory besides its checks, which are streamed (`check_lines`).

    records:     one mapping a step, by step; the last line counts where a resumed run wrote a step twice.
    about:       `run.json`, empty if there is none.
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
    """Read all but the checks. Raises UserError if there is no record, or one is broken in the middle."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is not a run directory")
    notes: list[str] = []
    path = run_dir / "records.jsonl"
    if not path.is_file():
        raise UserError(f"{run_dir} has no records.jsonl: there is no run to report on")
    by_step: dict[int, Mapping[str, Any]] = {}
    lines = 0
    for number, record in json_lines(path, notes):
        if not isinstance(record.get("step"), int) or not _is_number(record.get("loss")):
            raise UserError(f"{path}, line {number}: a record has a whole number `step` and a number `loss`")
        by_step[record["step"]] = record
        lines += 1
    if not by_step:
        raise UserError(f"{path} holds no complete record: there is no run to report on")
    if lines > len(by_step):
        doubles = lines - len(by_step)
        notes.append(f"{doubles} steps stand in records.jsonl twice (a resumed run): the last counts.")
    config_text = _text(run_dir / "config.toml", notes)
    return Run(
        path=run_dir,
        records=tuple(by_step[step] for step in sorted(by_step)),
        about=_about(run_dir / "run.json", notes),
        config_text=config_text,
        config=_toml(config_text, notes),
        notes=tuple(notes),
    )


def json_lines(path: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line. A torn last line is left out and noted; another is a UserError."""
    torn: tuple[int, str] | None = None
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            if torn:
                raise UserError(f"{path}, line {torn[0]}: not JSON ({torn[1]})")
            try:
                value = json.loads(raw.decode("utf-8"))
            except ValueError as error:
                torn = (number, str(error))
                continue
            if not isinstance(value, dict):
                raise UserError(f"{path}, line {number}: not a JSON object")
            yield number, value
    if torn:
        notes.append(f"The last line of {path.name} (line {torn[0]}) is torn and was left out.")


def section(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The mapping under `key`, empty if there is none."""
    value = tree.get(key)
    return value if isinstance(value, Mapping) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(path: Path, notes: list[str]) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        notes.append(f"{path.name} could not be read.")
        return ""


def _about(path: Path, notes: list[str]) -> Mapping[str, Any]:
    text = _text(path, notes)
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        notes.append(f"{path.name} is not JSON ({error}).")
        return {}
    return value if isinstance(value, dict) else {}


def _toml(text: str, notes: list[str]) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        notes.append(f"config.toml is not TOML ({error}).")
        return {}
