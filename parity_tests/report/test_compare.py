"""The comparison of runs: what it carries is what the runs say, and who is no run is refused in one line."""

from __future__ import annotations

import math
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.core.config.schema import flatten
from lockstep.core.errors import UserError
from lockstep.core.files.jsonl import read_lines, sealed_line
from lockstep.core.report.build import build_report
from lockstep.core.report.compare import build_comparison, write_comparison
from lockstep.core.report.figures import APART, difference, parting
from lockstep.core.report.read import read_run
from lockstep.core.report.seeing import COLUMNS, seconds, stacked
from lockstep.core.run.info import read_info, write_info
from lockstep.core.train.time_accounting import PARTS
from lockstep.parity_tests.report.fake_run import write_run
from lockstep.parity_tests.report.test_report import Tags, embedded, replace_lines, series
from lockstep.scripts import cli


def changed(run: Path, change: Any) -> Path:
    return replace_lines(run, "records.jsonl", [change(r) or r for r in read_lines(run / "records.jsonl")])


def with_name(run: Path, name: str, peak_lr: float = 0.003) -> Path:
    """Give the run another name and another learning rate."""
    info = read_info(run / "run.json")
    text = (run / "config.toml").read_text().replace("stdlib-6l", name).replace("0.003", str(peak_lr))
    (run / "config.toml").write_text(text)
    write_info(run / "run.json", info | {"name": name, "config": flatten(tomllib.loads(text))})
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("compared")
    one = with_name(write_run(root / "a", steps=200), "one")
    two = with_name(write_run(root / "b", steps=120, faulty=True, seed=1), "two", 0.001)
    return [one, two]


@pytest.fixture(scope="module")
def page(runs: list[Path]) -> str:
    return build_comparison(runs)


def figure_cells(page: str, name: str) -> list[str]:
    row = page.split(f'<th scope="row">{name}</th>')[1].split("</tr>")[0]
    return [cell.split("<small>")[0].replace("<b>", "").replace("</b>", "") for cell in row.split('<td class="n">')[1:]]


def test_a_page_has_the_data_that_its_scripts_ask_for(page: str, runs: list[Path]) -> None:
    """Both pages share page.js: what one of them does not carry ends its script before the first curve."""
    for html in (page, build_report(runs[0])):
        script = html.rsplit("<script>", 1)[1]
        assert set(re.findall(r"\bdata\.(\w+)", script)) <= set(embedded(html))


def test_branches_are_told(tmp_path: Path) -> None:
    one, two = with_name(write_run(tmp_path / "a", steps=20), "one"), with_name(write_run(tmp_path / "b"), "two")
    begun = {"step": 10, "branch": 2, "changed": {"optim.peak_lr": [0.003, 0.001]}, "settings": {}}
    write_info(two / "run.json", read_info(two / "run.json") | {"resumes": [begun]})
    assert "two: settings were changed on purpose: branch 2 from step 10: optim.peak_lr 0.003 → 0.001." in (
        build_comparison([one, two])
    )


def test_curves_are_those_of_the_records_on_every_axis(page: str, runs: list[Path]) -> None:
    data = embedded(page)
    for number, (name, run) in enumerate(zip(("one", "two"), runs, strict=True)):
        records = read_lines(run / "records.jsonl")
        found = next(
            s
            for c in data["charts"]
            if c["id"] == "loss"
            for s in c["series"]
            if s["label"] == name and s["level"] == "none"
        )
        assert found["run"] == number
        assert found["y"] == pytest.approx([r["loss"] for r in records], rel=1e-5)
        assert found["xs"]["step"] == found["x"] == [r["step"] for r in records]
        assert found["xs"]["tokens"] == [2048 * r["step"] for r in records]
        assert found["xs"]["minutes"][-1] == pytest.approx(sum(r["seconds"] for r in records) / 60, rel=1e-5)
    assert data["domain"] == [1, 200] and data["checks"] == []


def test_figures_and_settings_are_the_runs(page: str, runs: list[Path]) -> None:
    assert figure_cells(page, "Steps") == ["200", "120"]
    assert figure_cells(page, "Checks") == ["19 agreed, 1 skipped", "11 agreed, 1 skipped"]
    for run, cell in zip(runs, figure_cells(page, "Best validation loss"), strict=True):
        values = [r["metrics"]["val/loss"] for r in read_lines(run / "records.jsonl") if "val/loss" in r["metrics"]]
        assert float(cell) == pytest.approx(min(values), abs=5e-4)
    settings = page.split('id="settings"')[1].split("</section>")[0]
    assert "optim.peak_lr" in settings and "model.hidden" not in settings


def test_skips_and_spikes_are_counted_and_told(tmp_path: Path) -> None:
    def plant(record: dict[str, Any]) -> None:
        record["metrics"]["skipped_steps"] = float(record["step"] >= 7) + float(record["step"] >= 30)
        if record["step"] in (7, 30):
            record |= {"left_out": "first in the loss (nan)", "loss": math.nan, "grad_norm": math.nan}
        if record["step"] == 20:
            record["metrics"]["spike/sigmas"] = 9.0

    run = changed(write_run(tmp_path / "a", steps=40), plant)
    other = write_run(tmp_path / "b", steps=40)
    page = build_comparison([run, other])
    assert figure_cells(page, "Steps left out") == ["2", "0"]
    assert figure_cells(page, "Loss spikes") == ["1", "0"]
    own = build_report(run)
    assert "1 loss spike, at step 20." in own and "2 steps left out, not finite: step 7, 30." in own
    data = embedded(own)
    assert series(data, "loss", "loss spike")["x"] == [20]
    assert series(data, "loss", "left out")["x"] == [7, 30]


def test_where_curves_part(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a", steps=200)
    same = write_run(tmp_path / "b", steps=150)

    def part(record: dict[str, Any]) -> None:
        if record["step"] > 60:
            record["loss"] += 0.001
        if record["step"] > 100:
            record["loss"] += 0.5
        if record["step"] > 90:
            record["digest"] = "f" * 64

    other = changed(shutil.copytree(one, tmp_path / "c"), part)
    rng = np.random.default_rng(0)
    noisy = changed(shutil.copytree(one, tmp_path / "d"), lambda r: r.update(loss=r["loss"] + rng.normal(0, 0.1)))
    a, b, c, d = (read_run(run) for run in (one, same, other, noisy))
    assert parting(a, b).bits is parting(a, b).batch is parting(a, b).apart is None
    assert parting(a, b).common == 150
    found = parting(a, c)
    # From an exact 0 any difference is apart.
    assert (found.batch, found.bits, found.apart) == (91, 61, 61) and found.difference == pytest.approx(0.501, abs=0.01)
    found = parting(a, d)
    assert found.apart is None and abs(found.difference) < APART * found.error
    assert "the same losses, bit for bit, in all 150 common steps" in build_comparison([one, same])


def test_the_error_of_a_smoothed_difference_is_what_it_says(tmp_path: Path) -> None:
    """σ/√(2τ − 1), by 40 draws: an estimate of a deviation from 40 numbers is off by 11 % (2√(1/80) = 22 % twice)."""
    one = read_run(write_run(tmp_path / "a", steps=200, checked=False))
    ends, errors = [], []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        records = tuple({**r, "loss": r["loss"] + rng.normal(0, 0.1)} for r in one.records)
        _, smoothed, error = difference(one, type(one)(**{**vars(one), "records": records}))
        ends.append(smoothed[-1][1])
        errors.append(error)
    assert np.std(ends) == pytest.approx(np.mean(errors), rel=0.4)


def test_names_that_are_shared_give_way_to_folders(tmp_path: Path) -> None:
    page = build_comparison([write_run(tmp_path / "a", steps=30), write_run(tmp_path / "b", steps=30)])
    assert str(tmp_path / "a") in page and str(tmp_path / "b") in page


def test_records_alone_are_enough(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "records.jsonl").write_bytes(sealed_line({"step": 1, "loss": 2.5}))
    page = build_comparison([tmp_path / "a", tmp_path / "b"])
    assert [c["id"] for c in embedded(page)["charts"]] == ["loss", "apart"]
    assert "a: run.json" not in page or "No such file" in page


def test_unfinished_damaged_and_torn_runs_are_compared_and_told(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "a", steps=30), with_name(write_run(tmp_path / "b", steps=30), "other")
    with (two / "records.jsonl").open("a") as file:
        file.write('{"step": 31, "lo')
    told: list[str] = []
    build_comparison([one, two], told.append)
    assert any(note.startswith("other: The last line of records.jsonl") for note in told)


def test_nothing_from_the_files_becomes_markup(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>\"'&\u2028"
    one, two = write_run(tmp_path / "a", steps=30), write_run(tmp_path / "b", steps=30)
    write_info(
        one / "run.json", read_info(one / "run.json") | {"name": evil, "git_commit": evil, "versions": {evil: evil}}
    )
    tags = Tags()
    tags.feed(build_comparison([one, two]))
    assert tags.scripts == 2 and "img" not in tags.tags
    assert not [name for name, _ in tags.attributes if name.startswith("on")]


def test_what_is_refused(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is named twice"):
        build_comparison([runs[0], runs[0].parent / "." / "a"])
    with pytest.raises(UserError, match="9 runs: a comparison takes 2 to 8"):
        build_comparison([runs[0]] * 9)
    with pytest.raises(UserError, match="not a run directory"):
        build_comparison([runs[0], tmp_path / "nowhere"])


def test_the_command(runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["report", *map(str, runs)]) == 0
    assert capsys.readouterr().out == "report_compare.html\n" and (tmp_path / "report_compare.html").is_file()
    assert cli.run(["report", *map(str, runs), "--out", "x.html"]) == 0 and (tmp_path / "x.html").is_file()
    assert cli.run(["report", str(runs[0]), "nowhere"]) == 2
    assert (
        capsys.readouterr().err == "lockstep: nowhere is not a run directory; lockstep runs lists those below runs/\n"
    )
    assert write_comparison(runs, tmp_path / "y.html") == tmp_path / "y.html"


# Where the time went


def timed(step: int, **spent: float) -> dict[str, Any]:
    return {"step": step, "loss": 1.0, "host": {f"seconds/{part}": value for part, value in spent.items()}}


def test_shares_stack_up_to_everything() -> None:
    records = [timed(1, compute=3.0, data=1.0), timed(2, compute=1.0, checkpoint=1.0), {"step": 3, "loss": 1.0}]
    found = {s["label"]: s for s in stacked(records)}
    assert list(found) == ["data", "compute", "checkpoint"]
    assert found["data"]["own"] == [25, 0] and found["compute"]["own"] == [75, 50]
    assert found["checkpoint"]["base"] == [100, 50] and found["checkpoint"]["y"] == [100, 100]
    assert seconds(records) == {"data": 1.0, "compute": 4.0, "checkpoint": 1.0}
    assert stacked([{"step": 1, "loss": 1.0}]) == []


def test_many_steps_are_summed_in_columns_and_none_is_lost() -> None:
    rng = np.random.default_rng(0)
    records = [timed(step, **dict(zip(PARTS, rng.random(len(PARTS)), strict=True))) for step in range(1, 1001)]
    found = stacked(records)
    assert [s["label"] for s in found] == list(PARTS)
    assert len(found[0]["x"]) == COLUMNS and found[0]["x"][-1] == 1000 and found[0]["x"][0] == 1
    assert found[-1]["y"] == pytest.approx([100.0] * COLUMNS)
    own = np.array([s["own"] for s in found])
    np.testing.assert_allclose(own.sum(0), 100, rtol=1e-2)
