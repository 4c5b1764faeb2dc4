"""Batches that cannot be made any more: the step and the cause are named, and what was trained is kept."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.core.data import loader
from lockstep.core.run.data import RunData
from lockstep.parity_tests.guards.events import before_steps
from lockstep.parity_tests.loop.runs import Folder, one_line

Straight = Callable[[str], Folder]
MAPPED = {"data.memory_limit_gib": 1e-9, "data.prefetch": 1}


def goes_on(folder: Folder, straight: Straight, step: int) -> None:
    """Check that the last step's checkpoint is there, and the run ends as one that was never stopped."""
    last = folder.run("run").latest_checkpoint()
    assert last is not None and last.name == f"step_{step - 1:06d}"
    assert folder.resume("run") == 0
    assert folder.losses("run") == straight("eager").losses("straight")
    assert folder.weights("run") == straight("eager").weights("straight")


@pytest.mark.parametrize(
    ("kind", "said"), [(OSError, "OSError: no luck"), (MemoryError, "MemoryError: no luck"), (SystemExit, "SystemExit")]
)
def test_a_loader_that_fails_names_its_step_and_loses_nothing(
    kind: type[BaseException],
    said: str,
    folder: Folder,
    straight: Straight,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    batch = RunData.batch

    def failing(self: RunData, step: int):
        if step == 6 and threading.current_thread().name == "lockstep-prefetch":
            raise kind("no luck")
        return batch(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(RunData, "batch", failing)
        assert folder.train("run", {}) == 2
    line = one_line(capsys.readouterr().err)
    assert line.startswith(f"lockstep: step 6: its batch could not be made: {said}")
    assert line.endswith(f"; continue with: lockstep train --resume {folder.path / 'run'}")
    goes_on(folder, straight, 6)


def test_a_thread_that_is_gone_is_not_waited_for(
    folder: Folder, straight: Straight, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    produce = loader.Prefetcher._produce

    def ending(self) -> None:
        """All is as if the thread were gone: it gives nothing."""
        self._steps = range(self._steps.start, 6)
        produce(self)
        self._done, self._step = False, 6

    with monkeypatch.context() as patch:
        patch.setattr(loader, "_LOOK_SECONDS", 0.01)
        patch.setattr(loader.Prefetcher, "_produce", ending)
        assert folder.train("run", {}) == 2
    assert "step 6: its batch was not made: the loader's thread has ended" in one_line(capsys.readouterr().err)
    goes_on(folder, straight, 6)


@pytest.mark.parametrize("how", ["deleted", "replaced", "cut"])
def test_a_mapped_shard_that_is_not_what_it_was_is_noticed(
    how: str,
    folder: Folder,
    straight: Straight,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    shutil.copytree(folder.data, data)
    mine = Folder(tmp_path, data)
    shard, kept = data / "train_00000.bin", tmp_path / "kept.bin"

    def happen() -> None:
        """At no moment is there no shard, but where it is deleted: the loader reads ahead."""
        if how == "deleted":
            shard.rename(kept)
            return
        shutil.copy(shard, kept)
        if how == "cut":  # a copy: whoever reads a mapped file that is cut itself may die of SIGBUS
            os.truncate(kept, 5000)
        kept.replace(shard)

    whole = shard.read_bytes()
    with monkeypatch.context() as patch:
        before_steps(patch, {4: happen})
        assert mine.train("run", MAPPED) == 2
    said = one_line(capsys.readouterr().err)
    assert "its batch could not be made" in said
    assert f"cannot read the shard {shard}: No such file" in said or f"the shard {shard} was changed" in said
    assert (how == "deleted") == ("No such file" in said)
    done = len(mine.records("run"))
    assert 4 <= done <= 6
    shard.write_bytes(whole)
    goes_on(mine, straight, done + 1)


def test_shards_that_are_held_in_memory_may_go(
    folder: Folder, straight: Straight, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(folder.data, data)
    mine = Folder(tmp_path, data)
    with monkeypatch.context() as patch:
        before_steps(patch, {4: (data / "train_00000.bin").unlink})
        assert mine.train("run", {}) == 0
    assert mine.weights("run") == straight("eager").weights("straight")
