"""Evidence that a disk refuses, that was changed or taken away: its check alone is lost, which one line reports."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.saved import save_evidence
from lockstep.core.parity.evidence.store import FolderStore
from lockstep.core.parity.modes import shadow
from lockstep.parity_tests.guards.events import BROKEN, NO_SPACE, QUOTA, Refusing, before_steps, in_turn, settled
from lockstep.parity_tests.loop.runs import STEPS, Folder

Straight = Callable[[str], Folder]
EVERY_FOUR = {"parity.every": 4, "parity.queue": 10}


def assert_one_is_lost(folder: Folder, straight: Straight, out: str, why: str) -> None:
    """Assert that the check of step 4 alone was lost, and training went on as without."""
    checks = {c["step"]: c for c in folder.run("run").checks()}
    assert {step: c["verdict"] for step, c in checks.items()} == {1: "agreed", 4: "skipped", 8: "agreed", 12: "agreed"}
    assert why in checks[4]["reason"] and "\n" not in checks[4]["reason"]
    assert out.count(why) == 1
    assert len(folder.records("run")) == STEPS
    assert folder.weights("run") == straight("eager").weights("straight")
    assert not (folder.path / "run" / "evidence").exists()


@pytest.mark.parametrize("number", [NO_SPACE, QUOTA, BROKEN])
def test_a_disk_that_refuses(
    number: int,
    folder: Folder,
    straight: Straight,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not at its first: the folder is made before."""
    with monkeypatch.context() as patch:
        disk = Refusing(patch, "/run/evidence/", number)
        run = folder.path / "run"
        events = {
            3: lambda: settled(run),
            4: lambda: disk.turn(True),
            5: in_turn(disk.refused, lambda: disk.turn(False)),
        }
        before_steps(patch, events)
        assert folder.train("run", EVERY_FOUR) == 0
    assert_one_is_lost(folder, straight, capsys.readouterr().out, "its evidence is lost: cannot write the evidence")


def flip(folder: Path) -> None:
    path = folder / "embedding.safetensors"
    raw = bytearray(path.read_bytes())
    raw[40_000] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (flip, "embedding.safetensors was damaged after it was written (its SHA-256 differs)"),
        (lambda folder: (folder / "index.json").unlink(), "index.json: No such file or directory"),
    ],
)
def test_what_was_changed_on_the_disk(
    harm: Callable[[Path], None],
    why: str,
    folder: Folder,
    straight: Straight,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def harmed(evidence: Evidence, store: FolderStore) -> None:
        save_evidence(evidence, store)
        if evidence.record.step == 4:
            harm(store.folder)

    with monkeypatch.context() as patch:
        patch.setattr(shadow, "save_evidence", harmed)
        assert folder.train("run", EVERY_FOUR) == 0
    assert_one_is_lost(folder, straight, capsys.readouterr().out, why)


def test_what_a_killed_run_left_is_removed_when_it_goes_on(folder: Folder) -> None:
    assert folder.train("run", {"checkpoint.every": 5, "train.steps": STEPS}) == 0
    left = folder.path / "run" / "evidence"
    left.mkdir()
    for name in ("step_000004", ".123.tmp"):
        FolderStore.create(left / name)
    assert folder.resume("run") == 0
    assert not left.exists()


def test_evidence_that_is_lost_before_its_alarm_is_said_and_training_goes_on(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = shadow.Shadow.evidence_of

    def lost(self: shadow.Shadow, step: int) -> Evidence:
        shutil.rmtree(self._place(step))
        return right(self, step)

    backend = "lockstep.parity_tests.faults.forward:QueryScaled"
    with monkeypatch.context() as patch:
        patch.setattr(shadow.Shadow, "evidence_of", lost)
        folder.train("run", {"parity.every": 8, "parity.on_alarm": "log"}, "--backend", backend)
    out = capsys.readouterr().out
    assert "no capsule: cannot read" in out and "index.json: No such file" in out
    assert len(folder.records("run")) == STEPS
    assert not (folder.path / "run" / "capsules").exists()
    with pytest.raises(UserError):
        FolderStore.open(folder.path / "run" / "evidence")
