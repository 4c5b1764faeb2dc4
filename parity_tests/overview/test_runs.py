"""`lockstep runs` shows what the runs' files hold, whatever else lies in the folder."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.config.schema import ModelConfig
from lockstep.core.errors import UserError
from lockstep.core.files.jsonl import read_lines, sealed_line
from lockstep.core.files.lock import FolderLock, is_held
from lockstep.core.overview import tail
from lockstep.core.overview.columns import chosen, condition, in_order
from lockstep.core.overview.differences import differing, named, told
from lockstep.core.overview.find import find_runs
from lockstep.core.overview.page import build_page
from lockstep.core.overview.row import Row, read_row, rows_of_branches
from lockstep.core.overview.table import _folded, summary, verdicts
from lockstep.core.overview.tail import Tail, read_tail
from lockstep.core.overview.verdicts import count_verdicts, overall
from lockstep.core.report.checks import Checks
from lockstep.core.run.info import read_info, write_info
from lockstep.parity_tests.report.fake_run import write_run
from lockstep.parity_tests.report.test_compare import with_name
from lockstep.parity_tests.report.test_report import Tags
from lockstep.scripts import cli

MARKUP = "</script><img src=x onerror=alert(1)>\"'&\u2028"
ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b31m\r\u202e"
SMALL = ModelConfig(layers=1)
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def with_info(run: Path, **changes: Any) -> Path:
    write_info(run / "run.json", read_info(run / "run.json") | changes)
    return run


def line(step: int, loss: float, **more: Any) -> bytes:
    return sealed_line({"step": step, "loss": loss, **more})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write runs of every state, beside files and folders that are no run."""
    root = tmp_path_factory.mktemp("all")
    ended = with_name(write_run(root / "ended", steps=60, every=30, model=SMALL), "ended")
    with_info(ended, finished=True, stopped=None)
    for name, steps, rate in (("trial_9", 30, 0.001), ("trial_10", 20, 0.01)):
        with_name(write_run(root / "sweep" / name, steps=steps, checked=False, seed=1), name, rate)
    with_info(root / "sweep" / "trial_9", stopped=None)
    failed = {"how": "failed", "said": "disk full", "time": ""}
    with_info(root / "sweep" / "trial_10", stopped=failed)
    bad = with_name(write_run(root / "bad", steps=200, every=100, faulty=True, model=SMALL), "bad")
    with_info(bad, stopped={"how": "alarmed", "said": "a check disagreed", "time": ""})
    new = with_info(write_run(root / "new", steps=1, checked=False), stopped=None)
    (new / "records.jsonl").unlink()
    (root / "texts").mkdir()
    (root / "texts" / "a.txt").write_text("no run")
    (root / ".new.12.new").mkdir()
    shutil.copy(ended / "run.json", root / ".new.12.new")
    return root


@pytest.fixture
def rows(folder: Path) -> list[Row]:
    return [read_row(folder, path) for path in find_runs(folder).runs]


def test_runs_are_found_in_natural_order_and_nothing_else_is(folder: Path) -> None:
    assert [str(path) for path in find_runs(folder).runs] == ["bad", "ended", "new", "sweep/trial_9", "sweep/trial_10"]
    # Told to list a run, it lists that one; folders in it are not looked through.
    assert find_runs(folder / "ended").runs == [Path(".")]


def test_states(rows: list[Row], folder: Path) -> None:
    found = {row.path: (row.state, row.why) for row in rows}
    assert found == {
        "bad": ("stopped", "a check disagreed"),
        "ended": ("ended", ""),
        "new": ("not begun", ""),
        "sweep/trial_9": ("killed", ""),
        "sweep/trial_10": ("failed", "disk full"),
    }
    with FolderLock(folder / "sweep" / "trial_9"):
        assert read_row(folder, Path("sweep/trial_9")).state == "running"
    # A run of an earlier version, of which nobody wrote down how it ended.
    info = {key: value for key, value in read_info(folder / "sweep/trial_9/run.json").items() if key != "stopped"}
    other = shutil.copytree(folder / "sweep" / "trial_9", folder.parent / "old")
    write_info(other / "run.json", info)
    assert read_row(folder.parent, Path("old")).state == "stopped"


def test_a_reader_of_locks_keeps_nobody_from_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_held(tmp_path) is False
    with FolderLock(tmp_path):
        assert is_held(tmp_path) is True
    assert is_held(tmp_path) is False
    # The reader's own lock, for as long as it takes: the writer tries again.
    reader = os.open(tmp_path / ".lock", os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    monkeypatch.setattr("time.sleep", lambda seconds: fcntl.flock(reader, fcntl.LOCK_UN))
    FolderLock(tmp_path).release()
    os.close(reader)
    (tmp_path / ".lock").unlink()
    os.mkfifo(tmp_path / ".lock")
    assert is_held(tmp_path) is None


def test_figures_are_those_of_the_records(rows: list[Row], folder: Path) -> None:
    row = next(row for row in rows if row.path == "ended")
    records = read_lines(folder / "ended" / "records.jsonl")
    assert row.tail.step == 60 and row.planned == 400
    assert row.tail.loss == pytest.approx(sum(r["loss"] for r in records[-20:]) / 20)
    assert row.tail.validation == (50, records[49]["metrics"]["val/loss"])
    assert row.tail.speed in [r["tokens_per_second"] for r in records[-20:]]


@pytest.mark.parametrize("chunk", [100, 700, 5_000])
def test_the_end_of_long_records_is_enough(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures do not depend on where the reading begins, but for what lies before."""
    run = write_run(tmp_path / "run", steps=120, checked=False)
    whole = read_tail(run / "records.jsonl")
    monkeypatch.setattr(tail, "CHUNK", chunk)
    assert read_tail(run / "records.jsonl") == whole


def test_a_loss_that_is_not_finite_is_told_and_a_step_left_out_is_not(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(line(1, 2.0) + line(2, math.nan, left_out="loss") + line(3, 4.0))
    assert read_tail(path).loss == 3.0
    path.write_bytes(line(1, 2.0) + line(2, math.nan) + line(3, 4.0))
    assert math.isnan(read_tail(path).loss or 0.0)


def test_a_torn_line_is_left_out_and_a_damaged_one_is_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=20, checked=False)
    raw = (run / "records.jsonl").read_bytes()
    (run / "records.jsonl").write_bytes(raw.replace(b'"step": 19', b'"step": 18') + b'{"step": 21, "lo')
    row = read_row(tmp_path, Path("run"))
    assert row.tail.step == 20 and row.tail.damaged == 1
    assert row.problems == ("1 of the last lines of records.jsonl are damaged",)


@pytest.mark.parametrize("faulty", [False, True])
def test_verdicts_are_counted_as_the_report_counts_them(faulty: bool, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=180, every=20, faulty=faulty, model=SMALL)
    path = run / "parity.jsonl"
    lines = read_lines(path)
    more = [{**lines[0], "stages": []}, {**lines[0], "verdict": "could_not"}, {"verdict": "agreed", **lines[2]}]
    more += [{**lines[-1], "verdict": "agreed", "cause": '"ok": false'}]
    path.write_bytes(b"".join(map(sealed_line, [*lines, *more])))
    expected = Checks()
    for check in read_lines(path):
        expected.add(check)
    found = count_verdicts(path)
    assert found == +expected.counts and overall(found) == expected.verdict
    # Steps 160 and 180, and the one that claims to have agreed.
    assert found["disagreed"] == (3 if faulty else 0) and found["skipped"] == 1
    path.write_bytes(path.read_bytes().replace(b'"agreed"', b'"agread"', 1))
    assert count_verdicts(path)["damaged"] == 1


def test_branches(tmp_path: Path) -> None:
    run = with_name(write_run(tmp_path / "run", steps=40, checked=False), "run", 0.001)
    left = run / "branches" / "001"
    left.mkdir(parents=True)
    (left / "records.jsonl").write_bytes(line(39, 3.0) + line(40, 2.0))
    begun = {"step": 38, "branch": 2, "changed": {"optim.peak_lr": [0.001, 0.0005]}, "left": "branches/001"}
    resumes = [{**begun, "settings": {"optim.peak_lr": "0.0005"}}, {"step": 39, "left": "branches/002"}]
    branches = [{"path": "branches/001"}, {"path": "../../elsewhere"}]
    with_info(run, resumes=resumes, branches=branches)
    row = read_row(tmp_path, Path("run"))
    assert row.branch == 2 and row.settings["optim.peak_lr"] == 0.0005
    assert row.history == ("branch 2 from step 38: optim.peak_lr 0.001 → 0.0005", "set back to step 39")
    # A path that leads out of the run is no branch.
    assert row.left == ("branches/001",)
    (own,) = rows_of_branches(tmp_path, row)
    assert (own.path, own.state, own.tail.step, own.tail.loss) == ("run/branches/001", "left", 40, 2.5)
    assert own.settings["optim.peak_lr"] == 0.001 and own.branch == 1


def test_only_settings_that_differ_are_told(rows: list[Row]) -> None:
    keys = differing(rows)
    assert keys == ["optim.peak_lr"]
    assert told(rows[4], keys) == [("optim.peak_lr", "0.01")]
    baseline = named(rows, "sweep/trial_10")
    assert told(rows[4], keys, baseline) == [] and told(rows[3], keys, baseline) == [("optim.peak_lr", "0.001")]
    with pytest.raises(UserError, match=r"no such run here; did you mean (sweep/)?trial_10\?"):
        named(rows, "trial_11")


def test_conditions_and_order(rows: list[Row]) -> None:
    def paths(*texts: str) -> list[str]:
        return [row.path for row in chosen(rows, [condition(text) for text in texts])]

    assert paths("optim.peak-lr>1e-3") == ["bad", "ended", "new", "sweep/trial_10"]
    assert paths("optim.peak_lr == 0.01", "state=failed") == ["sweep/trial_10"]
    assert paths("loss<1e9") == ["bad", "ended", "sweep/trial_9", "sweep/trial_10"]
    assert paths("state!=killed", "disagreed>=1") == ["bad"]
    by_loss = in_order(rows, "loss", descending=True)
    assert by_loss[-1].path == "new"
    losses = [row.tail.loss or 0.0 for row in by_loss[:-1]]
    assert losses == sorted(losses, reverse=True)
    assert next(row.path for row in in_order(rows, "optim.peak-lr", False)) == "sweep/trial_9"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optim.peek_lr>1", "did you mean optim.peak_lr?"),
        ("state>1", "> compares numbers"),
        ("loss", "write KEY, one of"),
        ("__import__('os').system('x')>1", "write KEY, one of"),
        ("loss>(1)", "> compares numbers"),
    ],
)
def test_what_is_no_condition_is_refused(text: str, said: str, rows: list[Row]) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        chosen(rows, [condition(text)])


# Other files in a folder


@pytest.fixture
def strange(tmp_path: Path) -> Iterator[Path]:
    """One run that is whole, beside everything that can be wrong with a directory."""
    root = tmp_path / "strange"
    with_info(write_run(root / "whole", steps=20, every=20, model=SMALL), stopped=None)
    loop = root / "loop"
    loop.mkdir()
    (loop / "again").symlink_to(root)
    (root / "out").symlink_to(tmp_path)
    for name in ("no_info", "cut", "foreign", "list", "links", "pipes", "deep", "wrong_types"):
        shutil.copytree(root / "whole", root / name)
    (root / "no_info" / "run.json").unlink()
    (root / "cut" / "run.json").write_bytes((root / "whole" / "run.json").read_bytes()[:200])
    (root / "foreign" / "records.jsonl").write_bytes(sealed_line({"iteration": 1}))
    (root / "list" / "run.json").write_text("[1]")
    (root / "deep" / "run.json").write_text("[" * 100_000)
    secret = tmp_path / "secret.jsonl"
    secret.write_bytes(line(77, 0.5))
    for name in ("links", "pipes"):
        (root / name / "records.jsonl").unlink()
    (root / "links" / "records.jsonl").symlink_to(secret)
    os.mkfifo(root / "pipes" / "records.jsonl")
    with_info(root / "wrong_types", resumes=[{"step": "x"}, 3], branches="abc", damaged=5)
    yield root


def test_what_is_broken_is_a_row_with_a_problem(strange: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = find_runs(strange)
    assert found.links == 2 and len(found.runs) == 9
    rows = {str(path): read_row(strange, path) for path in found.runs}
    assert [path for path, row in rows.items() if not row.problems] == ["whole"]
    assert rows["no_info"].settings["optim.peak_lr"] == 0.003
    assert rows["links"].tail == Tail() and rows["pipes"].tail == Tail()
    assert cli.run(["runs", str(strange)]) == 0
    out, err = capsys.readouterr()
    assert "links: records.jsonl is a link that leads out of the run" in out
    assert "77" not in out and "symbolic links to folders that were not followed: 2" in err


def test_a_terminal_obeys_nothing_in_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "runs" / f"a{ESCAPES}b", steps=20, checked=False)
    stopped = {"how": "failed", "said": ESCAPES, "time": ""}
    with_info(run, name=ESCAPES, stopped=stopped, config={"optim.peak_lr": ESCAPES, ESCAPES: 1})
    with_info(write_run(tmp_path / "runs" / "b", steps=20, checked=False), config={"optim.peak_lr": 1.0, ESCAPES: 2})
    os.mkdir(os.fsencode(tmp_path / "runs") + b"/\xff")
    shutil.copy(run / "run.json", os.fsdecode(os.fsencode(tmp_path / "runs") + b"/\xff"))
    assert cli.run(["runs"]) == 0
    out, err = capsys.readouterr()
    assert not OBEYED.search((out + err).replace("\n", "")) and r"\x1b]0;title" in out and r"\udcff" in out


def test_a_run_whose_check_disagreed_has_not_the_lowest_loss(rows: list[Row], folder: Path) -> None:
    losses = {row.path: row.tail.validation[1] for row in rows if row.tail.validation}
    assert min(losses, key=lambda path: losses[path]) == "bad" and "ended" in losses
    page = build_page(folder, rows, [], None)
    assert re.search(r"<dt>Lowest val</dt><dd>[\d.]+<small>ended</small>", page)


def test_checks_are_sorted_by_disagreements_and_runs_without_checks_stand_last(rows: list[Row], folder: Path) -> None:
    doubtful = replace(rows[1], path="doubtful", checks=Counter(agreed=1, skipped=2))
    page = build_page(folder, [*rows, doubtful], [], None)
    found = dict(re.findall(r'<th scope="row" data-v="([^"]*)">.*?<td class="checks" data-v="([^"]*)">', page))
    assert found == {
        "bad": "1", "ended": "0", "new": "", "sweep/trial_9": "", "sweep/trial_10": "", "doubtful": "0.5"
    }  # fmt: skip


def test_the_page_escapes_everything(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "<img src=x onerror=alert(1)>", steps=20, checked=False)
    stopped = {"how": "failed", "said": MARKUP, "time": ""}
    with_info(run, name=MARKUP, stopped=stopped, config={"optim.peak_lr": MARKUP, MARKUP: MARKUP})
    with_info(write_run(tmp_path / "runs" / "b", steps=20, checked=False), config={"optim.peak_lr": 1.0, MARKUP: 2})
    page = tmp_path / "page.html"
    assert cli.run(["runs", str(tmp_path / "runs"), "--page", str(page)]) == 0
    tags = Tags()
    tags.feed(page.read_text())
    assert tags.scripts == 2 and "img" not in tags.tags
    assert not [name for name, _ in tags.attributes if name.startswith("on")]


# The command


def test_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["runs", str(folder), "--sort", "steps"]) == 0
    text = capsys.readouterr().out
    order = [text.index(f"\n{path} ") for path in ("sweep/trial_10", "sweep/trial_9", "ended", "bad", "new")]
    assert order == sorted(order)
    assert "5 runs: 1 ended, 1 stopped, 1 failed, 1 killed, 1 not begun; checks disagreed in 1" in text
    assert "bad: stopped: a check disagreed" in text and "optim.peak_lr 0.01" in text


def test_the_table_fits_a_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.core.sinks import terminal

    monkeypatch.setattr(terminal, "open_unwrapped", lambda: terminal.open_console(80))
    assert cli.run(["runs", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and "sweep/trial_9: optim.peak_lr 0.001" in lines


def test_a_path_that_has_no_room_is_folded_behind_a_slash() -> None:
    assert _folded("sweeps/tiny/trials/trial_000", 27) == ["sweeps/tiny/trials/", "trial_000"]
    assert _folded("sweeps/tiny/trials/trial_000", 28) == ["sweeps/tiny/trials/trial_000"]
    assert _folded("a/a_name_that_is_wider", 10) == ["a/", "a_name_tha", "t_is_wider"]
    assert _folded("", 10) == []


def test_json(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.run(["runs", str(folder), "--json", "-", "--where", "state=killed"]) == 0
    found = json.loads(capsys.readouterr().out)
    (run,) = found["runs"]
    assert (run["path"], run["steps"], run["verdict"]) == ("sweep/trial_9", 30, "not checked")
    assert run["settings"]["optim.peak_lr"] == 0.001
    assert cli.run(["runs", str(folder), "--json", str(tmp_path / "x.json")]) == 0
    assert len(json.loads((tmp_path / "x.json").read_text())["runs"]) == 5


def test_what_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: str) -> str:
        assert cli.run(["runs", *words]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        return err

    assert "nowhere is not a folder; name a folder of runs" in refused("nowhere")
    assert "sort = lost: neither a figure nor a setting of a run here; did you mean" in refused(
        str(folder), "--sort", "lost"
    )
    assert "cannot write there; name a file in an existing folder" in refused(str(folder), "--page", "nowhere/x.html")
    assert "page = -: a page is written to a file; --json - writes" in refused(str(folder), "--page", "-")
    both = str(tmp_path / "both")
    assert f"page and json name one file, {both}" in refused(str(folder), "--page", both, "--json", both)
    records = folder / "ended" / "records.jsonl"
    before = records.read_bytes()
    assert f"a file of the run {records.parent}; name another" in refused(str(folder), "--page", str(records))
    assert cli.run(["report", str(records.parent), "--out", str(records)]) == 2
    assert f"a file of the run {records.parent}; name another" in capsys.readouterr().err
    assert records.read_bytes() == before
    assert cli.run(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no run below {tmp_path}\n"


def test_the_mark_of_a_check_without_a_verdict_is_explained_where_it_stands(rows: list[Row]) -> None:
    skipped = replace(rows[1], checks=Counter(agreed=1, skipped=2))
    assert verdicts(skipped.checks) == "1✓ 2?"
    assert summary([skipped]) == "1 run: 1 ended; ?: checks that could not tell, or were skipped"
    assert summary([replace(skipped, checks=Counter(agreed=1))]) == "1 run: 1 ended"
