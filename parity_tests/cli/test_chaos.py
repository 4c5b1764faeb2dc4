"""scripts/studies/chaos.py: a killed process goes on as if nothing had been, and one that does not is reported."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from lockstep.core.files.jsonl import sealed_line
from lockstep.parity_tests.cli.faulty import VARIABLE
from lockstep.scripts.studies import chaos
from lockstep.scripts.studies.chaos_lives import AIMS, Aim, Disk, TrainingLife, make_ground
from lockstep.scripts.studies.chaos_process import MODULE

FAULTY = "lockstep.parity_tests.cli.faulty"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chaos")
    make_ground(folder / "ground")
    return folder


def test_a_run_that_is_killed_once_goes_on_as_if_nothing_had_been(work: Path) -> None:
    found = list(chaos.run_chain(chaos.Chain("training-3", "training", ("writing",), 0), work))
    assert [problem for line in found for problem in line.get("problems", ())] == []
    assert [line["what"] for line in found] == ["kill", "end", "chain"]


def test_what_is_killed_goes_on_as_if_nothing_had_been(work: Path) -> None:
    chains = [
        chaos.Chain("training-0", "training", ("writing", "sealing"), 0),
        chaos.Chain("preparing-0", "preparing", ("preparing",), 0),
        chaos.Chain("reporting-0", "reporting", ("reporting",), 0),
    ]
    found = [line for chain in chains for line in chaos.run_chain(chain, work)]
    assert [problem for line in found for problem in line.get("problems", ())] == []
    kills = [line for line in found if line["what"] == "kill"]
    assert [line["chain"] for line in kills] == ["training-0", "training-0", "preparing-0", "reporting-0"]
    assert {line["phase"] for line in kills} <= chaos.ROWS.keys()
    assert {line["kind"] for line in found if line["what"] == "end"} == {"training", "preparing", "reporting"}
    assert "| **all** | 4 |" in (page := chaos.page(found, "")) and "not equal" not in page


def test_a_checkpoint_that_is_written_in_place_is_told_of(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "in_place")
    monkeypatch.setitem(AIMS, "writing", Aim(r"^write \S*extra\.json$", outside=0.0))
    found = chaos.run_chain(chaos.Chain("training-1", "training", ("writing",), 0), work, FAULTY)
    (kill,) = [line for line in found if line["what"] == "kill"]
    (problem,) = kill["problems"]
    assert problem == "the checkpoint of step 6: /runs/killed/checkpoints/step_000006/manifest.json is missing"
    assert "1 not equal" in (page := chaos.page(found, "")) and problem in page


def test_moments_that_are_lost_are_told_of(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "moments_lost")
    monkeypatch.setitem(AIMS, "sealing", Aim(r"^write \S*step_000010\S*/manifest\.json$", outside=0.0))
    found = chaos.run_chain(chaos.Chain("training-2", "training", ("sealing",), 0), work, FAULTY)
    kill, end, _ = found
    assert (kill["phase"], kill["committed"], kill["problems"]) == ("files", 6, [])
    assert "the session did not take its state back: exp_avg/embed.weight" in end["problems"][0]
    assert "1 not equal" in chaos.page(found, "")


def test_a_process_that_fails_is_told_of(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "no such fault")
    folder = work / "fails"
    folder.mkdir()
    life = TrainingLife(folder, work / "ground", 0, MODULE)
    life.module = FAULTY
    assert life.round("writing", Random(0)) is None and life.over
    assert life.end()["problems"][0].startswith("exit code 1: ")


def test_where_a_kill_fell_is_read_off_the_disk(tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = Disk.of(run)
    checkpoints = run / "checkpoints"
    checkpoints.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"resumes": []}))
    assert Disk.of(run).phase(before) == "starting"
    (run / "records.jsonl").write_bytes(sealed_line({"step": 1}) + b'{"step": 2')
    now = Disk.of(run)
    assert (now.phase(before), len(now.lines), now.torn) == ("training", 1, True)
    (checkpoints / "step_000001").mkdir()
    assert Disk.of(run).phase(before) == "renamed"
    (run / "checkpoints.jsonl").write_bytes(sealed_line({"step": 1}))
    assert Disk.of(run).phase(before) == "training"
    aside = checkpoints / ".step_000002.7.tmp"
    aside.mkdir()
    assert Disk.of(run).phase(before) == "files"
    (aside / "manifest.json").write_text("{")
    assert Disk.of(run).phase(before) == "manifest"
    now = Disk.of(run)
    assert now.phase(now) == "going on"


def test_a_plan_has_the_shares_of_the_mix() -> None:
    plan = chaos.chains(200, 1)
    drawn = [aim for chain in plan for aim in chain.aims]
    assert {aim: drawn.count(aim) for aim in chaos.MIX} == {aim: 2 * count for aim, count in chaos.MIX.items()}
    assert len({chain.name for chain in plan}) == len(plan)


def test_chains_that_are_done_are_not_run_again(tmp_path: Path) -> None:
    plan = chaos.chains(100, 0)
    path = tmp_path / "found.jsonl"
    done, cut_short = plan[0].name, plan[1].name
    lines = [{"what": "kill", "chain": done}, {"what": "chain", "chain": done}, {"what": "kill", "chain": cut_short}]
    path.write_bytes(b"".join(map(sealed_line, lines)))
    found = chaos.lines(path, plan)
    assert found == lines[:2]
    assert [chain.name for chain in chaos.missing(plan, found)] == [chain.name for chain in plan[1:]]
