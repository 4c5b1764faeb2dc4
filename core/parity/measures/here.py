"""Read and write the extremes of clean runs on this machine, in the user's cache folder (`lockstep calibrate`).

A file holds the extremes of one recipe, on one machine, with the installed versions of the frameworks. Kernels of
another processor or library may round differently. The file is data, and has a checksum.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import canonical_json, read_sealed_json, write_sealed_json
from lockstep.core.versions import version_of

# The environment variable for the folder of these files. `off` uses the shipped extremes alone.
FOLDER = "LOCKSTEP_CALIBRATION"
FRAMEWORKS = ("torch", "jax", "jaxlib", "numpy")
# Suffix of a recipe whose programs run on a GPU.
ON_GPU = " on a GPU"


@dataclass(frozen=True)
class Here:
    """The measurements of one recipe on this machine.

    rows: kind → a row as in calibrated_bounds.json.
    checks: number of checks.
    date: ISO date of the measurement.
    widened: the bounds that are wider than the shipped ones, in words.
    """

    rows: Mapping[str, Any]
    checks: int
    date: str
    widened: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The basis of a bound, in words."""
        return f"calibrated on this machine, {self.checks} checks, {self.date}"


def path_of(recipe: str) -> Path | None:
    """Return the path of a recipe's file on this machine; None if calibration files are off."""
    if (folder := _folder()) is None:
        return None
    gpu = {"gpu": gpu_name()} if recipe.endswith(ON_GPU) else {}
    key = hashlib.sha256(canonical_json({**machine(), **gpu, "recipe": recipe})).hexdigest()[:16]
    return folder / f"{_name(recipe)}-{key}.json"


def _folder() -> Path | None:
    chosen = os.environ.get(FOLDER, "")
    if chosen == "off":
        return None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else cache / "lockstep" / "calibration"


def _name(recipe: str) -> str:
    return re.sub("[/ ]", "-", recipe)


def machine() -> dict[str, str]:
    """Return all that affects rounding: the processor, its instruction sets, and versions of the frameworks."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    of_processor = {
        name: found[1]
        for name in ("model name", "flags")
        if (found := re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE))
    }
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        **of_processor,
        **{name: version_of(name) for name in FRAMEWORKS},
    }


@cache
def gpu_name() -> str:
    """Return the name of the first GPU from nvidia-smi, or an empty string."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(done.stdout.splitlines()), "").strip()


def read(recipe: str) -> Here | None:
    """Read the measurements of a recipe on this machine, or None. Raises UserError if the file was changed."""
    folder = _folder()
    # Most machines have no GPU, and nvidia-smi, which `path_of` runs, can take a second.
    if folder is None or next(folder.glob(f"{_name(recipe)}-*.json"), None) is None:
        return None
    path = path_of(recipe)
    if path is None or not path.exists():
        return None
    value = read_sealed_json(path, indent=1, remedy="remove it, and run lockstep calibrate again")
    try:
        return Here(value["rows"], value["checks"], value["date"], tuple(value["widened"]))
    except KeyError as error:
        raise UserError(f"{path} has no {error}; remove it, and run lockstep calibrate again") from error


def write(recipe: str, here: Here) -> Path:
    """Store the measurements of a recipe. Raises UserError if calibration files are off, or if writing fails."""
    path = path_of(recipe)
    if path is None:
        raise UserError(f"{FOLDER} is off: there is no folder to keep a calibration in")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {path.parent}: {error.strerror}") from error
    write_sealed_json(path, {**vars(here), "widened": list(here.widened)}, indent=1)
    return path
