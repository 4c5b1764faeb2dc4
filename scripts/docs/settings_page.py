"""Write docs/guide/settings.md from the configuration's own descriptions.

    python -m lockstep.scripts.docs.settings_page

A setting's description stands only in core/config/sections.py, and `--help` shows the same words.
"""

from __future__ import annotations

import inspect
import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from lockstep.core.components.choice import OneOf
from lockstep.core.config.file import settings
from lockstep.core.config.schema import RunConfig
from lockstep.scripts.docs.pages import GUIDE

PAGE = GUIDE / "settings.md"

HEAD = """\
# Settings

```
lockstep train configs/quickstart.toml --name short --optim.peak-lr 1e-3 --train.steps 60
```

Every setting can stand in a run file (`[optim]`, `peak_lr = 1e-3`) and on the command line (`--optim.peak-lr 1e-3`).
The command line wins. A run file lists only what differs from these defaults, or from the file that its `base` names.
All mistakes are reported at once, each with its file and key.

`python -m lockstep.scripts.docs.settings_page` writes this page from `core/config`; a test compares the two.
"""

# Names of pydantic's field constraints, and their signs.
_BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def page() -> str:
    """Return the page as Markdown: a table a section, in the configuration's order."""
    sections: dict[str, list[tuple[str, FieldInfo]]] = {}
    for key, field in settings().items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append((name, field))
    parts = [HEAD]
    for section, fields in sections.items():
        about = _about(section)
        parts.append(f"## {section or 'The run itself'}\n\n{about}\n")
        rows = [
            f"| `{name}` | {_default(field)} | {_values(field)} | {_cell(_meaning(field))} |" for name, field in fields
        ]
        parts.append("\n".join(["| setting | default | values | meaning |", "|---|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _about(section: str) -> str:
    """Return the first paragraph of the section's docstring, or the run's own line."""
    if not section:
        return "These stand at the top of a run file, before any section."
    text = inspect.getdoc(RunConfig.model_fields[section].annotation) or ""
    return " ".join(text.split("\n\n")[0].split())


def _meaning(field: FieldInfo) -> str:
    text = field.description or ""
    # A name of a setting's value, as in "fp16: …", keeps its case.
    first = text if text.split(" ")[0].endswith(":") else text[:1].upper() + text[1:]
    return f"{first}." if text else ""


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return '`""`' if value == "" else f"`{_cell(str(value))}`"


def _values(field: FieldInfo) -> str:
    """Return the names that may be chosen, or the type with its bounds."""
    for choice in field.metadata:
        if isinstance(choice, OneOf):
            return ", ".join(f"`{name}`" for name in choice.names)
    return _of_type(field.annotation, field.metadata)


def _of_type(kind: Any, metadata: list[Any]) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return ", ".join(f"`{name}`" for name in get_args(kind))
    if origin in (Union, types.UnionType):
        return ", ".join(_of_type(part, []) for part in get_args(kind))
    if kind is bool:
        return "`true`, `false`"
    names = {int: "integer", float: "number", str: "text"}
    bounds = [
        f"{sign} {getattr(part, name):g}" if getattr(part, name) < 1e6 else f"{sign} {getattr(part, name)}"
        for part in metadata
        for name, sign in _BOUNDS.items()
        if getattr(part, name, None) is not None
    ]
    return " ".join([names.get(kind, str(kind)), " and ".join(bounds)]).strip()


def _cell(text: str) -> str:
    """Escape characters that end a table cell."""
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
