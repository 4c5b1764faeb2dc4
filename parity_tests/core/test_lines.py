"""Lines of text on a terminal: no word is broken, no line is wider, and a command in one can be copied."""

from __future__ import annotations

import ast
import io
import os
import shlex
import sys

import pytest

from lockstep.core.sinks.lines import announce, complain, fitted
from lockstep.parity_tests.repository import REPO, parsed

WIDTH = 80
PROSE = "command line: optim.peek_lr is not a setting; did you mean optim.peak_lr, which is the highest learning rate?"
GO_ON = "the disk is full; when there is room, continue with: lockstep train --resume runs/quickstart; nothing was lost"
LONG = f"data/a holds no prepared data; make it with: lockstep data prepare {'configs/a.toml --data.path data/a ' * 3}"


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def shell_reads(text: str) -> list[str]:
    """Return the commands of the indented lines as a shell joins them."""
    joined = text.replace("\\\n", " ")
    return [" ".join(line.split()) for line in joined.split("\n") if line.strip().startswith("lockstep ")]


def words(text: str) -> list[str]:
    return [word for word in text.split() if word != "\\"]


@pytest.mark.parametrize("line", [PROSE, GO_ON, LONG])
@pytest.mark.parametrize("width", [40, WIDTH])
def test_no_line_is_wider_and_no_word_is_broken(line: str, width: int) -> None:
    broken = fitted(line, width)
    assert max(map(len, broken.split("\n"))) <= width
    assert words(broken) == line.split()


def test_a_line_that_fits_stays() -> None:
    assert fitted("lockstep: no such file: a.toml", WIDTH) == "lockstep: no such file: a.toml"


def test_a_command_can_be_copied() -> None:
    assert shell_reads(fitted(GO_ON, WIDTH)) == ["lockstep train --resume runs/quickstart;"]
    long = shell_reads(fitted(LONG, WIDTH))
    assert [shlex.split(one) for one in long] == [shlex.split(LONG.partition(": ")[2])]


def test_an_indented_command_can_be_copied() -> None:
    command = f"lockstep parity demo.toml --candidate {'faults.' * 8}attention:RopeInBf16"
    broken = fitted(f"  {command}", WIDTH)
    assert max(map(len, broken.split("\n"))) <= WIDTH and shell_reads(broken) == [command]
    assert fitted(f"lockstep {'x ' * 60}", WIDTH).count("\\") == 0, "a sentence"


def test_a_command_with_quotes_stays_whole() -> None:
    line = f"make it with: lockstep train --data.mixture 'data/code: 0.5, {'data/more: 0.1, ' * 5}data/web: 0.31'"
    assert fitted(line, WIDTH).split("\n")[1].strip() == line.partition(": ")[2]


def test_a_message_that_begins_with_a_program_is_no_command() -> None:
    line = "lockstep: torchrun has launched two ranks, and train.ranks is four: start it with as many as the run has"
    assert fitted(line, WIDTH).startswith("lockstep: torchrun has launched two ranks")


def test_stderr_on_a_terminal_is_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    complain(f"{PROSE}\n{PROSE}")
    printed = terminal.getvalue().splitlines()
    assert max(map(len, printed)) <= WIDTH and words(terminal.getvalue()) == f"lockstep: {PROSE} {PROSE}".split()
    assert not any(line.endswith("optim.peak_") for line in printed)


def test_stdout_on_a_terminal_is_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    announce(PROSE)
    assert max(map(len, terminal.getvalue().splitlines())) <= WIDTH and words(terminal.getvalue()) == PROSE.split()


def test_stdout_in_a_file_keeps_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    announce(LONG)
    assert capsys.readouterr().out == f"{LONG}\n"


def test_stderr_in_a_file_keeps_one_line_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    complain(LONG)
    assert capsys.readouterr().err == f"lockstep: {LONG}\n"


def test_the_width_is_stderrs_own_where_stdout_is_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    class Narrow(Terminal):
        def fileno(self) -> int:
            return 2

    # Undone before pytest reports the test: its report needs the width of stdout.
    with monkeypatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        patch.setattr(sys, "stderr", terminal := Narrow())
        patch.setattr(os, "get_terminal_size", lambda number: {2: os.terminal_size((50, 24))}[number])
        complain(PROSE)
    assert max(map(len, terminal.getvalue().splitlines())) <= 50


# Files that print on stderr by themselves, each with the reason for which its lines need not be fitted.
PRINT = {
    "scripts/commands/parity.py": "its progress, in short lines, on a terminal alone",
    "scripts/shared/needs.py": "for scripts/gpu_check.sh",
}


def printing_on_stderr(source: str) -> list[int]:
    """Return the lines of calls with `file=sys.stderr`."""
    calls = (node for node in ast.walk(parsed(source)) if isinstance(node, ast.Call))
    return [
        call.lineno
        for call in calls
        for keyword in call.keywords
        if keyword.arg == "file" and ast.unparse(keyword.value) == "sys.stderr"
    ]


def test_messages_of_the_commands_are_fitted() -> None:
    rooms = ("core", "torch_backend", "jax_backend", "scripts/commands", "scripts/shared")
    files = [REPO / "scripts/cli.py", *(path for room in rooms for path in sorted((REPO / room).rglob("*.py")))]
    printing = {
        path.relative_to(REPO).as_posix() for path in files if printing_on_stderr(path.read_text(encoding="utf-8"))
    }
    assert printing == set(PRINT), "lockstep.core.sinks.lines.complain prints messages"


def test_a_planted_print_is_seen() -> None:
    assert printing_on_stderr('x = 1\nprint(f"lockstep: {x}", file=sys.stderr)\n') == [2]
