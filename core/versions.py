"""Versions of packages, for records: a checkout that is on the path and not installed has none."""

from __future__ import annotations

from importlib import metadata


def version_of(package: str) -> str:
    """Return a distribution's version by its metadata, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
