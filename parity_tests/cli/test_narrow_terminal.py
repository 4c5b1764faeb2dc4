"""Whole outputs of commands on a terminal of 80 columns: no line is wider, and no word is broken in the middle."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.core.mutate.rows import Row as Mutation
from lockstep.core.profile.page import page
from lockstep.core.profile.summary import summarize
from lockstep.core.profile.trace import events_of
from lockstep.core.sinks.lines import say
from lockstep.core.sinks.tables import print_fitting
from lockstep.core.sinks.terminal import open_console
from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.parity_tests.profile.made import gpu_trace
from lockstep.parity_tests.repository import REPO
from lockstep.scripts.cli import usage
from lockstep.scripts.commands import mutate
from lockstep.scripts.shared.scoreboard import HONEST, Row, print_head, print_row

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
    assert any(re.match(r"│ the data +│ [\d,]+ tokens: ", line) for line in screen.lines), "its name stands once"


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


def cut(lines: list[str], *whole: str) -> list[str]:
    """Texts of which no line has the whole."""
    return [text for text in whole if not any(text in line for line in lines)]


def test_rows_of_faults_fit(screen: Screen) -> None:
    """The longest names of the collection: two lines each, whose numbers are named; a wide terminal has a table."""
    origin = ("ffn_embedding_norm", "backward", 31)
    row = Row("EveryRankReadsTheFirstShare", "bf16/compiled", "", 4, origin, 1, 1, 1.0, None)
    found = replace(row, step=1, rank=1, loss_moved=1e-3, named=origin, cause="c " * 90)
    rows = (replace(row, name=HONEST), replace(row, name=HONEST, step=2), row, found, replace(found, rank=2))

    def print_all(console: Console) -> None:
        print_head(console)
        for one in rows:
            print_row(console, one)

    print_all(screen.open())
    assert wide(screen.lines) == [] and not any("loss moved  " in line for line in screen.lines)
    assert sum(line.startswith("    planted in ") and ", named " in line for line in screen.lines) == 3
    assert cut(screen.lines, "found in step 1, top 1, loss moved by 1.0e-03", "not accused, ") == []
    print_all(screen.open(130))
    assert any(re.search(r" planted in +found +named +rank +loss moved$", line) for line in screen.lines)


def test_rows_of_mutants_fit(screen: Screen) -> None:
    origin = ("update", "update", None)
    row = Mutation("blocks.0.mlp.down_proj.weight:update*swap(column)@from-step-3", "fp32/eager", (origin,), 3)
    found = replace(row, effect=5.2e-2, found=True, exact=True, named=origin, measure="largest difference " * 5)
    for in_full in (False, True):
        mutate.print_row(screen.open(), found, in_full)
    assert wide([mutate.HEAD, *screen.lines]) == [] and cut(screen.lines, row.id, " 5.2e-02  found") == []


def test_the_museum_fits_and_breaks_no_word(lockstep: Lockstep) -> None:
    lines = lockstep("museum").out.splitlines()
    assert wide(lines) == [] and [line for line in lines if line.endswith("-")] == []
    assert any("micro-batches" in line for line in lines)


def test_tables_of_benches_fit(screen: Screen) -> None:
    """A wider table than the terminal has its rows below each other; on a wide one it stays a table."""
    from lockstep.core.bench.page import HEADERS

    row = [f"{header} 1.234 (1.2 to 1.3)" for header in HEADERS]
    print_fitting(screen.open(), "Whole steps", HEADERS, [row])
    assert wide(screen.lines) == [] and cut(screen.lines, f"  {row[0]}", f"{HEADERS[-1]}: {row[-1]}") == []
    print_fitting(screen.open(), "small", ("a", "b"), [["1", "2"]])
    assert any(line.startswith("│ 1 │ 2 │") for line in screen.lines)


def test_a_profile_fits(screen: Screen) -> None:
    """The rows of its widest table stand below each other on a terminal; its file keeps the table."""
    found = summarize(events_of(gpu_trace()["traceEvents"])) | {"step_seconds": 9e-5, "floor_seconds": 4.5e-5}
    say(screen.open(), page("Profile", found, WIDTH))
    assert wide(screen.lines) == [] and cut(screen.lines, "    kind: product · part: ", "| computing ") == []
    assert "| name " in page("Profile", found) and "    kind: " not in page("Profile", found)


def test_the_overview_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert wide(usage().splitlines()) == []


def test_a_wide_line_is_seen() -> None:
    assert wide(["x" * 80, "x" * 81]) == ["x" * 81]
