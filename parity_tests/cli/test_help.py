"""`--help` is readable and complete; commands that are none get the nearest right one."""

from __future__ import annotations

import pytest

from lockstep.core.components.choice import OneOf
from lockstep.core.config.file import settings
from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.scripts.cli import COMMANDS

# By default there is something to say of each; `every` of a section is explained by the section.
SETTINGS = settings()


def flat(text: str) -> str:
    return " ".join(text.translate(str.maketrans("│╭╮╰╯─", "      ")).split())


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("help",), ("data", "--help")])
def test_the_overview_names_every_command_and_the_exit_codes(lockstep: Lockstep, arguments: tuple[str, ...]) -> None:
    done = lockstep(*arguments)
    assert (done.code, done.err) == (0, "")
    for name in COMMANDS:
        assert f"  {name} " in done.out
    assert "0 did it or agreed · 1 disagreed · 2 could not" in done.out


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


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_no_line_of_help_is_wider_than_a_terminal(
    lockstep: Lockstep, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = lockstep(*command.split(), "--help")
    assert done.code == 0 and [line for line in done.out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("command", ["train", "parity"])
def test_every_setting_stands_in_the_help_with_its_default(lockstep: Lockstep, command: str) -> None:
    text = flat(lockstep(command, "--help").out)
    for key, field in SETTINGS.items():
        flag = "--" + key.replace("_", "-")
        default = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        shown = text.rsplit(f" {flag} ", 1)[1].split(" --", 1)[0]
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
        (["data"], "data is not a command; did you mean data prepare?"),
        (["data", "prpare"], "data prpare is not a command; did you mean data prepare?"),
        (["trian"], "trian is not a command; did you mean train?"),
        (["partiy", "x"], "partiy is not a command; did you mean parity?"),
        (["zzz"], "zzz is not a command; lockstep --help lists them"),
    ],
)
def test_a_command_that_is_none(refused, arguments: list[str], said: str) -> None:
    assert refused(*arguments) == said
