"""A disk that is full or broken: one line, nothing half-written, and a run that goes on as if it had not been."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.core.errors import UserError
from lockstep.core.files.jsonl import JsonLines, read_lines
from lockstep.core.run.directory import RunDir
from lockstep.parity_tests.guards.events import (
    BROKEN,
    NO_SPACE,
    QUOTA,
    Refusing,
    before_steps,
    fill,
    in_turn,
    settled,
    there,
    written,
)
from lockstep.parity_tests.loop.runs import STEPS, Folder, one_line
from lockstep.parity_tests.stored import stored

Straight = Callable[[str], Folder]
EVERY_TWO = {"checkpoint.every": 2}
ERRORS = [NO_SPACE, QUOTA, BROKEN]


def goes_on(folder: Folder, straight: Straight, name: str = "run") -> None:
    """Resumed, the run ends with the bits of one that was never stopped."""
    assert folder.resume(name) == 0
    assert folder.losses(name) == straight("eager").losses("straight")
    assert folder.weights(name) == straight("eager").weights("straight")
    assert folder.run(name).info["finished"]


def left_overs(run: Path) -> list[str]:
    """List the files that exist only during a write."""
    return [str(path) for path in run.rglob("*") if path.name.endswith((".tmp", ".old", ".lockstep-tmp"))]


@pytest.mark.parametrize("number", ERRORS)
def test_a_record_that_cannot_be_written_ends_the_run(
    number: int,
    folder: Folder,
    straight: Straight,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        disk = Refusing(patch, "/run/records.jsonl", number)
        before_steps(patch, {6: in_turn(lambda: written(folder.path / "run", 4), lambda: disk.turn(True))})
        assert folder.train("run", EVERY_TWO) == 2
    run = folder.path / "run"
    assert one_line(capsys.readouterr().err) == (
        f"lockstep: cannot write {run / 'records.jsonl'}: {os.strerror(number)}; "
        f"continue with: lockstep train --resume {run}"
    )
    assert (run / "records.jsonl").read_bytes().endswith(b"}\n")  # of the half that fitted nothing is left
    assert [r["step"] for r in folder.records("run")] == [1, 2, 3, 4, 5]
    assert [path.name for path in folder.run("run").checkpoints()] == ["step_000002", "step_000004"]
    goes_on(folder, straight)


@pytest.mark.parametrize("number", ERRORS)
def test_run_json_that_cannot_be_written_at_the_end(
    number: int,
    folder: Folder,
    straight: Straight,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        disk = Refusing(patch, "/run/.run.json", number)
        before_steps(patch, {STEPS: lambda: disk.turn(True)})
        assert folder.train("run", {}) == 2
    run = folder.path / "run"
    assert f"cannot write {run / 'run.json'}: {os.strerror(number)}" in one_line(capsys.readouterr().err)
    assert not folder.run("run").info["finished"]
    assert not left_overs(run)
    goes_on(folder, straight)


def test_observations_that_cannot_be_written_are_said_and_missed_by_nobody_else(
    folder: Folder, straight: Straight, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        disk = Refusing(patch, "/run/observations/", NO_SPACE)
        first = folder.path / "run" / "observations" / "step_000001.npz"
        fails = in_turn(lambda: there(first), lambda: disk.turn(True))
        before_steps(patch, {4: fails, 5: in_turn(disk.refused, lambda: disk.turn(False))})
        assert folder.train("run", {"parity.record_every": 4}) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.count("its observations were not kept: cannot write") == 1
    skipped = [c for c in folder.run("run").checks() if c["verdict"] == "skipped"]
    assert [c["step"] for c in skipped] == [4] and "No space left on device" in skipped[0]["reason"]
    kept = sorted(path.name for path in (folder.path / "run" / "observations").glob("step_*"))
    assert kept == ["step_000001.npz", "step_000008.npz", "step_000012.npz"]
    assert not left_overs(folder.path / "run")
    assert folder.weights("run") == straight("eager").weights("straight")


@pytest.mark.parametrize("number", ERRORS)
def test_a_last_checkpoint_that_cannot_be_written_ends_with_2(
    number: int,
    folder: Folder,
    straight: Straight,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The one at the end of a run, and after Ctrl-C: there is no later interval to try again at."""
    with monkeypatch.context() as patch:
        disk = Refusing(patch, "/run/checkpoints", number)
        before_steps(patch, {STEPS: in_turn(lambda: written(folder.path / "run", 10), lambda: disk.turn(True))})
        assert folder.train("run", {"checkpoint.every": 5}) == 2
    said = capsys.readouterr().err
    assert f"step_{STEPS:06d}" in said and os.strerror(number) in said and "--resume" in said
    assert "Traceback" not in said
    run = folder.run("run")
    assert [path.name for path in run.checkpoints()] == ["step_000005", "step_000010"]
    assert all(stored(path) for path in run.checkpoints())
    assert not run.info["finished"]
    goes_on(folder, straight)
    assert not left_overs(folder.path / "run")


def test_half_a_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = JsonLines(tmp_path / "lines.jsonl")
    lines.append({"step": 1})
    disk = Refusing(monkeypatch, "lines.jsonl", NO_SPACE)
    disk.turn(True)
    with pytest.raises(UserError, match=r"cannot write .*lines\.jsonl: No space left on device$"):
        lines.append({"step": 2})
    assert [line["step"] for line in read_lines(lines.path)] == [1]
    disk.turn(False)
    lines.append({"step": 3})
    lines.close()
    assert [line["step"] for line in read_lines(lines.path)] == [1, 3]
    assert lines.path.read_bytes().count(b"\n") == 2


# A disk of its own, which needs the right to mount one


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 8 MB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_is_full_and_then_has_room(
    small_disk: Path,
    tokens: Path,
    straight: Straight,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Folder(small_disk, tokens)
    with monkeypatch.context() as patch:
        before_steps(patch, {5: in_turn(lambda: written(small_disk / "run", 4), lambda: fill(small_disk))})
        assert folder.train("run", EVERY_TWO) == 2
    said = capsys.readouterr().err
    assert "No space left on device" in said and "Traceback" not in said and str(small_disk / "run") in said
    run = folder.run("run")
    last = run.latest_checkpoint()
    assert last is not None and last.name == "step_000004"
    assert stored(last).step == 4
    assert folder.resume("run") == 2  # there is no room yet
    assert "No space left on device" in one_line(capsys.readouterr().err)
    (small_disk / "filler").unlink()
    goes_on(folder, straight)


def test_a_run_that_cannot_even_begin(small_disk: Path, tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Folder(small_disk, tokens)
    fill(small_disk)
    assert folder.train("run", {}) == 2
    assert "No space left on device" in one_line(capsys.readouterr().err)
    assert not (small_disk / "run").exists()


def test_a_checkpoint_at_an_interval_is_tried_again_at_the_next(
    small_disk: Path,
    tokens: Path,
    straight: Straight,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """There is room for records, not for a checkpoint; then there is again."""
    folder = Folder(small_disk, tokens)
    with monkeypatch.context() as patch:
        full = in_turn(lambda: written(small_disk / "run", 3), lambda: fill(small_disk, leave=1 << 17))
        before_steps(patch, {5: full, 8: in_turn(lambda: settled(small_disk / "run"), (small_disk / "filler").unlink)})
        assert folder.train("run", {"checkpoint.every": 3}) == 0
    out, error = capsys.readouterr()
    assert (out + error).count("step_000006") == 1 and "No space left on device" in out + error
    names = [path.name for path in RunDir.open(small_disk / "run").checkpoints()]
    assert names == ["step_000009", "step_000012"]
    assert folder.weights("run") == straight("eager").weights("straight")
