"""Environments of exhibits: folders of released packages, put ahead of the present environment on the path.

torch and Lockstep come from the present environment. pip's own configuration chooses the package index.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from lockstep.core.errors import UserError, printable

# Packages that always come from the present environment, because Lockstep computes with them.
PRESENT_ONLY = ("torch", "jax", "jaxlib", "numpy")


def is_present(requirement: str) -> bool:
    """Return whether the present environment has exactly this version; the part after a `+` names a build."""
    name, _, version = requirement.partition("==")
    try:
        return metadata.version(name).partition("+")[0] == version
    except metadata.PackageNotFoundError:
        return False


def folder_of(requirements: Sequence[str], environments: Path) -> Path | None:
    """Return the folder of such packages, existing or not; None if the present environment has them all.

    Raises UserError if it needs another torch or JAX than there is.
    """
    if all(map(is_present, requirements)):
        return None
    for one in requirements:
        if one.partition("==")[0] in PRESENT_ONLY and not is_present(one):
            raise UserError(f"it needs {one.replace('==', ' ')}, and the present environment has another version")
    named = re.sub(r"[^\w.]+", "-", requirements[0])
    digest = hashlib.sha256("\n".join(requirements).encode()).hexdigest()[:8]
    return environments / f"{named}-{digest}"


def install(requirements: Sequence[str], folder: Path) -> None:
    """Install the packages by pip into a new folder, whole or not at all. Raises a one-line UserError if it fails."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    wanted = [one for one in requirements if one.partition("==")[0] not in PRESENT_ONLY]
    # Without dependencies: torch and other unlisted packages come from the present environment.
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(partial), *wanted]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=_clean(), check=False)
    if done.returncode:
        shutil.rmtree(partial, ignore_errors=True)
        said = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR")] or said or ["no reason given"]
        raise UserError(f"pip install {' '.join(wanted)}: {printable(errors[-1][:300])}")
    partial.rename(folder)


def path_with(folder: Path | None) -> dict[str, str]:
    """Return the environment variables of a process that imports from `folder` first, and nothing from the network."""
    before = os.environ.get("PYTHONPATH", "")
    paths = [str(folder)] if folder else []
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return _clean() | offline | {"PYTHONPATH": os.pathsep.join([*paths, *filter(None, [before])])}


def _clean() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONHOME"}
