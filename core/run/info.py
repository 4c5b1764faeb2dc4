"""run.json: the facts of a run, sealed, and the settings it was made with, to which config.toml is held."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.core.config.schema import RunConfig, flatten
from lockstep.core.errors import UserError
from lockstep.core.files.atomic import leads_out, read_sealed_json, write_sealed_json

# The settings that the run was made with, and those that resumes have changed since (dotted key → text).
SETTINGS, CHANGED = "config", "settings"
# The end of the last process that trained the run before all steps were done: `how` (of ENDINGS), `said`, `time`. None
# while it trains, and so for a killed process, which could not write it.
STOPPED = "stopped"
ENDINGS = ("interrupted", "alarmed", "failed")
_NAMED = 2


def read_info(path: Path) -> dict[str, Any]:
    """Read a run.json. Raises UserError if it cannot be read or is not what was written."""
    info = read_sealed_json(path, indent=2, remedy="put it back as it was written")
    if not isinstance(info.get(SETTINGS), dict):
        raise UserError(f"{path} does not hold the settings of its run ({SETTINGS!r}): another Lockstep wrote it")
    return info


def write_info(path: Path, info: Mapping[str, Any]) -> None:
    """Write a run.json, whole or not at all. Raises UserError if the disk refuses."""
    write_sealed_json(path, dict(info), indent=2)


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return every setting by its dotted key, as JSON has it."""
    settings: dict[str, Any] = json.loads(json.dumps(flatten(config.model_dump())))
    return settings


def require_unchanged(path: Path, info: Mapping[str, Any]) -> None:
    """Raise UserError unless the config.toml at `path` has the run's own settings, in whatever layout."""
    if leads_out(path, path.parent):  # to any file of this machine, whose contents would be shown
        raise UserError(f"{path} is a link that leads out of the run; put the file there")
    try:
        tree = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} was changed after the run was made: not TOML: {error}; {_REMEDY}") from None
    made, stands = info[SETTINGS], flatten(tree)
    differ = [key for key in {**made, **stands} if key not in made or key not in stands or made[key] != stands[key]]
    if differ:
        named = [f"{key} was {_said(made, key)} and is {_said(stands, key)}" for key in differ[:_NAMED]]
        more = [f"{len(differ) - _NAMED} more"] if len(differ) > _NAMED else []
        raise UserError(f"{path} was changed after the run was made: {'; '.join([*named, *more])}; {_REMEDY}")


def _said(settings: Mapping[str, Any], key: str) -> str:
    return repr(settings[key]) if key in settings else "absent"


_REMEDY = f"put it back: run.json holds what it said, under {SETTINGS!r}"
