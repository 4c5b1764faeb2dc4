"""Run exhibits, each with the bug and without, and compare the findings with the expected ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.errors import UserError, printable
from lockstep.scripts.museum.environments import folder_of, path_with
from lockstep.scripts.museum.exhibit import SIDES, Exhibit, Side

LOOPS = "lockstep.scripts.museum.loops"
LONGEST_S = 900.0


@dataclass(frozen=True)
class Told:
    """An exhibit, and the results of both its runs."""

    exhibit: Exhibit
    shipped: Mapping[str, Any]
    fixed: Mapping[str, Any]

    @property
    def caught(self) -> bool:
        """Return whether the bug was found in the first step in which it acts, and named as expected."""
        e, found = self.exhibit, self.shipped
        return (
            found["verdict"] == "disagreed"
            and found["step"] == e.acts_at
            and e.stage in found["stages"]
            and bool(re.search(e.words, found["words"]))
        )

    @property
    def as_expected(self) -> bool:
        """Return whether the bug was caught or missed as the exhibit declares, and the other run agreed."""
        missed = self.shipped["verdict"] != "disagreed"
        return self.fixed["verdict"] == "agreed" and (self.caught if self.exhibit.caught else missed)

    def to_json(self) -> dict[str, Any]:
        """Return one line of the record."""
        e = self.exhibit
        return {
            "exhibit": e.name,
            "packages": list(e.packages),
            "fixed_packages": list(e.fixed),
            "caught": self.caught,
            "as_expected": self.as_expected,
            "shipped": dict(self.shipped),
            "fixed": dict(self.fixed),
        }


def missing(exhibit: Exhibit, environments: Path) -> list[tuple[Sequence[str], Path]]:
    """Return the packages to install before an exhibit runs: requirements and folder, each once.

    Raises UserError if the present environment lacks its version of torch or JAX.
    """
    found: dict[Path, Sequence[str]] = {}
    for side in SIDES:
        folder = _folder(exhibit, side, environments)
        if folder is not None and not folder.is_dir():
            found[folder] = exhibit.requirements(side)
    return [(requirements, folder) for folder, requirements in found.items()]


def run_exhibit(exhibit: Exhibit, environments: Path, loops: str = LOOPS) -> Told:
    """Run both sides, each in a process of its own. Raises UserError if one fails."""
    shipped, fixed = (run_side(exhibit, side, _folder(exhibit, side, environments), loops) for side in SIDES)
    return Told(exhibit, shipped, fixed)


def run_side(exhibit: Exhibit, side: Side, folder: Path | None, loops: str) -> dict[str, Any]:
    """Run one side's loop with its packages. Raises UserError with its last line of output if it fails."""
    settings = dict(exhibit.settings or {}) | ({"mended": side == "fixed"} if exhibit.is_mended else {})
    names = [one.partition("==")[0] for one in exhibit.requirements(side)]
    with tempfile.TemporaryDirectory(prefix="lockstep-museum-") as scratch:
        file = Path(scratch) / "found.json"
        words = [sys.executable, "-m", "lockstep.scripts.museum.child", f"{loops}.{exhibit.loop}"]
        words += [json.dumps(settings), json.dumps(names), str(file)]
        try:
            done = subprocess.run(
                words,
                cwd=scratch,
                env=path_with(folder),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LONGEST_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"{exhibit.name}, {exhibit.version(side)}: not finished after {LONGEST_S:.0f} s") from None
        if done.returncode or not file.is_file():
            said = done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"]
            raise UserError(f"{exhibit.name}, {exhibit.version(side)}: {printable(said[-1][:300])}")
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _folder(exhibit: Exhibit, side: Side, environments: Path) -> Path | None:
    try:
        return folder_of(exhibit.requirements(side), environments)
    except UserError as error:
        raise UserError(f"{exhibit.name}: {error}") from None
