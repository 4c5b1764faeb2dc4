"""The plan that decides a sweep's results, in its folder, which goes on with the same sweep, and refuses another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.config.file import dump_config, load_config
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.files.atomic import canonical_json, read_sealed_json, write_atomically, write_sealed_json
from lockstep.core.files.new_folder import new_folder
from lockstep.core.run.info import settings_of
from lockstep.core.sweep.propose import Sampling
from lockstep.core.sweep.prune import NONE
from lockstep.core.sweep.space import Point
from lockstep.core.sweep.widths import settings_of as settings_of_width

ABOUT, CONFIG = "sweep.json", "config.toml"
SCHEMA = 1
# Differences that a refusal names.
_NAMED = 3


@dataclass(frozen=True)
class Arm:
    """A width of a sweep, or the whole sweep if no widths are given. width: None then. settings: of the width."""

    width: int | None
    settings: Point

    @property
    def study(self) -> str:
        """Return the name of its study in the journal."""
        return "sweep" if self.width is None else f"width {self.width}"

    def trial(self, number: int) -> str:
        """Return the name of a trial, and of its run."""
        return f"trial_{number:03d}" if self.width is None else f"width_{self.width}_trial_{number:03d}"


@dataclass(frozen=True)
class Plan:
    """The plan of a sweep, without its folder. config: of every trial, before its own settings.

    backend: as `lockstep train --backend` takes it, empty for torch. per_round: trials proposed together, of each
    width. threads: CPU threads of a trial, 0 = as the environment has it.
    """

    config: RunConfig
    sampling: Sampling
    pruner: str = NONE
    per_round: int = 4
    widths: tuple[int, ...] = ()
    width_rule: str = ""
    backend: str = ""
    threads: int = 0

    @property
    def in_rounds(self) -> bool:
        """Return whether later trials depend on what earlier ones have shown."""
        return self.sampling.adapts or self.pruner != NONE

    @property
    def rounds(self) -> list[tuple[int, int]]:
        """Return the trials of each round, as first number and the number after the last."""
        size = self.per_round if self.in_rounds else self.sampling.trials
        return [(at, min(at + size, self.sampling.trials)) for at in range(0, self.sampling.trials, size)]

    @property
    def arms(self) -> list[Arm]:
        """Return the widths; one arm without a width where none are given. Raises UserError as `settings_of`."""
        if not self.widths:
            return [Arm(None, {})]
        return [Arm(w, settings_of_width(self.config, w, self.widths, self.width_rule)) for w in self.widths]

    def about(self) -> dict[str, Any]:
        """Return what decides the results, as JSON has it; the number of trials may grow, and stands beside."""
        return {
            "schema": SCHEMA,
            "vary": [one.text for one in self.sampling.varied],
            "sampler": self.sampling.sampler,
            "seed": self.sampling.seed,
            "pruner": self.pruner,
            "round": self.per_round if self.in_rounds else 0,
            "widths": list(self.widths),
            "width_rule": self.width_rule,
            "backend": self.backend,
            "threads": self.threads,
            "config": settings_of(self.config),
        }

    @property
    def identity(self) -> str:
        """Return a digest of what decides the results."""
        return hashlib.sha256(canonical_json(self.about())).hexdigest()


def is_sweep(folder: Path) -> bool:
    """Return whether a folder holds a sweep."""
    return (folder / ABOUT).is_file()


def check_folder(folder: Path, plan: Plan) -> bool:
    """Return whether the folder holds this sweep already. Raises UserError if it holds anything else."""
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        raise UserError(f"{folder} is a file, not a folder for a sweep")
    if not is_sweep(folder):
        if folder.is_dir() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty and holds no sweep: name another folder with --out")
        return False
    there = read_sealed_json(folder / ABOUT, indent=2, remedy="put it back as it was written, or name another folder")
    differ = _differences(there, plan.about())
    if differ:
        more = f"; {len(differ) - _NAMED} more" if len(differ) > _NAMED else ""
        raise UserError(
            f"{folder} holds another sweep: {'; '.join(differ[:_NAMED])}{more}; name another folder (--out)"
        )
    _require_config(folder / CONFIG, plan.config)
    trials = there.get("trials")
    if not isinstance(trials, int) or trials > plan.sampling.trials:
        raise UserError(f"{folder} holds {trials} trials, and {plan.sampling.trials} are asked for: trials only grow")
    return True


def _require_config(path: Path, config: RunConfig) -> None:
    """Raise UserError unless the configuration that trials are made from is there as it was written."""
    try:
        same = settings_of(load_config(path)) == settings_of(config)
    except UserError as error:
        raise UserError(f"{error.lines[0]}; put it back as it was written, or name another folder (--out)") from None
    if not same:
        raise UserError(f"{path} was changed after the sweep was made: put it back, or name another folder (--out)")


def _differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    flat = [{**one, **{str(k): v for k, v in dict(one.get("config") or {}).items()}} for one in (there, now)]
    keys = [key for key in {**flat[1], **flat[0]} if key not in ("config", "trials")]
    return [
        f"{key} was {_said(flat[0], key)} and is {_said(flat[1], key)}"
        for key in keys
        if flat[0].get(key) != flat[1].get(key)
    ]


def _said(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key, "absent")
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else repr(value)


def write_plan(folder: Path, plan: Plan) -> None:
    """Make the folder of a new sweep, whole or not at all; of one that is there, note how many trials it has now."""
    about = {**plan.about(), "trials": plan.sampling.trials}
    if is_sweep(folder):
        write_sealed_json(folder / ABOUT, about, indent=2)
        return
    if folder.is_dir():
        try:
            folder.rmdir()
        except OSError as error:  # a place where a disk is mounted, above all
            raise UserError(
                f"cannot make {folder} anew: {error.strerror or error}; name a folder below it (--out {folder}/NAME)"
            ) from error
    with new_folder(folder) as made:
        made.mkdir()
        write_atomically(made / CONFIG, [dump_config(plan.config).encode()])
        write_sealed_json(made / ABOUT, about, indent=2)
