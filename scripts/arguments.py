"""Command-line arguments: a command's own options, and every setting of the run's configuration as a flag.

tyro reads the flags; values of settings stay text here, so that core/config_file.py checks file and command line
together and reports every error at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import re
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import tyro
from pydantic.fields import FieldInfo

from core.config import RunConfig
from core.config_file import load_config, settings, unknown_key
from core.errors import UserError

T = TypeVar("T")

# tyro draws boxes in ASCII where the terminal has no more.
_BOX = re.compile(r"[╭╮╰╯│─]+|[+|]*-{3,}[+|]*|(?<!\S)[|+](?!\S)")


def parse(
    command: type[T], name: str, argv: list[str], with_settings: bool, shown: Callable[[str], bool] = lambda key: True
) -> tuple[T, dict[str, str]]:
    """The command's options, and the settings given as flags (dotted key → text).

    shown: which settings `--help` lists; the others are understood all the same.
    Raises UserError for arguments that are not understood, together with whatever is wrong with the settings; `--help`
    prints and ends with exit code 0.
    """
    shape: Any = _with_settings(command, shown) if with_settings else command
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options, unknown = tyro.cli(
                shape,
                prog=f"lockstep {name}",
                args=argv,
                description=inspect.getdoc(command),
                return_unknown_args=True,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(_in_plain_words(said.getvalue(), command, name)) from None
    given = _given(options) if with_settings else {}
    if unknown:
        wrong = [_unknown(argument, command) for argument in unknown if argument.startswith("-")]
        wrong = wrong or [f"command line: not understood: {' '.join(unknown)}"]
        if with_settings:
            wrong += _wrong_settings(getattr(options, "config", None), given)
        raise UserError("\n".join(wrong))
    return options, given


def _with_settings(command: type[T], shown: Callable[[str], bool]) -> Any:
    """The command's dataclass with a group of flags a section; each flag text, absent by default."""
    sections: dict[str, list[Any]] = {}
    for key, field in settings().items():
        section, _, last = key.rpartition(".")
        sections.setdefault(section, []).append(_flag(last, field, shown(key)))
    top = sections.pop("")
    groups: list[Any] = []
    for section, flags in sections.items():
        group = dataclasses.make_dataclass(section.capitalize(), flags)
        group.__doc__ = inspect.getdoc(RunConfig.model_fields[section].annotation)
        groups.append((section, group, dataclasses.field(default_factory=group)))
    return dataclasses.make_dataclass(command.__name__, [*top, *groups], bases=(command,))


def _flag(name: str, field: FieldInfo, shown: bool) -> Any:
    default = str(field.default).lower() if isinstance(field.default, bool) else field.default
    hint = f"(default: {default!r})" if isinstance(default, str) and default.strip() != default else ""
    about = tyro.conf.arg(
        metavar=_words(field.annotation),
        help=field.description or "",
        help_behavior_hint=hint or (f"(default: {default})" if default != "" else "(default: empty)"),
    )
    text: Any = Annotated[str | None, about] if shown else Annotated[str | None, about, tyro.conf.Suppress]
    return (name, text, dataclasses.field(default=None))


def _words(kind: Any) -> str:
    """A type as help writes it: INT, true|false, one|other."""
    if get_origin(kind) in (Union, UnionType):
        return "|".join(map(_words, get_args(kind)))
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    words = getattr(kind, "__name__", "value").upper()
    return {"BOOL": "true|false", "STR": "TEXT"}.get(words, words)


def _given(options: Any) -> dict[str, str]:
    given = {}
    for key in settings():
        value = options
        for part in key.split("."):
            value = getattr(value, part)
        if value is not None:
            given[key] = value
    return given


def _wrong_settings(config: Path | None, given: dict[str, str]) -> list[str]:
    try:
        load_config(config, given)
    except UserError as error:
        return str(error).splitlines()
    return []


def _unknown(argument: str, command: Any) -> str:
    key = argument.lstrip("-").split("=")[0].replace("-", "_")
    known = settings() | {f.name: None for f in dataclasses.fields(command)}
    return f"command line: {unknown_key(key, '', known)}"


def _in_plain_words(text: str, command: Any, name: str) -> str:
    """What tyro says in a box, in one line."""
    plain = " ".join(_BOX.sub(" ", text).split())
    plain = re.sub(r" (Argument helptext:|For full helptext).*$", "", plain)
    if plain.startswith("Required options"):
        needed = next(f.name for f in dataclasses.fields(command) if f.default is dataclasses.MISSING)
        return f"command line: {needed.upper()} is missing: lockstep {name} {needed.upper()} … (--help says more)"
    if wrong := re.search(r"Error parsing --([\w.-]+): invalid literal for int\(\) with base 10: (.*)$", plain):
        return f"command line: {wrong[1]} = {wrong[2]}: input should be a whole number"
    if wrong := re.search(r"[Mm]issing value for argument '--([\w.-]+)'", plain):
        return f"command line: {wrong[1]} has no value"
    if wrong := re.search(r"invalid choice '(.*)' for argument '--([\w.-]+)'\. Expected one of \((.*)\)", plain):
        return f"command line: {wrong[2]} = '{wrong[1]}': input should be {wrong[3].rstrip(',')}"
    return f"command line: {plain}" if plain else f"lockstep {name}: arguments not understood"
