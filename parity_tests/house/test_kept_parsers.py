"""Command lines of one process share a parser, and are read as by one of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from tyro._parsers import ParserSpecification

from lockstep.core.errors import UserError
from lockstep.parity_tests.kept_parsers import MOST, kept
from lockstep.scripts.shared import arguments
from lockstep.scripts.shared.arguments import parse


@dataclass
class Command:
    """Do something.

    Args:
        steps: how often.
        dry: do nothing.
    """

    steps: int = 3
    dry: bool = False


@dataclass
class Other:
    """Do something else.

    Args:
        steps: how often.
    """

    steps: int = 3


LINES: tuple[list[str], ...] = (
    ["--steps", "4"],
    ["--dry"],
    [],
    ["--train.steps", "7"],
    ["--help"],
    ["--steps"],
    ["--train.steps"],
    ["x"],
)


def outcome(words: list[str], capsys: pytest.CaptureFixture[str], command: type = Command) -> Any:
    """Return what is read or refused, and what is printed."""
    try:
        found: Any = parse(command, "train", words, with_settings=True)
    except (UserError, SystemExit) as stop:
        found = str(stop)
    return found, capsys.readouterr()


def test_each_line_is_read_as_by_a_parser_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = [outcome(words, capsys) for words in (*LINES, *LINES)]
    built = [0]
    shares = ParserSpecification.from_callable_or_type.__closure__
    (build,) = (cell.cell_contents for cell in shares or () if callable(cell.cell_contents))

    def anew(f: Any, **given: Any) -> Any:
        built[0] += not given["intern_prefix"]
        return build(f, **given)

    monkeypatch.setattr(ParserSpecification, "from_callable_or_type", staticmethod(anew))
    alone = [outcome(words, capsys) for words in (*LINES, *LINES)]
    assert shared == alone and built[0] == 2 * len(LINES)


def test_a_parser_is_built_once_for_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[Any] = []

    def build(f: Any, **given: Any) -> Any:
        if not given["intern_prefix"]:
            built.append(f)
        return original(f, **given)

    shares = ParserSpecification.from_callable_or_type.__closure__
    (original,) = (cell.cell_contents for cell in shares or () if callable(cell.cell_contents))
    monkeypatch.setattr(ParserSpecification, "from_callable_or_type", staticmethod(kept(build)))
    arguments._shape.cache_clear()
    for command in (Command, Other, Command, Other):
        outcome([], capsys, command)
    assert len(built) == 2
    assert outcome(["--dry"], capsys, Other) != outcome(["--dry"], capsys)


def test_the_last_used_are_kept_and_parts_are_built_with_their_whole() -> None:
    made = kept(lambda f, **given: object())
    whole = {"parent_classes": set(), "intern_prefix": "", "description": "d"}
    first = made(0, **whole)
    assert made(0, **whole) is first is not made(0, **whole | {"description": "e"})
    assert made(0, **whole | {"intern_prefix": "a"}) is not made(0, **whole | {"intern_prefix": "a"})
    for number in range(1, MOST + 1):
        made(number, **whole)
    assert made(0, **whole) is not first
