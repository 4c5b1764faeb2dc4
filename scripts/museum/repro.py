"""Scripts that show unfixed bugs without Lockstep, for the maintainers of the package."""

from __future__ import annotations

from importlib import resources


def repro_of(name: str) -> str | None:
    """Return the script of an exhibit, or None if it has none."""
    file = resources.files("lockstep.scripts.museum").joinpath("repros").joinpath(f"{name}.py")
    return file.read_text(encoding="utf-8") if file.is_file() else None
