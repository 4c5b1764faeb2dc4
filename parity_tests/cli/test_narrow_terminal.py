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


def test_a_sweep_fits_and_its_commands_can_be_copied(screen: Screen, tmp_path: Path) -> None:
    """Lines of trials as they begin and end, and of the best; the folder's name is longer than a line has room for."""
    from lockstep.core.sweep.plan import write_plan
    from lockstep.core.sweep.sweep import Sweep
    from lockstep.parity_tests.sweep.made_up import MadeUp, plan
    from lockstep.scripts.commands import sweep as command

    space, folder = plan("optim.peak-lr=1e-3,1e-2"), tmp_path / "sweeps"
    write_plan(folder, space)
    with Sweep(folder, space) as made_up:
        assert command._run(made_up, MadeUp(), command.SweepOptions(folder, retry_failed=False), []) == 0
        line = made_up.trials[0].line
    indented = [text for text in screen.lines if text.startswith("  ")]
    joined = " ".join(text.strip().removesuffix("\\").strip() for text in indented)
    assert f"{line}" in joined or f"{made_up.trials[1].line}" in joined
    # A path alone may be wider than the terminal; every other line fits.
    assert [text for text in wide(screen.lines) if str(tmp_path) not in text] == []
    assert not any(text.endswith(str(tmp_path)[:20]) for text in screen.lines)


def test_the_overview_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert wide(usage().splitlines()) == []


def test_a_wide_line_is_seen() -> None:
    assert wide(["x" * 80, "x" * 81]) == ["x" * 81]
