"""`lockstep replay` and `lockstep bisect` on a run that `lockstep train` made: exit codes, JSON, refusals in a line."""

from __future__ import annotations

import json
import shutil

import pytest

from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.capsule import write_capsule
from lockstep.core.run.info import read_info, write_info
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.loop.conftest import prepare
from lockstep.parity_tests.loop.runs import Folder
from lockstep.parity_tests.replay.made import VERSIONS, evidence_of
from lockstep.parity_tests.repository import REPO
from lockstep.scripts.commands import bisect, replay
from lockstep.scripts.studies.tiny_workspace import write_workspace

CANDIDATE = f"{REPO / 'parity_tests/replay/candidates.py'}:Faulty"
OWN = ("--candidate", CANDIDATE)  # code that is not Lockstep's runs only if it is named
JUDGE = ("--reference", "jax")
SETTINGS = {"train.steps": 6, "checkpoint.every": 4, "checkpoint.keep": 5, "parity.record_taps_every": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    text = write_workspace(tmp_path_factory.mktemp("text")).parent / "text"
    data = tmp_path_factory.mktemp("tokens") / "data"
    prepare(text, data)
    made = Folder(tmp_path_factory.mktemp("runs"), data)
    assert made.train("faulty", SETTINGS, "--backend", CANDIDATE) == 0
    return made


@pytest.fixture(scope="module")
def run(folder):
    return folder.path / "faulty"


def test_bisect_ends_1_and_says_where(run, tmp_path, capsys):
    assert bisect.main([str(run), *OWN, *JUDGE, "--json", str(tmp_path / "v.json"), "--no-cause"]) == 1
    out = capsys.readouterr().out
    assert "first bad step: 5; origin: act (forward, layer 0) at blocks.0.mlp.act" in out
    verdict = json.loads((tmp_path / "v.json").read_text())
    assert (verdict["verdict"], verdict["first_bad_step"], verdict["origin"]["stage"]) == ("disagreed", 5, "act")
    assert verdict["checked"]["4"] == "agreed" and verdict["candidate"] == CANDIDATE


def test_replay_ends_1_and_says_of_each_step_how(run, tmp_path, capsys):
    """From sketches alone: no candidate is named, and none is opened."""
    assert replay.main([str(run), *JUDGE, "--json", str(tmp_path / "v.json")]) == 1
    out = capsys.readouterr().out
    assert "step 5: parity disagreed" in out and "[as the run made it, from its sketches (end to end)]" in out
    verdict = json.loads((tmp_path / "v.json").read_text())
    assert {line["step"]: line["how"] for line in verdict["replayed"]} == {1: "sketches", 5: "sketches"}
    assert verdict["first_bad_step"] == 5


def test_a_step_that_agrees_ends_0(run):
    assert replay.main([str(run), *OWN, *JUDGE, "--step", "2", "--device", "cpu"]) == 0


def test_a_capsule_is_replayed_by_whoever_made_it(folder, run, tmp_path, capsys):
    from lockstep.core.parity.judge.judge import Reference, judge
    from lockstep.parity_tests.replay.candidates import Faulty

    config = folder.run("faulty").config
    session = Faulty().open(config)
    for number in range(4):
        evidence_of(session, number)
    evidence = evidence_of(session, 4)
    reference = Reference.open(JaxBackend(), config)
    capsule = write_capsule(tmp_path, evidence, judge(evidence, reference), config, CANDIDATE, "jax", VERSIONS)
    assert replay.main([str(capsule), *OWN, *JUDGE, "--device", "auto"]) == 1
    out = capsys.readouterr().out
    assert "step 5, packed verdict: disagreed, origin act (forward, layer 0) at blocks.0.mlp.act" in out
    assert "other versions: " in out and "the verdict is the one that was packed" in out
    assert replay.main([str(capsule), *JUDGE, "--candidate", "torch"]) == 0
    assert "differs from the packed verdict" in capsys.readouterr().out
    assert replay.main([str(capsule), *JUDGE, "--json", str(tmp_path / "v.json")]) == 1
    out = capsys.readouterr().out
    assert "[as packed, from its evidence]" in out and "the verdict is the one that was packed" in out
    verdict = json.loads((tmp_path / "v.json").read_text())
    assert verdict["candidate"] == CANDIDATE and verdict["replayed"][0]["how"] == "evidence"
    for asked in (["--run-again"], ["--device", "cpu"]):
        with pytest.raises(UserError, match="whose code runs only where the command line names it: lockstep replay "):
            replay.main([str(capsule), *JUDGE, *asked])
    with pytest.raises(UserError, match="holds step 5, not step 3"):
        replay.main([str(capsule), "--step", "3"])


@pytest.mark.parametrize("command", [replay.main, bisect.main], ids=["replay", "bisect"])
def test_refusals_are_one_line(command, run, tmp_path):
    def refused(*words: str) -> str:
        with pytest.raises(UserError) as said:
            command(list(words))
        assert "\n" not in str(said.value)
        return str(said.value)

    assert "no such run" in refused(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    assert "is not a run directory" in refused(str(tmp_path / "empty"))
    assert "no such file: nobody.py" in refused(str(run), "--candidate", "nobody.py:Nobody", *STEP[command])
    assert "cannot write there; name a file in an existing folder" in refused(
        str(run), "--json", str(tmp_path / "no/where.json")
    )
    shutil.copytree(run, tmp_path / "other")
    info = read_info(tmp_path / "other/run.json")
    info["data"]["fingerprint"] = "f" * 64
    write_info(tmp_path / "other/run.json", info)
    assert "was made with another data set" in refused(str(tmp_path / "other"))
    shutil.copy(run / "run.json", tmp_path / "other/run.json")
    (weights,) = (tmp_path / "other/checkpoints/step_000004").glob("*model*.safetensors")
    weights.unlink()
    assert "safetensors is missing" in refused(str(tmp_path / "other"), *OWN)


STEP = {replay.main: ("--step", "3"), bisect.main: ()}
