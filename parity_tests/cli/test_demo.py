"""`lockstep demo`: it leaves folders of others alone, tells what its runs showed, and finds its fault."""

from __future__ import annotations

import json
import re
import shutil
import sysconfig
from pathlib import Path

import pytest

import lockstep.core
from lockstep.core.config.file import load_config
from lockstep.core.errors import UserError
from lockstep.core.parity.measures import calibrated_bounds
from lockstep.core.parity.measures.verdict import Check, Finding, Measure
from lockstep.core.sinks.terminal import open_console
from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.parity_tests.repository import REPO
from lockstep.scripts.shared import demo_run, demo_story
from lockstep.scripts.shared.backends import open_candidate
from lockstep.scripts.shared.demo_run import (
    CONFIG,
    FAULT,
    FAULTY,
    HONEST,
    Trained,
    claimed,
    faulty_backend,
    origin_of,
    prepared,
)
from lockstep.scripts.shared.planting import chosen

ORIGIN = Finding(
    "q_rope",
    "blocks.0.attn.q_rope",
    "forward",
    0,
    "local",
    (Measure("excess", 1.0, 0.5, 2.0, "a test"), Measure("twin_distance", 2936.0, None, 4.26, "clean draws")),
    10,
)
INHERITED = Finding("attn", "blocks.0.attn.out", "forward", 0, "end_to_end", ORIGIN.measures, 10)
GOOD = Trained([(step, 6.0 / step) for step in range(1, 41)], [(1, "agreed", None), (20, "agreed", None)])
BAD = Trained([(step, 6.0 / step + 1e-4) for step in range(1, 41)], [(1, "disagreed", ORIGIN), (20, "agreed", None)])


# Its folder


def test_a_demo_replaces_an_earlier_one_and_nothing_else(tmp_path: Path) -> None:
    folder = claimed(tmp_path / "new" / "demo")
    config = load_config(folder / CONFIG, {})
    assert config.data.path == str(folder.resolve() / "data") and config.name == HONEST
    (folder / "runs").mkdir()
    assert claimed(folder) == folder
    (folder / "mine.txt").write_text("mine")
    before = sorted(folder.iterdir())
    with pytest.raises(UserError, match="holds something other than a demo; name another folder with --out"):
        claimed(folder)
    assert sorted(folder.iterdir()) == before


def test_data_is_made_anew_of_the_sources_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "core"
    sources.mkdir()
    (sources / "__init__.py").write_text("")
    for module in ("argparse", "ast", "copy", "csv", "glob"):
        shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / f"{module}.py", sources)
    (sources / "made.pyc").write_bytes(b"\0")
    monkeypatch.setattr(lockstep.core, "__file__", str(sources / "__init__.py"))
    folder = claimed(tmp_path / "demo")
    before = prepared(folder)
    (sources / "ast.py").write_text("of another version")
    assert 0 < prepared(folder) < before


@pytest.mark.parametrize("names", [["runs"], ["demo.toml", "data"], ["thesis.tex"]])
def test_a_folder_of_somebody_elses_is_refused_and_left_as_it_is(refused, here: Path, names: list[str]) -> None:
    (here / "there").mkdir()
    for name in names:
        (here / "there" / name).write_text("mine")
    assert refused("demo", "--out", "there").startswith("there holds something other than a demo")
    assert refused("demo", "--out", f"there/{names[0]}/below").startswith("cannot make")
    assert [(here / "there" / name).read_text() for name in names] == ["mine"] * len(names)


# Its run


def test_the_run_file_is_eager_small_and_has_bounds(tmp_path: Path) -> None:
    config = load_config(claimed(tmp_path / "demo") / CONFIG, {})
    assert (config.compile.enabled, config.device, config.parity.due(1)) == (False, "cpu", True)
    calibrated_bounds.require(config)
    assert calibrated_bounds.recipe_of(config) == "bf16/eager"
    assert config == load_config(REPO / "configs/demo.toml", {"data.path": config.data.path})


def test_the_planted_fault_is_one_whose_loss_hardly_moves_and_has_a_name_to_type() -> None:
    (fault,) = chosen([FAULT])
    assert fault.loss_moves_less_than is not None
    assert type(open_candidate(faulty_backend())) is type(fault.make())


# Its story


def test_the_origin_of_a_recorded_check_is_read_with_its_measures() -> None:
    line = json.loads(json.dumps(Check(1, (INHERITED, ORIGIN), ()).to_json()))
    assert origin_of(line) == ORIGIN
    assert origin_of({"step": 3, "verdict": "skipped", "reason": "full"}) is None


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_story_is_short_and_fits_the_terminal(tmp_path: Path, width: int) -> None:
    console = open_console(width)
    console._force_terminal = True
    with console.capture() as caught:
        demo_story.print_beginning(console)
        demo_story.print_data(console, 881_265)
        demo_story.print_losses(console, GOOD, BAD)
        demo_story.print_checks(console, GOOD, BAD)
        demo_story.print_end(console, Path("lockstep-demo"), Path("/somewhere/report.html"), 61.0)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", caught.get()).splitlines()
    assert len(lines) <= (36 if width < 80 else 30)
    assert [line for line in lines if len(line) > width] == []
    text = " ".join("\n".join(lines).replace("\\\n", " ").split())  # a command's lines as a shell joins them
    assert "40 0.1500 0.1501 +0.000100" in text
    assert "honest: 2 of 2 checks agreed with-a-fault: 1 of 2 checks agreed" in text
    assert "first bad step 1; origin: q_rope (forward, layer 0, at blocks.0.attn.q_rope, from its own input)" in text
    assert "twin distance 2,936; allowed ≤ 4.26 (clean draws)" in text
    assert f"lockstep parity lockstep-demo/demo.toml --candidate {faulty_backend()}" in text


@pytest.mark.parametrize(("honest", "faulty", "code"), [(GOOD, BAD, 0), (BAD, BAD, 1), (GOOD, GOOD, 2)])
def test_the_exit_code_is_whether_the_story_came_true(
    lockstep: Lockstep, monkeypatch: pytest.MonkeyPatch, honest: Trained, faulty: Trained, code: int
) -> None:
    runs = {HONEST: honest, FAULTY: faulty}
    monkeypatch.setattr(demo_run, "prepared", lambda folder: 1)
    monkeypatch.setattr(demo_run, "trained", lambda folder, name: runs[name])
    monkeypatch.setattr(demo_story, "write_reports", lambda folder: Path("/report.html"))
    monkeypatch.setattr("webbrowser.open", lambda address: pytest.fail("nobody watches: the output is no terminal"))
    done = lockstep("demo")
    assert done.code == code
    assert ("the planted fault was not found" in done.err) is (code == 2)


def test_a_report_is_opened_where_there_are_a_terminal_and_a_desktop(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    terminal = open_console(80)
    terminal._force_terminal = True
    for display in (None, ":0"):
        monkeypatch.setenv("DISPLAY", display) if display else monkeypatch.delenv("DISPLAY", raising=False)
        for console in (open_console(80), terminal):
            demo_story.open_in_browser(Path("/a report.html"), console)
    assert opened == ["file:///a%20report.html"]


# The whole of it


def test_a_demo_finds_its_fault(lockstep: Lockstep, here: Path) -> None:
    done = lockstep("demo", "--no-open", "--out", "demo")
    assert (done.code, done.err) == (0, "")
    assert "honest: 3 of 3 checks agreed" in done.out
    assert re.search(r"first bad step 1; origin: q_rope \(forward, layer 0", done.out)
    rows = re.findall(r"^ +\d+ +(\d+\.\d+) +(\d+\.\d+) +([+-]\d+\.\d+)$", done.out, re.MULTILINE)
    assert len(rows) == 5 and all(abs(float(difference)) < 0.02 for _, _, difference in rows)
    for name in (HONEST, FAULTY):
        assert (here / "demo/runs" / name / "report.html").is_file()
    assert f"report: {here.resolve()}/demo/runs/{FAULTY}/report.html" in done.out
    assert lockstep("demo", "--no-open", "--out", "demo").code == 0, "again, in the same folder"
