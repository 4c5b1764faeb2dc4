"""`--help` is readable and complete; commands that are none get the nearest right one."""

from __future__ import annotations

import io
import itertools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep.core.components.choice import OneOf
from lockstep.core.config.file import settings
from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.scripts.cli import COMMANDS, run
from lockstep.scripts.shared.examples import EXAMPLES, examples_of

# By default there is something to say of each; `every` of a section is explained by the section.
SETTINGS = settings()
BENCHES = [name for name in COMMANDS if name.startswith("bench ")]


# Sections of a run file that help of a command shows, since they are all that it is about.
SECTIONS = {
    "data prepare": ["model options", "data options"],
}


def flat(text: str) -> str:
    return " ".join(text.translate(str.maketrans("│╭╮╰╯─", "      ")).split())


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("help",), ("data", "--help")])
def test_the_overview_names_every_command_and_the_exit_codes(lockstep: Lockstep, arguments: tuple[str, ...]) -> None:
    done = lockstep(*arguments)
    assert (done.code, done.err) == (0, "")
    for name in COMMANDS:
        assert f"  {name} " in done.out
    assert "0 done or agreed · 1 disagreed · 2 could not run" in done.out


def test_no_command_at_all_shows_the_overview_and_is_no_success(lockstep: Lockstep) -> None:
    done = lockstep()
    assert done.code == 2
    assert "usage: lockstep COMMAND" in done.out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(lockstep: Lockstep, command: str) -> None:
    done = lockstep(*command.split(), "--help")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"usage: lockstep {command} [-h]")
    assert "None" not in done.out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_begins_with_an_example_and_the_commands_own_options(
    lockstep: Lockstep, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The first screen; settings of a run file come under --help-all."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = lockstep(*command.split(), "--help").out.splitlines()
    example = next(n for n, line in enumerate(lines) if line in ("example:", "examples:"))
    assert example <= 20 and f"  lockstep {command}" in "\n".join(lines[example + 1 : example + 3])
    boxes = [n for n, line in enumerate(lines) if line.strip("╭─╮ ") in ("positional arguments", "options")]
    assert example < boxes[0] <= 30
    sections = [line.strip("╭─╮ ") for line in lines if line.strip("╭─╮ ").endswith(" options")]
    assert sections == SECTIONS.get(command, [])


def test_help_names_the_flag_that_lists_the_settings(lockstep: Lockstep) -> None:
    said = f"{len(SETTINGS)} settings of the run file are flags as well"
    assert flat(lockstep("train", "--help").out).endswith("lockstep train --help-all lists them.")
    assert said in flat(lockstep("train", "--help").out)
    assert said not in lockstep("report", "--help").out
    assert said not in flat(lockstep("train", "--help-all").out)


def test_a_setting_that_help_leaves_out_is_understood(refused, run_file: Path) -> None:
    assert "optim.peak_lr" in refused("plan", run_file, "--optim.peak-lr", "x")


@dataclass
class New:
    """Do something new.

    As in `lockstep new FILE
    --twice`.
    """

    file: str


@dataclass
class Bare:
    """Do something."""

    file: str


def test_a_command_without_an_entry_has_an_example_all_the_same() -> None:
    assert examples_of("new", New) == (("lockstep new FILE --twice", ""),)
    assert examples_of("bare", Bare) == (("lockstep bare FILE", ""),)
    assert set(EXAMPLES) <= set(COMMANDS)


WHOLE = [("train", "--help-all", 80), ("train", "--help-all", 60), ("data prepare", "--help", 60)]


@pytest.mark.parametrize(
    ("command", "page", "width"), [*((name, "--help", 80) for name in ("", *COMMANDS)), ("", "--help", 60), *WHOLE]
)
def test_no_line_of_help_is_wider_than_a_terminal(
    lockstep: Lockstep, monkeypatch: pytest.MonkeyPatch, command: str, width: int, page: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    done = lockstep(*command.split(), page)
    assert done.code == 0 and [line for line in done.out.splitlines() if len(line) > width] == []


class Terminal(io.StringIO):
    """A stdout for which tyro uses colours and draws boxes."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.getvalue()).splitlines()


@pytest.fixture
def help_in_colours(here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], Terminal]:
    """`help_in_colours(command, width)` → the terminal with the page of help."""

    def call(command: str, width: int) -> Terminal:
        terminal = Terminal()
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(sys, "stdout", terminal)
        with pytest.raises(SystemExit):
            run([*command.split(), "--help"])
        return terminal

    return call


def too_early(lines: list[str]) -> list[str]:
    """Lines of a box that end before they are full: the next line of the text begins with a word that had room."""
    found = []
    for line, following in itertools.pairwise(lines):
        if line[:1] == following[:1] == "│" and following[1:4].isspace():
            words, room = following.strip("│").split(), len(line) - 3 - len(line.rstrip("│ "))
            column = len(following) - len(following[1:].lstrip())
            if words and line[column - 2 : column].isspace() and line[column:].strip("│ ") and len(words[0]) < room:
                found.append(line)
    return found


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_terminal_and_fills_its_lines(
    help_in_colours: Callable[[str, int], Terminal], command: str, width: int
) -> None:
    """Colours are no columns, the source's line breaks do not show, no line of a box and no default is empty."""
    terminal = help_in_colours(command, width)
    lines = terminal.lines
    assert "\x1b[" in terminal.getvalue() and [line for line in lines if len(line) > width] == []
    assert any(line.startswith("│ -h, --help ") for line in lines) and too_early(lines) == []
    assert [line for line in lines if re.fullmatch("│ +│", line) or "(default: )" in line] == []


def test_a_line_that_ends_too_early_is_seen() -> None:
    early = "│ --where KEY   a;         │"
    rest = ["│               may come   │", "│ --more        twice      │"]
    assert too_early([early, *rest]) == [early]
    assert too_early([early.replace("a;     ", "a figure;")[: len(early) - 3] + "  │", *rest]) == []


@pytest.mark.parametrize("command", ["train", "parity"])
def test_every_setting_stands_in_the_help_with_its_default(lockstep: Lockstep, command: str) -> None:
    text = flat(lockstep(command, "--help-all").out)
    for key, field in SETTINGS.items():
        flag = "--" + key.replace("_", "-")
        default = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        shown = text.split(" options ", 1)[1].rsplit(f" {flag} ", 1)[1].split(" --", 1)[0]
        assert flat(field.description or "") in shown, flag
        names = [choice.names for choice in field.metadata if isinstance(choice, OneOf)]
        assert all("|".join(each) in shown for each in names), flag
        assert "(default: " in shown and (flat(default) or "empty") in shown, flag


def test_preparing_shows_what_bears_on_data_alone(lockstep: Lockstep) -> None:
    text = lockstep("data", "prepare", "--help").out
    assert "--data.val-fraction" in text and "--model.vocab-size" in text
    assert "--optim.peak-lr" not in text and "--model.hidden" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench"], f"bench is the first word of {len(BENCHES)} commands: {', '.join(BENCHES)}"),
        (["bench", "stp"], "bench stp is not a command; did you mean bench step?"),
        (["data"], "data is not a command; did you mean data prepare?"),
        (["data", "prpare"], "data prpare is not a command; did you mean data prepare?"),
        (["trian"], "trian is not a command; did you mean train?"),
        (["partiy", "x"], "partiy is not a command; did you mean parity?"),
        (["zzz"], "zzz is not a command; lockstep --help lists them"),
    ],
)
def test_a_command_that_is_none(refused, arguments: list[str], said: str) -> None:
    assert refused(*arguments) == said


def lacking(page: str, example: str) -> list[str]:
    """Return the options that a page of help marks as required and its example does not have."""
    rows = re.split(r"\n│ (?=\S)", page)  # lines of a row that follow its first are indented
    required = [row.split()[0] for row in rows if row.startswith("--") and "(required" in row]
    return [flag for flag in required if flag not in example.split()]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_example_has_every_option_that_is_required(
    help_in_colours: Callable[[str, int], Terminal], command: str
) -> None:
    page = "\n".join(help_in_colours(command, 80).lines)
    assert "\n│ -h, --help " in page
    examples = [line.split("#")[0] for line in page.splitlines() if line.startswith(f"  lockstep {command}")]
    assert examples and [(example, lacking(page, example)) for example in examples if lacking(page, example)] == []


def test_an_example_without_a_required_option_is_seen() -> None:
    page = "╭─ options ─╮\n│ --vary KEY=VALUES   a setting (required, repeatable) │\n│ --trials INT  (default: 0) │"
    assert lacking(page, "lockstep sweep CONFIG") == ["--vary"]
    assert lacking(page, "lockstep sweep CONFIG --vary seed=0,1") == []
