"""The settings in which runs differ from each other, or from one of them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from lockstep.core.errors import UserError
from lockstep.core.overview.columns import as_text
from lockstep.core.overview.row import Row


def differing(rows: Sequence[Row], baseline: Row | None = None) -> list[str]:
    """Return the settings that are not the same in all rows, those with the most different values first.

    baseline: a row that is compared as well. A row whose settings are not known, and a setting that only some rows
    know, as another version's, are no difference.
    """
    known = [row.settings for row in (*rows, *([baseline] if baseline else [])) if row.settings]
    keys = list(dict.fromkeys(key for settings in known for key in settings))
    values = {key: {as_text(settings[key]) for settings in known if key in settings} for key in keys}
    return sorted((key for key in keys if len(values[key]) > 1), key=lambda key: -len(values[key]))


def told(row: Row, keys: Sequence[str], baseline: Row | None = None) -> list[tuple[str, str]]:
    """Return (setting, value) of a row for those of `keys` that it has; with a baseline, those that differ from it."""
    own = [(key, as_text(row.settings[key])) for key in keys if key in row.settings]
    if baseline is None:
        return own
    return [(key, value) for key, value in own if as_text(baseline.settings.get(key)) != value]


def named(rows: Sequence[Row], name: str) -> Row:
    """Return the row with this path, or this name. Raises UserError if there is none, or several by that name."""
    path = str(Path(name))
    found = [row for row in rows if row.path == path] or [row for row in rows if row.name == name]
    if len(found) == 1:
        return found[0]
    if found:
        paths = ", ".join(row.path for row in found[:3])
        raise UserError(f"command line: baseline = {name}: {len(found)} runs have this name ({paths}, …): give a path")
    near = difflib.get_close_matches(name, [text for row in rows for text in (row.path, row.name)], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"command line: baseline = {name}: no such run here{hint}")
