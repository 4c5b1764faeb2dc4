"""Messages to the user stay lines, for any input of the user."""

import pickle

import pytest

from lockstep.core.errors import UserError, printable
from lockstep.core.files.paths import path_problem


def test_several_lines_are_several_things_that_are_wrong():
    error = UserError("a: no", "b: no")
    assert error.lines == ("a: no", "b: no")
    assert str(error) == "a: no\nb: no"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, é and 日本", "plain, é and 日本"),
        ("a\nb\x1b[31m", r"a\nb\x1b[31m"),
        ("\u2028\u202e\udcff", r"\u2028\u202e\udcff"),
        ("x" * 240, "x" * 240),
        ("before " + "x" * 241 + " after", "before " + "x" * 80 + "…" + "x" * 40 + " after"),
    ],
)
def test_no_line_is_broken_or_reaches_the_terminal_as_a_command(text, shown):
    assert printable(text) == shown
    assert printable(shown) == shown
    assert UserError(text).lines == (shown,)


def test_errors_cross_processes():
    again = pickle.loads(pickle.dumps(UserError("a", "b\n")))
    assert isinstance(again, UserError) and again.lines == ("a", r"b\n")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("", None),
        ("a/b", None),
        ("x" * 255, None),
        ("x" * 256, "too long"),
        ("é" * 128, "too long"),
        ("a/" * 2048, "too long"),
        ("a\0b", "null"),
        ("\udcff", "UTF-8"),
    ],
)
def test_which_texts_can_be_paths(path, problem):
    found = path_problem(path)
    assert (found is None) if problem is None else problem in (found or "")
