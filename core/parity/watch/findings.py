"""Build the findings of comparisons in which nothing may differ."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.core.parity.measures.verdict import Finding, Measure


def exact(
    stage: str, tap: str, mismatches: int, size: int, basis: str, note: str = "", phase: str = "backward"
) -> Finding:
    """Build the finding of a comparison in which nothing may differ. mismatches: how many of `size` items differ."""
    found = (Measure("mismatches", float(mismatches), None, 0.0, basis),)
    return Finding(
        stage=stage, tap=tap, phase=phase, layer=layer_in(tap), scope="local", measures=found, size=size, note=note
    )


def layer_in(name: str) -> int | None:
    """Return the first number among the dotted parts of a name, which is the block in most models; None without one."""
    return next((int(part) for part in name.rpartition("/")[2].split(".") if part.isdecimal()), None)


def few(names: Sequence[str]) -> str:
    """Join the first five names with commas. An ellipsis stands for the others."""
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def listed(what: str, names: Sequence[str]) -> str:
    """Return "what name, name; ", or nothing without names."""
    return f"{what} {few(names)}; " if names else ""
