"""Whole outputs of commands on a terminal of 80 columns: no line is wider, and no word is broken in the middle."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.core.sinks.terminal import open_console
from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.parity_tests.repository import REPO
from lockstep.scripts.cli import usage

WIDTH = 80
COLOURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Screen:
    """Holds what commands print on a terminal of WIDTH columns."""

    def __init__(self) -> None:
        self._file = io.StringIO()

    def open(self, width: int | None = None) -> Console:
        console = open_console(width or WIDTH)
        console.file = self._file
        console._force_terminal = True
        return console

    @property
    def lines(self) -> list[str]:
        return re.split(r"[\r\n]+", COLOURS.sub("", self._file.getvalue()))


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    screen = Screen()
    monkeypatch.setattr("lockstep.core.sinks.terminal.open_console", screen.open)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    return screen


def wide(lines: list[str]) -> list[str]:
    return [line for line in lines if len(line.rstrip()) > WIDTH]


@pytest.mark.parametrize("name", ["quickstart", "llama-1b"])
def test_a_plan_fits(lockstep: Lockstep, screen: Screen, name: str) -> None:
    assert lockstep("plan", REPO / f"configs/{name}.toml", "--gpu", "h100").code == 0
    assert screen.lines and wide(screen.lines) == []
    text = "\n".join(screen.lines)
    # Rows of the widest table stand below each other, each cell with its header.
    assert re.search(r"^  → none\n    1: \d", text, re.MULTILINE) and "largest: " in text and "tokens/s there" in text


@pytest.mark.parametrize("verbose", [False, True])
def test_training_fits(lockstep: Lockstep, screen: Screen, run_file: Path, verbose: bool) -> None:
    flags = ("--log.norms-every", "1", "--log.fp32-loss-every", "1", *["--verbose"] * verbose)
    assert lockstep("train", run_file, "--train.steps", "4", "--log.sample-every", "2", *flags).code == 0
    assert wide(screen.lines) == []
    said = [line for line in screen.lines if line.startswith("step 4/4 · loss ")]
    assert said and "tok/s" in said[-1]
    assert any(line.startswith("│ loss ") for line in screen.lines), "the table at the end"
    assert any("update/weight" in line for line in screen.lines) is verbose


def test_the_overview_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert wide(usage().splitlines()) == []


def test_a_wide_line_is_seen() -> None:
    assert wide(["x" * 80, "x" * 81]) == ["x" * 81]
