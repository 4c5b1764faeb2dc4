"""Two commands and one run directory: one writes, the others read or say who writes."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from lockstep.core.errors import UserError
from lockstep.core.files.lock import FolderLock
from lockstep.core.run.directory import RunDir
from lockstep.parity_tests.loop.runs import Folder, one_line
from lockstep.scripts import cli


def test_while_a_run_is_written(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert folder.train("run") == 0
    path = folder.path / "run"
    with RunDir.open(path, write=True):
        capsys.readouterr()
        for refused in (["train", "--resume", str(path)], [*folder.arguments("run", {}), "--overwrite"]):
            assert cli.run(refused) == 2
            said = one_line(capsys.readouterr().err)
            assert said == f"lockstep: {path} is being written by another process (pid {os.getpid()})"
        # A line that is being written.
        with (path / "records.jsonl").open("a") as file:
            file.write('{"step": 13, "lo')
        assert cli.run(["report", str(path)]) == 0
        assert (path / "report.html").is_file()
    assert len(folder.records("run")) == 12


def test_a_replay_while_a_run_is_written(folder: Folder) -> None:
    assert folder.train("run", {"checkpoint.every": 4, "parity.record_every": 4}) == 0
    path = folder.path / "run"
    with RunDir.open(path, write=True):
        assert cli.run(["replay", str(path), "--step", "8"]) == 0
    assert len(folder.records("run")) == 12


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks(
    number: int, folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert folder.train("done", {"train.steps": 4}) == 0
    capsys.readouterr()

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert folder.train("run", {}) == 2
    assert "this file system has no locks" in one_line(capsys.readouterr().err)
    assert sorted(path.name for path in folder.path.iterdir()) == ["done", "run.toml"]
    assert folder.resume("done") == 2
    assert "this file system has no locks" in one_line(capsys.readouterr().err)


def test_a_lock_on_a_full_disk_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(UserError, match="No space left on device"):
        patch.setattr(os, "pwrite", full)
        FolderLock(tmp_path)
    FolderLock(tmp_path).release()
