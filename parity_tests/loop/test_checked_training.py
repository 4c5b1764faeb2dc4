"""`lockstep train --parity.every N`: the checks change nothing, and a disagreement is an exit code."""

from __future__ import annotations

import os
import signal

import pytest

import lockstep.scripts.commands.train
from lockstep.parity_tests.loop.runs import Folder, alive, wait_until_gone

REFERENCES = "lockstep.parity_tests.loop.references"
CHECKED = {"train.steps": 8, "parity.every": 2, "parity.queue": 10}


def test_checks_change_no_bit_of_the_weights(folder: Folder) -> None:
    assert folder.train("checked", CHECKED) == 0
    assert folder.train("unchecked", {"train.steps": 8}) == 0
    assert folder.weights("checked") == folder.weights("unchecked")
    assert folder.losses("checked") == folder.losses("unchecked")
    checks = folder.run("checked").checks()
    assert [(c["step"], c["verdict"]) for c in checks] == [(step, "agreed") for step in (1, 2, 4, 6, 8)]
    assert all(c["stages"] for c in checks)


def test_a_disagreement_is_exit_code_1_also_after_a_resume(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lockstep.scripts.commands.train, "REFERENCE", f"{REFERENCES}:wrong_of_this_run")
    settings = {"train.steps": 4, "parity.every": 4, "parity.queue": 10}
    assert folder.train("accused", settings) == 1
    assert [(c["step"], c["verdict"]) for c in folder.run("accused").checks()] == [(1, "disagreed"), (4, "disagreed")]
    assert "parity disagreed; origin: attn_norm (forward, layer 0, at blocks.0.attn_norm" in capsys.readouterr().out
    assert folder.run("accused").info["finished"]
    assert folder.resume("accused") == 1
    assert "checks that disagreed before this resume: 1, 4; so this ends with exit code 1" in capsys.readouterr().out


def test_a_reference_that_fails_costs_no_step(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lockstep.scripts.commands.train, "REFERENCE", f"{REFERENCES}:Failing")
    assert folder.train("alone", CHECKED) == 0
    checks = folder.run("alone").checks()
    assert [(c["step"], c["verdict"]) for c in checks] == [(step, "skipped") for step in (1, 2, 4, 6, 8)]
    assert all("RuntimeError: no such luck (" in c["reason"] for c in checks)
    out = capsys.readouterr().out
    assert "parity 5 skipped" in out
    assert "second line" not in out


def test_a_wrong_reference_judges_nobody(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lockstep.scripts.commands.train, "REFERENCE", f"{REFERENCES}:wrong")
    assert folder.train("unjudged", {"train.steps": 4, "parity.every": 4}) == 0
    (first, last) = folder.run("unjudged").checks()
    assert first["verdict"] == last["verdict"] == "skipped"
    assert first["reason"].startswith("the reference is wrong, and judges nobody: attn_norm, forward")
    assert "the reference is wrong" in capsys.readouterr().out


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
    """The reference's process among the children of `pid`."""
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
    assert (process.returncode, "Traceback" in error) == (0, False), error
    assert len(folder.records("bereft")) == 8
    checks = folder.run("bereft").checks()
    assert sorted(c["step"] for c in checks) == [1, 2, 4, 6, 8]
    lost = [c for c in checks if c["verdict"] == "skipped"]
    assert {c["step"] for c in lost} >= {4, 6, 8}
    assert all("has died (exit code -9)" in c["reason"] for c in lost)
    assert out.count("has died (exit code -9)") == 1
