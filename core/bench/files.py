"""The files of a bench: its JSON, which names its suite and schema, and a page made from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lockstep.core.errors import UserError
from lockstep.core.sinks.visible import markdown


def read_results(path: Path, suite: str, schema: int) -> dict[str, Any]:
    """Read the results in a file. Raises UserError if it cannot be read or is not the JSON of this suite."""
    try:
        found = json.loads(path.read_text())
        if (found["schema"], found["suite"]) == (schema, suite):
            return dict(found)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{path} is no JSON of `lockstep bench {suite}` (schema {schema}); name another file")


def write_page(path: Path, text: str, picture: str = "", shows: str = "") -> None:
    """Write a page, and beside it its picture (SVG), which stands below the title.

    shows: what there is to see, for those who do not see it. Raises UserError if a file cannot be written.
    """
    text = markdown(text)
    try:
        if picture:
            beside = path.with_suffix(".svg")
            beside.write_text(picture)
            title, _, rest = text.partition("\n")
            text = f"{title}\n\n![{shows}]({quote(beside.name)})\n{rest}"
        path.write_text(text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
