"""`lockstep train --parity.every N`: the checks change nothing, and a disagreement is an exit code."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import time

import pytest

import lockstep.scripts.commands.train
from lockstep.core.parity.evidence.capsule import other_versions, read_capsule
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.parity.modes.replay import judge_capsule
from lockstep.core.parity.modes.shadow import Shadow
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.guards.events import before_steps
from lockstep.parity_tests.loop.runs import Folder, alive, one_line, wait_until_gone
from lockstep.parity_tests.repository import REPO
from lockstep.scripts.shared.startup_banner import versions

REFERENCES = "lockstep.parity_tests.loop.references"
CHECKED = {"train.steps": 8, "parity.every": 2, "parity.queue": 10}


def test_checks_change_no_bit_of_the_weights(folder: Folder) -> None:
    short = {"train.steps": 4, "precision.policy": "fp64"}
    assert folder.train("checked", short | {"parity.every": 2, "parity.queue": 10}) == 0
    assert folder.train("unchecked", short) == 0
    assert folder.weights("checked") == folder.weights("unchecked")
    assert folder.losses("checked") == folder.losses("unchecked")
    checks = folder.run("checked").checks()
    assert [(c["step"], c["verdict"]) for c in checks] == [(step, "agreed") for step in (1, 2, 4)]
    assert all(c["stages"] for c in checks)


def test_a_disagreement_is_exit_code_1_also_after_a_resume(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lockstep.scripts.commands.train, "REFERENCE", f"{REFERENCES}:wrong_of_this_run")
    settings = {"train.steps": 4, "parity.every": 4, "parity.queue": 10}
    assert folder.train("accused", settings) == 1
    assert [(c["step"], c["verdict"]) for c in folder.run("accused").checks()] == [(1, "disagreed"), (4, "disagreed")]
    printed = capsys.readouterr().out
    assert "parity disagreed; origin: attn_norm (forward, layer 0, at blocks.0.attn_norm" in printed
    next_command = f"step 1; continue with: lockstep bisect {folder.run('accused').path}"
    assert next_command in printed
    assert folder.run("accused").info["finished"]
    assert folder.resume("accused") == 1
    printed = capsys.readouterr().out
    assert "checks that disagreed before this resume: 1, 4; so this ends with exit code 1" in printed
    assert next_command in printed


def test_a_fault_of_the_step_with_its_own_weights_is_named_after_its_alarm(folder: Folder, capsys) -> None:
    """The check sees it end to end alone; then the trainer shows the stages of that step, and training goes on."""
    fault = f"{REPO}/parity_tests/faults/own_step.py:NoMaskWithoutLossMask"
    settings = {"train.steps": 4, "parity.every": 2, "parity.queue": 10}
    assert folder.train("blind", settings, "--backend", fault) == 1
    assert f"bisect {folder.run('blind').path} --candidate {fault}" in capsys.readouterr().out
    checks = folder.run("blind").checks()
    assert [c["step"] for c in checks] == [1, 2, 4] and len(folder.records("blind")) == 4
    for check in checks:
        origin = check["origin"]
        assert (origin["stage"], origin["phase"], origin["layer"]) == ("attn", "forward", 0)
        assert check["cause"].startswith("the same step, run again, gives the same bits")
    capsule = folder.path / "blind" / "capsules" / "step_000002"
    assert json.loads((capsule / "verdict.json").read_text())["origin"] == checks[1]["origin"]
    assert other_versions(read_capsule(capsule), versions()) == []
    # The capsule holds what named it: it is named again without the candidate.
    replayed = judge_capsule(read_capsule(capsule), JaxBackend())
    assert replayed.check is not None and replayed.check.origin is not None
    assert (replayed.check.origin.stage, replayed.check.origin.layer) == ("attn", 0)
    assert not list((folder.path / "blind").glob("evidence*"))


def test_a_reference_that_fails_costs_no_step(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lockstep.scripts.commands.train, "REFERENCE", f"{REFERENCES}:Failing")
    assert folder.train("alone", CHECKED) == 2
    checks = folder.run("alone").checks()
    assert [(c["step"], c["verdict"]) for c in checks] == [(step, "skipped") for step in (1, 2, 4, 6, 8)]
    assert all("RuntimeError: no such luck (" in c["reason"] for c in checks)
    out, error = capsys.readouterr()
    assert "parity 5 skipped" in out
    assert "second line" not in out + error
    said = "parity checks: 5 due, 0 made, fewer than half; 5 skipped, the first at step 1: the reference failed: "
    assert one_line(error).startswith(f"lockstep: {said}")
    assert folder.run("alone").info["finished"] and len(folder.records("alone")) == 8
    # Asked again, it has still not been checked.
    assert folder.resume("alone") == 2
    out, error = capsys.readouterr()
    assert "all steps are done" in out and said in one_line(error)


def test_a_wrong_reference_judges_nobody(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lockstep.scripts.commands.train, "REFERENCE", f"{REFERENCES}:wrong")
    assert folder.train("unjudged", {"train.steps": 4, "parity.every": 4}) == 2
    (first, last) = folder.run("unjudged").checks()
    assert first["verdict"] == last["verdict"] == "skipped"
    assert first["reason"].startswith("the reference is wrong, so it does not judge: attn_norm, forward")
    out, error = capsys.readouterr()
    assert "the reference is wrong" in out
    assert "2 due, 0 made, fewer than half; 2 skipped, the first at step 1: the reference is wrong, so" in error


def test_a_reference_that_is_too_slow_is_told_with_what_would_help(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lockstep.scripts.commands.train, "REFERENCE", f"{REFERENCES}:Late")
    assert folder.train("late", {"train.steps": 8, "parity.every": 1, "parity.timeout_seconds": 2}) == 2
    said = one_line(capsys.readouterr().err)
    assert "parity checks: 8 due, 0 made, fewer than half; 8 skipped, the first at step 1: the reference's" in said
    assert said.endswith("; 6 because the reference is slower: raise parity.every or parity.queue")


def test_a_stop_stays_a_stop_and_the_whole_run_counts(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped after step 8 with a reference that cannot be opened; then the right one, for steps 9, 10 and 12."""
    with monkeypatch.context() as patch:
        patch.setattr(lockstep.scripts.commands.train, "REFERENCE", f"{REFERENCES}:Failing")
        before_steps(patch, {8: lambda: os.kill(os.getpid(), signal.SIGINT)})
        assert folder.train("stopped", CHECKED | {"train.steps": 12}) == 130
    assert "parity checks" not in capsys.readouterr().err
    assert folder.resume("stopped") == 2
    said = one_line(capsys.readouterr().err)
    assert "parity checks: 8 due, 3 made, fewer than half; 5 skipped, the first at step 1: the reference failed" in said
    # Three of four are enough, once the others are made again.
    shutil.rmtree(folder.path / "stopped")
    with monkeypatch.context() as patch:
        patch.setattr(lockstep.scripts.commands.train, "REFERENCE", f"{REFERENCES}:Failing")
        before_steps(patch, {2: lambda: os.kill(os.getpid(), signal.SIGINT)})
        assert folder.train("stopped", CHECKED | {"train.steps": 6}) == 130
    assert folder.resume("stopped") == 0


@pytest.mark.parametrize("on_alarm", ["stop", "roll_back"])
def test_a_run_that_an_alarm_ended_ends_1(folder: Folder, monkeypatch: pytest.MonkeyPatch, on_alarm: str) -> None:
    """Also where the accused steps have left the run's own record."""
    settings = {"train.steps": 6, "parity.every": 2, "parity.queue": 10, "checkpoint.every": 1, "checkpoint.keep": 9}
    accused = Accused(monkeypatch, step=4)
    assert folder.train("run", settings | {"parity.on_alarm": on_alarm}) == 1
    assert accused.done and not folder.run("run").info["finished"]
    left = [c["step"] for c in folder.run("run").checks() if c["verdict"] == "disagreed"]
    assert left == ([] if on_alarm == "roll_back" else [4])


class Accused:
    """Changes the verdict of one check, and waits for every check before the next step is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
        self.done = False
        collect = Shadow.collect

        def changed(shadow: Shadow):
            while shadow.pending or not self.done:
                for result in collect(shadow):
                    if isinstance(result, Check) and result.step == step:
                        self.done = True
                        first, *others = result.findings
                        result = dataclasses.replace(result, findings=(dataclasses.replace(first, size=0), *others))
                    yield result
                if not shadow.pending:
                    break
                time.sleep(0.05)

        monkeypatch.setattr(Shadow, "collect", changed)


def test_a_recipe_without_bounds_is_refused_before_anything_starts(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lockstep.core.parity.measures import calibrated_bounds

    bounds = {name: kinds for name, kinds in calibrated_bounds.table().items() if name != "bf16/eager"}
    monkeypatch.setattr(calibrated_bounds, "table", lambda: bounds)
    assert folder.train("checked", CHECKED) == 2
    assert "no clean runs of bf16/eager were measured" in capsys.readouterr().err
    assert not (folder.path / "checked").exists()


def worker_of(pid: int) -> int:
    """Return the reference's process among the children of `pid`."""
    for child in os.listdir("/proc"):
        if not child.isdigit():
            continue
        try:
            with open(f"/proc/{child}/stat") as stat, open(f"/proc/{child}/cmdline") as cmdline:
                parent, words = int(stat.read().rpartition(")")[2].split()[1]), cmdline.read()
        except OSError:
            continue
        if parent == pid and "spawn_main" in words:
            return int(child)
    raise AssertionError("no worker")


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="finds the worker in /proc")
def test_the_worker_ends_with_a_trainer_that_is_killed(folder: Folder) -> None:
    process = folder.start("killed", CHECKED | {"train.steps": 100})
    try:
        folder.wait(process, "killed", 1)
        worker = worker_of(process.pid)
        assert alive(worker)
        process.send_signal(signal.SIGKILL)
        # The worker holds the pipes too: they end when it does.
        _, error = process.communicate(timeout=20)
    finally:
        process.kill()
    assert wait_until_gone(worker)
    assert "Traceback" not in error


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="finds the worker in /proc")
def test_training_goes_on_when_the_worker_is_killed(folder: Folder) -> None:
    process = folder.start("bereft", CHECKED)
    try:
        folder.wait(process, "bereft", 2)
        os.kill(worker_of(process.pid), signal.SIGKILL)
        out, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, "Traceback" in error) == (2, False), error
    assert len(folder.records("bereft")) == 8
    checks = folder.run("bereft").checks()
    assert sorted(c["step"] for c in checks) == [1, 2, 4, 6, 8]
    lost = [c for c in checks if c["verdict"] == "skipped"]
    assert {c["step"] for c in lost} >= {4, 6, 8}
    assert all("has died (exit code -9)" in c["reason"] for c in lost)
    assert out.count("has died (exit code -9)") == 1


def test_a_validation_whose_mean_alone_is_wrong_is_named_where_it_is_first_checked(folder: Folder) -> None:
    """The first check has no validation to judge, and agrees; the run's capsule is judged without the candidate."""
    fault = f"{REPO}/parity_tests/faults/evaluation.py:FirstTokensLeftOutOfTheMean"
    settings = {"train.steps": 4, "eval.every": 2, "parity.every": 2, "parity.queue": 10}
    assert folder.train("validated", settings, "--backend", fault) == 1
    checks = folder.run("validated").checks()
    assert [(c["step"], c["verdict"]) for c in checks] == [(1, "agreed"), (2, "disagreed"), (4, "disagreed")]
    assert (checks[1]["origin"]["stage"], checks[1]["origin"]["tap"]) == ("evaluation", "val/loss")
    assert ["validation" in check["not_exercised"] for check in checks] == [True, False, False]
    assert [record["step"] for record in folder.records("validated") if "val/loss" in record["metrics"]] == [2, 4]
    replayed = judge_capsule(read_capsule(folder.path / "validated" / "capsules" / "step_000002"), JaxBackend())
    assert replayed.check is not None and replayed.check.origin is not None
    assert (replayed.check.origin.stage, replayed.check.origin.tap) == ("evaluation", "val/loss")
