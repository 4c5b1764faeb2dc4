"""A resume with other settings on purpose: a branch, told, recorded, kept to, and each step judged as it was made."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.core.checkpoint.format import checkpoint_step
from lockstep.core.run.branches import RunBranch
from lockstep.core.train.schedule import learning_rate
from lockstep.parity_tests.loop.runs import STEPS, Folder, one_line
from lockstep.parity_tests.repository import REPO
from lockstep.parity_tests.stored import weights_of
from lockstep.scripts import cli

EVERY_4 = {"checkpoint.every": 4, "checkpoint.keep": 20, "checkpoint.best": False}
FROM = 8
LOWER = ("--from-step", str(FROM), "--optim.peak-lr", "1e-4", "--optim.schedule", "linear")


@pytest.fixture(scope="module")
def finished(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Make a finished run of 12 steps with checkpoints at 4, 8 and 12, to be copied."""
    folder = Folder(tmp_path_factory.mktemp("finished"), tokens)
    assert folder.train("run", EVERY_4) == 0
    return folder


@pytest.fixture
def trained(folder: Folder, finished: Folder) -> Folder:
    """Copy the finished run, which the test may go on with."""
    shutil.copytree(finished.path / "run", folder.path / "run")
    return folder


def rates(folder: Folder, name: str = "run") -> list[float]:
    return [record["lr"] for record in folder.records(name)]


def test_it_has_the_new_schedule_and_the_old_data_order(trained: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    before = trained.records("run")
    old = trained.run("run").config
    assert trained.resume("run", *LOWER) == 0
    said = "branch 2 from step 8: optim.peak_lr 0.003 → 0.0001, optim.schedule cosine → linear"
    assert said in capsys.readouterr().out
    after, config = trained.records("run"), trained.run("run").config
    assert (config.optim.peak_lr, config.optim.schedule) == (1e-4, "linear")
    assert after[:FROM] == before[:FROM]
    assert rates(trained) == [
        learning_rate((old if step <= FROM else config).optim, step, STEPS) for step in range(1, STEPS + 1)
    ]
    assert [r["digest"] for r in after] == [r["digest"] for r in before]
    assert [r["loss"] for r in after[: FROM + 1]] == [r["loss"] for r in before[: FROM + 1]]
    assert after[-1]["loss"] != before[-1]["loss"]
    assert [r.get("branch") for r in after] == [None] * FROM + [2] * (STEPS - FROM)


def test_it_is_the_run_that_the_new_settings_make_from_that_state(trained: Folder) -> None:
    """From the state after step 8, bit for bit what a run with these settings makes of it."""
    assert trained.train("other", EVERY_4 | {"optim.peak_lr": 1e-4, "optim.schedule": "linear"}) == 0
    given = trained.path / "other" / "checkpoints" / "step_000008"
    ours = trained.path / "run" / "checkpoints" / "step_000008"
    # A checkpoint tells nothing of the schedule: the other run goes on from this one's.
    given.rename(given.with_name("away"))
    ours.rename(given)
    assert trained.resume("other", "--from-step", str(FROM)) == 0
    given.rename(ours)
    assert trained.resume("run", *LOWER) == 0
    assert trained.losses("run")[FROM:] == trained.losses("other")[FROM:]
    assert trained.weights("run") == trained.weights("other")


def test_nothing_of_the_first_line_is_lost(trained: Folder) -> None:
    before, last = trained.records("run"), weights_of(trained.path / "run" / "checkpoints" / "step_000012")
    config = (trained.path / "run" / "config.toml").read_bytes()
    assert trained.resume("run", *LOWER) == 0
    run = trained.run("run")
    first = RunBranch(run, 1)
    assert first.records() == before
    assert [checkpoint_step(path) for path in first.checkpoints()] == [4, 8, 12]
    assert weights_of(first.checkpoints()[-1]) == last
    assert first.config.optim.peak_lr == 3e-3 == run.config_at(FROM).optim.peak_lr
    assert run.config.optim.peak_lr == 1e-4 == run.config_at(FROM + 1).optim.peak_lr
    assert (trained.path / "run" / "config.toml").read_bytes() == config
    (resume,) = run.info["resumes"]
    changed = {"optim.peak_lr": [0.003, 0.0001], "optim.schedule": ["cosine", "linear"]}
    assert (resume["step"], resume["branch"], resume["changed"]) == (FROM, 2, changed)
    assert resume["left"] == "branches/001" and resume["lockstep"] and resume["time"]
    assert run.info["settings"] == resume["settings"] == {"optim.peak_lr": "0.0001", "optim.schedule": "linear"}


def test_the_same_value_is_no_branch(trained: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    before, weights = trained.losses("run"), trained.weights("run")
    assert trained.resume("run", "--from-step", "8", "--optim.peak-lr", "0.003", "--optim.schedule", "cosine") == 0
    assert "branch" not in capsys.readouterr().out
    assert (trained.losses("run"), trained.weights("run")) == (before, weights)
    (resume,) = trained.run("run").info["resumes"]
    assert not {"branch", "settings"} & resume.keys()
    assert not any("branch" in record for record in trained.records("run"))


def test_it_is_kept_to_after_a_kill(folder: Folder) -> None:
    """Killed before its first checkpoint: the next resume goes on in the branch, from where that began."""
    settings = {**EVERY_4, "checkpoint.every": 6}
    words = ("--from-step", "6", "--optim.peak-lr", "1e-4")
    for name in ("straight", "killed"):
        assert folder.train(name, settings) == 0
    assert folder.resume("straight", *words) == 0
    command = [
        sys.executable,
        "-m",
        "lockstep.parity_tests.loop.slowly",
        "train",
        "--resume",
        str(folder.path / "killed"),
    ]
    process = subprocess.Popen([*command, *words], cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not any("branch" in record for record in folder.records("killed")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    assert len(folder.records("killed")) < STEPS
    assert folder.resume("killed") == 0
    assert folder.losses("killed") == folder.losses("straight")
    assert folder.weights("killed") == folder.weights("straight")
    assert rates(folder, "killed") == rates(folder, "straight")
    assert [r.get("branch") for r in folder.run("killed").info["resumes"]] == [2, None]
    assert {r.get("branch") for r in folder.records("killed")[6:]} == {2}


def test_branches_of_a_branch_and_back_before_it(trained: Folder) -> None:
    assert trained.resume("run", *LOWER) == 0
    # Back on the first line: what changed at step 8 is not in force at step 4.
    assert trained.resume("run", "--from-step", "4", "--optim.weight-decay", "0") == 0
    run = trained.run("run")
    assert (run.config.optim.peak_lr, run.config.optim.weight_decay) == (3e-3, 0.0)
    assert run.info["settings"] == {"optim.weight_decay": "0.0"}
    assert [r.get("branch") for r in run.records()] == [None] * 4 + [3] * 8
    second = RunBranch(run, 2)
    assert second.config.optim.peak_lr == second.config_at(12).optim.peak_lr == 1e-4
    assert second.config_at(8).optim.peak_lr == 3e-3
    assert [r["lr"] for r in second.records()][8:] == [
        learning_rate(second.config.optim, s, STEPS) for s in range(9, 13)
    ]
    assert RunBranch(run, 1).config.optim.peak_lr == 3e-3


def test_more_steps_than_planned(trained: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained.resume("run", "--train.steps", "16") == 0
    assert "branch 2 from step 12: train.steps 12 → 16" in capsys.readouterr().out
    run = trained.run("run")
    assert [r["step"] for r in run.records()] == list(range(1, 17)) and run.info["finished"]
    assert [(b["from_step"], b["records"], b["checkpoints"]) for b in run.info["branches"]] == [(12, 0, [])]
    assert len(RunBranch(run, 1).records()) == 12


REFUSED = {
    "steps that are done": (("--train.steps", "6"), "a branch from step 8 needs train.steps above 8, not 6"),
    "a warm-up that is over": (("--optim.warmup-steps", "5"), "at step 8 the warm-up of 3 is over"),
    "another longest sequence": (("--train.curriculum", "32:0.75, 64:0.25"), "the longest sequence is 32, not 64"),
    "weights of 64 bits": (("--precision.policy", "fp64"), "weights and moments of bf16 are none of fp64"),
    "another optimizer": (("--optim.name", "muon"), "optim.name is 'adamw' in the run, and 'muon' was asked for"),
    "another order": (("--data.seed", "3"), "data.seed is 0 in the run, and 3 was asked for"),
    "another model": (("--model.norm-eps", "1e-6"), "model.norm_eps is 1e-05 in the run, and 1e-06 was asked for"),
    "a rule": (("--optim.schedule", "wsd", "--optim.decay-share", "0.9"), "begins before the 3 warm-up steps are over"),
}


@pytest.mark.parametrize("words, said", REFUSED.values(), ids=REFUSED.keys())
def test_what_no_branch_can_have(
    trained: Folder, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (trained.path / "run" / "run.json").read_bytes()
    assert trained.resume("run", "--from-step", "8", *words) == 2
    assert said in capsys.readouterr().err.splitlines()[0]
    assert (trained.path / "run" / "run.json").read_bytes() == before and len(trained.records("run")) == STEPS


def test_a_finished_run_has_nothing_to_branch_into(trained: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained.resume("run", "--optim.peak-lr", "1e-4") == 2
    assert "a branch from step 12 needs train.steps above 12, not 12; or" in one_line(capsys.readouterr().err)
    assert trained.run("run").info["resumes"] == []


def test_checkpoints_that_are_not_there(trained: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained.resume("run", "--from-step", "5") == 2
    assert "has no checkpoint of step 5: its checkpoints are of steps 4, 8, 12" in one_line(capsys.readouterr().err)
    assert cli.run(["train", str(trained.file), "--from-step", "5"]) == 2
    assert "--from-step needs --resume RUN" in one_line(capsys.readouterr().err)


def test_a_damaged_checkpoint_where_a_branch_begins(trained: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    """The one before it has other settings: what is asked for is not clear, so nothing is done."""
    file = trained.path / "run" / "checkpoints" / "step_000012" / "manifest.json"
    file.write_text("{}")
    assert trained.resume("run", "--train.steps", "20") == 2
    error = capsys.readouterr().err
    assert "the checkpoint of step 12 is damaged, and the settings change there" in error and "--from-step 8" in error
    assert len(trained.records("run")) == STEPS


@pytest.mark.parametrize("one, other", [("bf16", "fp16"), ("fp16", "bf16"), ("fp32", "bf16")])
def test_another_precision(folder: Folder, one: str, other: str) -> None:
    settings = {**EVERY_4, "precision.policy": one, "precision.loss_scale": 1024.0, "optim.weight_decay": 0.0}
    assert folder.train("run", settings) == 0
    assert folder.resume("run", "--from-step", "8", "--precision.policy", other, "--parity.every", "12") == 0
    check = folder.run("run").checks()[-1]
    assert (check["step"], check["verdict"]) == (12, "agreed")
    scales = ["loss_scale" in record["metrics"] for record in folder.records("run")]
    assert scales == [one == "fp16"] * 8 + [other == "fp16"] * 4


def test_updates_that_fp16_left_out_are_not_forgotten(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**EVERY_4, "precision.policy": "fp16", "precision.loss_scale": 2.0**60}
    assert folder.train("run", settings) == 0
    assert folder.records("run")[7]["metrics"]["skipped_steps"] > 0
    capsys.readouterr()
    assert folder.resume("run", "--from-step", "8", "--precision.loss-scale", "1024") == 2
    assert "this run has its own, in its state" in capsys.readouterr().err
    assert folder.resume("run", "--from-step", "8", "--precision.policy", "bf16", "--parity.every", "12") == 0
    state, _, _ = folder.run("run").load_latest(pytest.fail)
    assert (state.step, state.updates) == (12, 4) and "loss_scale" not in state.scalars
    assert folder.run("run").checks()[-1]["verdict"] == "agreed"


def test_each_step_is_judged_under_its_own_settings(trained: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    """Replay from sketches and by running again, and bisection, on both sides of a branch."""
    sketched = {**EVERY_4, "parity.record_every": 1, "train.curriculum": "32:0.5, 64:0.5"}
    assert trained.train("checked", sketched) == 0
    words = ("--optim.peak-lr", "1e-3", "--optim.clip-norm", "0.05", "--precision.policy", "fp32")
    changed = (*words, "--parity.record-every", "3", "--train.curriculum", "32:0.75, 64:0.25")
    assert trained.resume("checked", "--from-step", "8", *changed) == 0
    path = trained.path / "checked"
    capsys.readouterr()
    # Step 9 was of the branch, step 10 too but without sketches: those of the first line are not taken for its own.
    verdict = trained.path / "verdict.json"
    for step, how in ((8, "sketches"), (9, "sketches"), (10, "run again"), (12, "sketches")):
        assert cli.run(["replay", str(path), "--step", str(step), "--json", str(verdict)]) == 0, step
        (told,) = json.loads(verdict.read_text())["replayed"]
        assert (told["step"], told["how"]) == (step, how)
    assert "differs from its record" not in capsys.readouterr().out
    assert cli.run(["replay", str(path), "--step", "10", "--branch", "1"]) == 0
    assert cli.run(["bisect", str(path), "--json", str(verdict)]) == 0
    found = json.loads(verdict.read_text())
    assert (found["first_bad_step"], found["differs_at"]) == (None, None)


def test_the_report_says_where_a_branch_begins(trained: Folder) -> None:
    assert trained.resume("run", *LOWER) == 0
    assert cli.run(["report", str(trained.path / "run")]) == 0
    page = (trained.path / "run" / "report.html").read_text()
    assert "branch 2 from step 8: optim.peak_lr 0.003 → 0.0001, optim.schedule cosine → linear" in page
    assert '"marks":[{"step":8,"label":"branch 2"}]' in page


def test_a_run_without_a_branch_has_one_configuration(trained: Folder) -> None:
    run = trained.run("run")
    assert all(run.config_at(step) is run.config for step in range(1, STEPS + 1))
