"""Command-line arguments: a command's own options, and every setting of the run's configuration as a flag.

tyro reads the flags; values of settings stay text here, so that core/config_file.py checks file and command line
together and reports every error at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import tyro
from pydantic.fields import FieldInfo

from core.config_file import settings, unknown_key
from core.errors import UserError

T = TypeVar("T")

_BOX = re.compile(r"[╭╮╰╯│─]+")


def parse(command: type[T], name: str, argv: list[str], with_settings: bool) -> tuple[T, dict[str, str]]:
    """The command's options, and the settings given as flags (dotted key → text).

    Raises UserError for arguments that are not understood; `--help` prints and ends with exit code 0.
    """
    shape: Any = _with_settings(command) if with_settings else command
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options, unknown = tyro.cli(
                shape, prog=f"lockstep {name}", args=argv, description=command.__doc__, return_unknown_args=True
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(_one_line(said.getvalue()) or f"lockstep {name}: arguments not understood") from None
    if unknown:
        raise UserError(
            "\n".join(_unknown(argument, command) for argument in unknown if argument.startswith("-"))
            or _stray(unknown)
        )
    return options, (_given(options) if with_settings else {})


def _with_settings(command: type[T]) -> Any:
    """The command's dataclass with a group of flags a section; each flag text, absent by default."""
    sections: dict[str, list[tuple[str, FieldInfo]]] = {}
    for key, field in settings().items():
        section, _, last = key.rpartition(".")
        sections.setdefault(section, []).append((last, field))
    top = [_flag(last, field) for last, field in sections.pop("")]
    groups: list[Any] = []
    for section, fields in sections.items():
        group = dataclasses.make_dataclass(section.capitalize(), [_flag(*f) for f in fields])
        groups.append((section, group, dataclasses.field(default_factory=group)))
    return dataclasses.make_dataclass(command.__name__, [*top, *groups], bases=(command,))


def _flag(name: str, field: FieldInfo) -> Any:
    kind = field.annotation
    words = (
        "|".join(map(str, get_args(kind)))
        if get_origin(kind) is Literal
        else getattr(kind, "__name__", "value").upper()
    )
    words = {"BOOL": "true|false", "STR": "TEXT"}.get(words, words)
    help_text = f"{field.description or ''} (default: {field.default})".strip().replace("%", "%%")
    return (name, Annotated[str | None, tyro.conf.arg(metavar=words, help=help_text)], dataclasses.field(default=None))


def _given(options: Any) -> dict[str, str]:
    given = {}
    for key in settings():
        value = options
        for part in key.split("."):
            value = getattr(value, part)
        if value is not None:
            given[key] = value
    return given


def _unknown(argument: str, command: Any) -> str:
    key = argument.lstrip("-").split("=")[0].replace("-", "_")
    known = settings() | {f.name: None for f in dataclasses.fields(command)}
    return f"command line: {unknown_key(key, '', known)}"


def _stray(arguments: list[str]) -> str:
    return f"command line: not understood: {' '.join(arguments)}"


def _one_line(text: str) -> str:
    plain = " ".join(_BOX.sub(" ", text).split())
    return re.sub(r" For full helptext.*$", "", plain)
