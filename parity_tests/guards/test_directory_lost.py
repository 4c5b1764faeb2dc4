"""A run directory that is moved, deleted, replaced or closed to writing while the run writes it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.core.checkpoint import format
from lockstep.core.checkpoint.format import list_checkpoints
from lockstep.parity_tests.guards.events import Refusing, before_steps, in_turn, written
from lockstep.parity_tests.loop.runs import STEPS, Folder, one_line

Straight = Callable[[str], Folder]
EVERY_TWO = {"checkpoint.every": 2}
LOST = "was moved or deleted while the run wrote it"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def is_lost(folder: Folder, event: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Check that the run ends at its sixth step, to which the event happened, in one line."""
    with monkeypatch.context() as patch:
        before_steps(patch, {6: in_turn(lambda: written(folder.path / "run", 4), lambda: event(folder.path / "run"))})
        assert folder.train("run", EVERY_TWO) == 2
    assert LOST in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("step", [1, 6])
def test_moved_away_it_goes_on_where_it_went(
    step: int, folder: Folder, straight: Straight, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, there = folder.path / "run", folder.path / "there"
    with monkeypatch.context() as patch:
        before = (lambda: written(run, 4)) if step > 1 else (lambda: None)
        before_steps(patch, {step: in_turn(before, lambda: run.rename(there))})
        assert folder.train("run", EVERY_TWO) == 2
    assert LOST in one_line(capsys.readouterr().err)
    assert not run.exists()
    assert [r["step"] for r in folder.records("there")] == list(range(1, step))
    if step > 1:
        assert folder.resume("there") == 0
        assert folder.weights("there") == straight("eager").weights("straight")


def test_deleted_it_is_not_made_anew(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_lost(folder, shutil.rmtree, monkeypatch, capsys)
    assert not (folder.path / "run").exists()


def test_deleted_while_an_old_checkpoint_is_deleted(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder.path / "run"

    def deleting(checkpoints: Path) -> list[Path]:
        found = list_checkpoints(checkpoints)
        if found[-1].name == f"step_{STEPS:06d}":
            shutil.rmtree(run)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(format, "list_checkpoints", deleting)
        assert folder.train("run", EVERY_TWO | {"checkpoint.keep": 1}) == 2
    assert LOST in one_line(capsys.readouterr().err)
    assert not run.exists()


def test_a_file_in_its_place_stays(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def replace(run: Path) -> None:
        shutil.rmtree(run)
        run.write_text("mine")

    is_lost(folder, replace, monkeypatch, capsys)
    assert (folder.path / "run").read_text() == "mine"


@pytest.mark.parametrize("step", [1, 6])
def test_another_run_in_its_place_is_not_touched(
    step: int, folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert folder.train("other", {"train.steps": 4}) == 0
    before = content(folder.path / "other")

    def replace() -> None:
        if step > 1:
            written(folder.path / "run", 4)
        (folder.path / "run").rename(folder.path / "there")
        (folder.path / "other").rename(folder.path / "run")

    with monkeypatch.context() as patch:
        before_steps(patch, {step: replace})
        assert folder.train("run", EVERY_TWO) == 2
    assert LOST in one_line(capsys.readouterr().err)
    assert content(folder.path / "run") == before


def test_records_that_are_deleted_are_not_written_into_the_void(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = folder.path / "run" / "records.jsonl"
    with monkeypatch.context() as patch:
        before_steps(patch, {6: records.unlink})
        assert folder.train("run", EVERY_TWO) == 2
    assert f"cannot write {records}: No such file or directory" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_closed_to_writing_it_keeps_its_last_checkpoint(
    number: int,
    folder: Folder,
    straight: Straight,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Files that are open can still be written, such as the records; no new file can be made."""
    with monkeypatch.context() as patch:
        run = folder.path / "run"
        disk = Refusing(patch, f"{run}/checkpoints", number)
        before_steps(patch, {6: in_turn(lambda: written(run, 4), lambda: disk.turn(True))})
        assert folder.train("run", EVERY_TWO) == 2
    said = capsys.readouterr().err
    assert os.strerror(number) in said and str(run) in said and "Traceback" not in said
    last = folder.run("run").latest_checkpoint()
    assert last is not None and last.name == "step_000004"
    assert folder.resume("run") == 0
    assert folder.weights("run") == straight("eager").weights("straight")
