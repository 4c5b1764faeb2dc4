"""Command-line arguments: a command's own options, and every setting of the run's configuration as a flag.

tyro sorts words into flags and values and writes the help. It reads every value as text. Values of settings stay text,
so that core/config/file.py checks file and command line together; values of options are checked here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import docstring_parser
import tyro
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from lockstep.core.components.choice import OneOf
from lockstep.core.config.file import COMMAND_LINE, complaint, load_config, settings, shortened, unknown_key
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError, printable
from lockstep.core.files.paths import path_problem
from lockstep.scripts.shared.examples import examples_of
from lockstep.scripts.shared.help_pages import NARROWEST, HelpPage, one_line_each

T = TypeVar("T")

# The default of an argument that was not given. No word of a command line can hold a null character.
_ABSENT = "\0"
# Prints the page of `--help` with every setting of a run file.
HELP_ALL = "--help-all"
# A command with at most this many settings lists them in `--help` too.
FEW = 20
# Most characters shown of words that are not understood.
_SHOWN = 120
# Words that tyro reads as a flag even where it expects a value.
_LIKE_A_FLAG = re.compile(r"--$|-+(?!(inf|nan)\b)[^\W\d_]")


def parse(
    command: type[T], name: str, argv: list[str], with_settings: bool, shown: Callable[[str], bool] = lambda key: True
) -> tuple[T, dict[str, str]]:
    """Parse the command's options, and the settings given as flags (dotted key → text).

    shown: the settings that are flags of this command. `--help` lists the command's own options, and the settings only
    if they are few; `--help-all` lists them all. Raises UserError for arguments that are not understood, together with
    all mistakes in the settings. `--help` and `--help-all` print and end with exit code 0.
    """
    flags = list(filter(shown, settings())) if with_settings else []
    words = _before_the_rest(argv)
    whole = HELP_ALL in words
    if whole:
        argv = [*words, "--help"]
    # tyro does not parse a flag that its page leaves out, so flags are left out only for a page of help.
    hides = not whole and bool({"-h", "--help"} & set(words)) and len(flags) > FEW
    shape = _shape(cast(Hashable, command), frozenset(() if hides else flags), with_settings)
    read, unknown = _read(shape, command, name, argv, _all_settings(name, flags) if hides else "")
    given = _given(read) if with_settings else {}
    options, wrong = _options(command, name, read, unknown)
    if wrong:
        if with_settings:
            wrong += _wrong_settings(getattr(options, "config", None), given)
        raise UserError(*wrong)
    return options, given


def _read(shape: Any, command: type[T], name: str, argv: list[str], last: str) -> tuple[Any, list[str]]:
    """Return the options that tyro reads, all as text, and the words that it does not know.

    last: the last paragraph of the help page.
    """
    with_value = [word for word in _before_the_rest(argv) if word.startswith("--") and "=" in word]
    for word in with_value:
        if _field_name(word) in _switches(command):
            raise UserError(f"{COMMAND_LINE}: {word.partition('=')[0]} takes no value: {word}")
    page = HelpPage(sys.stdout)
    try:
        with contextlib.redirect_stdout(page), contextlib.redirect_stderr(io.StringIO()), _wide_enough():
            return tyro.cli(
                shape,
                prog=f"lockstep {name}",
                # A first word `--tyro-…` would trigger one of tyro's own commands.
                args=["--", *argv] if argv[:1] and argv[0].replace("_", "-").startswith("--tyro-") else argv,
                description=one_line_each(inspect.getdoc(command) or ""),
                return_unknown_args=True,
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.HelptextFromCommentsOff),
            )
    except SystemExit as stop:
        if not stop.code:
            print(page.text(examples_of(name, command), last), end="")
            raise
        # With text values and no required arguments, only one mistake is possible: a flag without its value.
        flag = _without_value(argv, command)
        said = f"{flag.lstrip('-')} has no value" if flag else f"not understood: {_quoted(argv)}"
        raise UserError(f"{COMMAND_LINE}: {said} (see lockstep {name} --help)") from None


def _all_settings(name: str, flags: Sequence[str]) -> str:
    return (
        f"{len(flags)} settings of the run file are flags as well, as in --optim.peak-lr 1e-3: "
        f"lockstep {name} {HELP_ALL} lists them."
    )


@contextlib.contextmanager
def _wide_enough() -> Iterator[None]:
    """Set COLUMNS to NARROWEST in a narrower terminal, in which tyro's search for line breaks never ends."""
    before = os.environ.get("COLUMNS")
    if shutil.get_terminal_size().columns < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("COLUMNS", None)
        else:
            os.environ["COLUMNS"] = before


def _before_the_rest(argv: Sequence[str]) -> Sequence[str]:
    """Return the words before `--`, after which no word is a flag."""
    return argv[: argv.index("--")] if "--" in argv else argv


def _field_name(word: str) -> str:
    return word.lstrip("-").partition("=")[0].replace("-", "_")


def _switches(command: type) -> set[str]:
    """Return the options that take no value."""
    return {field.name for field in dataclasses.fields(command) if isinstance(field.default, bool)}


def _without_value(argv: list[str], command: type) -> str | None:
    known = settings().keys() | {field.name for field in dataclasses.fields(command)}
    for flag, value in zip(argv, [*argv[1:], None], strict=True):
        if flag == "--":
            return None
        takes_one = flag.startswith("--") and "=" not in flag and _field_name(flag) in known - _switches(command)
        if takes_one and (value is None or _LIKE_A_FLAG.match(value)):
            return flag
    return None


# The shape that tyro parses


@lru_cache(maxsize=64)
def _shape(command: Any, taken: frozenset[str], with_settings: bool) -> Any:
    """Return the command's dataclass with its options as text, and a group of flags a section if it takes settings."""
    hints = get_type_hints(command, include_extras=True)
    texts = {
        one.arg_name: one_line_each(one.description or "") for one in docstring_parser.parse_from_object(command).params
    }
    own = [_as_text(field, hints[field.name], texts) for field in dataclasses.fields(command)]
    sections: dict[str, list[Any]] = {}
    for key, field in settings().items() if with_settings else ():
        section, _, last = key.rpartition(".")
        sections.setdefault(section, []).append(_flag(last, field, key in taken))
    own += sections.pop("", [])
    groups: list[Any] = []
    for section, flags in sections.items():
        group = dataclasses.make_dataclass(section.capitalize(), flags)
        group.__doc__ = inspect.getdoc(RunConfig.model_fields[section].annotation)
        groups.append((section, group, dataclasses.field(default_factory=group)))
    return dataclasses.make_dataclass(command.__name__, [*own, *groups], bases=(command,))


def _is_text(field: dataclasses.Field[Any]) -> bool:
    """Return whether an option has exactly one value; others are switches or lists of words."""
    return not isinstance(field.default, bool | tuple)


def _as_text(field: dataclasses.Field[Any], hint: Any, texts: Mapping[str, str]) -> Any:
    """Return a field of text. texts: the options' descriptions; tyro itself keeps line breaks of the source."""
    described = tyro.conf.arg(help=texts.get(field.name))
    if not _is_text(field):
        # A switch that is off, or a list that is empty: the text describes it.
        quiet = () if field.default else (tyro.conf.arg(help_behavior_hint=""),)
        return (field.name, Annotated[(hint, described, *quiet)], dataclasses.field(default=field.default))
    kind, *about = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    default = "(required)" if field.default is dataclasses.MISSING else f"(default: {field.default})"
    plain = tyro.conf.arg(metavar=_words(kind), help_behavior_hint=default)
    text: Any = Annotated[(str, plain, described, *about)]
    return (field.name, text, dataclasses.field(default=_ABSENT))


def _flag(name: str, field: FieldInfo, shown: bool) -> Any:
    default = str(field.default).lower() if isinstance(field.default, bool) else field.default
    hint = f"(default: {default!r})" if isinstance(default, str) and default.strip() != default else ""
    about = tyro.conf.arg(
        metavar=_metavar(field),
        help=field.description or "",
        help_behavior_hint=hint or (f"(default: {default})" if default != "" else "(default: empty)"),
    )
    text: Any = Annotated[str, about] if shown else Annotated[str, about, tyro.conf.Suppress]
    return (name, text, dataclasses.field(default=_ABSENT))


def _metavar(field: FieldInfo) -> str:
    chosen = next((one for one in field.metadata if isinstance(one, OneOf)), None)
    return "|".join(chosen.names) if chosen else _words(field.annotation)


def _words(kind: Any) -> str:
    """Write a type as help shows it: INT, true|false, one|other."""
    if get_origin(kind) in (Union, UnionType):
        return "|".join(_words(option) for option in get_args(kind) if option is not type(None))
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    words = getattr(kind, "__name__", "value").upper()
    return {"BOOL": "true|false", "STR": "TEXT"}.get(words, words)


# The settings given


def _given(read: Any) -> dict[str, str]:
    given = {}
    for key in settings():
        value = read
        for part in key.split("."):
            value = getattr(value, part)
        if value != _ABSENT:
            given[key] = value
    return given


def _options(command: type[T], name: str, read: Any, unknown: list[str]) -> tuple[T, list[str]]:
    """Return the command's options and the mistakes in them; a wrong option has its default."""
    hints = get_type_hints(command)
    found, wrong = {}, _not_understood(unknown, command)
    needed, missing = _needed(command), []
    for field in dataclasses.fields(command):  # type: ignore[arg-type]
        given = getattr(read, field.name)
        if unknown and given == "[]":  # what tyro makes of an argument that was left out beside words not known to it
            given = _ABSENT
        found[field.name] = None if field.default is dataclasses.MISSING else field.default
        if not _is_text(field):
            found[field.name] = given
        elif given == _ABSENT:
            if field.default is dataclasses.MISSING:
                missing.append(needed[field.name])
        elif problem := _is_path(hints[field.name]) and (path_problem(given) or (not given and "no path")):
            wrong.append(f"{COMMAND_LINE}: {field.name} = {shortened(given)}: {problem}")
        else:
            try:
                found[field.name] = TypeAdapter(hints[field.name]).validate_strings(given)
            except ValidationError as error:
                wrong.append(complaint(COMMAND_LINE, field.name, given, error))
    if missing:
        said = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        wrong.append(f"{COMMAND_LINE}: {said}: lockstep {name} {' '.join(needed.values())} … (see --help)")
    return command(**found), wrong


def _needed(command: type) -> dict[str, str]:
    """Return the required options of a command, as its help writes them."""
    hints = get_type_hints(command, include_extras=True)
    needed = [field.name for field in dataclasses.fields(command) if field.default is dataclasses.MISSING]
    shown = {name: (getattr(about, "metavar", None) for about in get_args(hints[name])[1:]) for name in needed}
    return {name: next(filter(None, metavars), name.upper()) for name, metavars in shown.items()}


def _is_path(hint: Any) -> bool:
    return hint is Path or Path in get_args(hint)


def _not_understood(unknown: list[str], command: type) -> list[str]:
    flags = [word for word in unknown if re.match(r"--[^-=]|-+[^\W\d_]", word)]
    if not flags:
        return [f"{COMMAND_LINE}: not understood: {_quoted(unknown)}"] if unknown else []
    known = settings() | {field.name: None for field in dataclasses.fields(command)}
    return list(dict.fromkeys(f"{COMMAND_LINE}: {_not_known(word, known)}" for word in flags))


def _not_known(word: str, known: dict[str, Any]) -> str:
    name = _field_name(word)
    if name in known and not re.match("--[^-]", word):
        return f"{word.partition('=')[0]} is not an option; did you mean --{name.replace('_', '-')}?"
    if name in settings():
        return f"{name} is a setting of run files, not an option of this command (--help lists the options)"
    return unknown_key(name, None, known)


def _quoted(words: list[str]) -> str:
    text = printable(shlex.join(words))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def check_file(name: str, path: Path | None) -> None:
    """Raise UserError unless the option `name` is empty, or a path at which a file can be written.

    A pipe without a reader would block after all the work. Pipes of the shell are under /dev.
    """
    if path is None:
        return
    waits = path.is_fifo() and not path.is_relative_to("/dev")
    if waits or path.is_dir() or not path.parent.is_dir():
        raise UserError(f"{COMMAND_LINE}: {name} = {path}: cannot write there; name a file in an existing folder")


def _wrong_settings(config: Path | None, given: dict[str, str]) -> list[str]:
    try:
        load_config(config, given)
    except UserError as error:
        return list(error.lines)
    return []
