"""Locate the installation: the run files that come with it, and the folder that worker processes start in."""

from pathlib import Path

import lockstep

# The folder from which `lockstep` is imported: a checkout, or site-packages.
HOME = Path(lockstep.__file__).resolve().parents[1]


def shipped_config(name: str) -> Path:
    """Return the path of the run file `NAME.toml` that comes with Lockstep."""
    return (HOME / "lockstep" / "configs" / f"{name}.toml").resolve()
