"""Training while data is prepared: the same samples as afterwards, and one clear line where the rest never comes."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from lockstep.core.config.schema import DataConfig, EvalConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from lockstep.core.data import growing, workers
from lockstep.core.data.encode import encode_shard
from lockstep.core.data.grouped_sampler import GroupedSampler
from lockstep.core.data.growing import FinishedShards
from lockstep.core.data.index import INDEX_NAME
from lockstep.core.data.prepare import prepare
from lockstep.core.errors import UserError
from lockstep.core.files.lock import FolderLock
from lockstep.core.run.data import RunData
from lockstep.parity_tests.data.conftest import settings_for

LENGTH = 16


def config(folder: Path, minutes: float = 1.0, window: int = 2, steps: int = 30) -> RunConfig:
    return RunConfig(
        model=ModelConfig(vocab_size=300),
        data=DataConfig(path=str(folder), window_shards=window, wait_minutes=minutes),
        train=TrainConfig(steps=steps, batch_size=4, micro_batch_size=2, sequence_length=LENGTH),
        eval=EvalConfig(batches=1),
        optim=OptimConfig(warmup_steps=0),
    )


def digests(data: RunData, steps: int) -> list[str]:
    return [data.batch(step).digest() for step in range(1, steps + 1)]


class Slowly:
    """A preparation in a thread whose shards are published one at a time, when they are let."""

    def __init__(self, folder: Path, texts: Path, patch: pytest.MonkeyPatch) -> None:
        self.published: list[str] = []
        self._may = threading.Semaphore(0)
        self.failed = False
        write = encode_shard

        def slow(task):
            self._may.acquire()
            if self.failed:
                raise UserError("the machine of the preparation is gone")
            self.published.append(task.file)
            return write(task)

        patch.setattr(workers, "encode_shard", slow)
        self._thread = threading.Thread(target=self._run, args=(settings_for(folder, texts),), daemon=True)
        self._thread.start()

    def _run(self, settings) -> None:
        try:
            prepare(settings)
        except UserError:
            assert self.failed

    def let(self, shards: int) -> None:
        for _ in range(shards):
            self._may.release()

    def end(self, failed: bool = False) -> None:
        self.failed = failed
        self.let(10_000)
        self._thread.join()


def test_batches_made_while_shards_come_are_those_of_the_finished_folder(texts, tmp_path, monkeypatch):
    window = 3
    preparing = Slowly(tmp_path / "data", texts, monkeypatch)
    while not (tmp_path / "data" / ".lock").exists():
        time.sleep(0.01)
    # Twenty are planned: five of validation come first, then more than the first window.
    threading.Timer(0.3, preparing.let, (12,)).start()
    said: list[str] = []
    during = RunData.open(config(tmp_path / "data", window=window), said.append)
    assert during.dataset.facts()["train_tokens"] is None and not (tmp_path / "data" / INDEX_NAME).exists()
    first = digests(during, 10)
    assert not (tmp_path / "data" / INDEX_NAME).exists() and preparing.published[0].startswith("val")
    threading.Timer(0.3, preparing.end).start()
    rest = digests(during, 280)
    assert rest[:10] == first and any("waiting for" in line for line in said)
    preparing.end()
    after = RunData.open(config(tmp_path / "data", 0.0, window))
    # The order is one of shards in windows: 280 steps are more than one epoch.
    assert digests(after, 280) == rest and after.sampler.epochs(1120)[0] > 1
    assert after.dataset.fingerprint == during.dataset.fingerprint
    for one, other in zip(during.validation, after.validation, strict=True):
        assert one.digest() == other.digest()
    # A window is part of the order.
    assert digests(RunData.open(config(tmp_path / "data", 0.0, window + 1)), 10) != first


def test_a_preparation_that_has_ended_is_told_of_in_one_line(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(growing, "_GRACE_SECONDS", 0.5)
    preparing = Slowly(tmp_path / "data", texts, monkeypatch)
    preparing.let(16)
    data = RunData.open(config(tmp_path / "data"))
    digests(data, 5)
    preparing.end(failed=True)
    with pytest.raises(UserError, match=r"no process prepares .*/data; continue the preparation"):
        digests(data, 400)


def test_a_preparation_that_hangs_is_told_of_in_one_line(texts, tmp_path, monkeypatch):
    preparing = Slowly(tmp_path / "data", texts, monkeypatch)
    with pytest.raises(UserError, match=r"was not written within data.wait_minutes = 0.01, though a process holds"):
        RunData.open(config(tmp_path / "data", 0.01))
    preparing.end(failed=True)


def test_another_preparation_in_the_same_folder_is_noticed(texts, tmp_path, monkeypatch):
    preparing = Slowly(tmp_path / "data", texts, monkeypatch)
    preparing.let(16)
    data = RunData.open(config(tmp_path / "data"))
    digests(data, 5)
    preparing.end(failed=True)
    monkeypatch.undo()
    prepare(settings_for(tmp_path / "data", texts, force=True, shard_tokens=900))
    with pytest.raises(UserError, match=r"changed while it was in use"):
        digests(data, 400)


def test_a_folder_that_nobody_prepares_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(growing, "_GRACE_SECONDS", 0.1)
    with FolderLock(tmp_path):
        pass
    with pytest.raises(UserError, match=r"plan.json is not there, and no process prepares"):
        RunData.open(config(tmp_path))


def test_an_epoch_has_every_block_of_every_group_once_and_groups_stand_in_order():
    tokens = [100, 37, 5, 260, 90, 41, 16]
    sampler = GroupedSampler(3, LENGTH, 2, FinishedShards(tokens))
    groups = [sum(tokens[at : at + 2]) for at in range(0, 7, 2)]
    blocks = [(size - 1) // LENGTH for size in groups]
    assert blocks[-1] == 0  # a group shorter than a block and its target has none
    every = sum(blocks)
    starts = sampler.window_starts(0, 3 * every, LENGTH)
    firsts = np.cumsum([0, *groups])
    due = np.concatenate([first + LENGTH * np.arange(count) for first, count in zip(firsts[:-1], blocks, strict=True)])
    epochs = starts.reshape(3, every)
    assert all(np.array_equal(np.sort(epoch), due) for epoch in epochs)
    of = np.searchsorted(firsts, epochs, side="right")
    assert (np.diff(of, axis=1) >= 0).all()
    assert not np.array_equal(epochs[0], epochs[1])
    # Shorter sequences cut the same blocks.
    short = sampler.window_starts(0, 4 * every, LENGTH // 4)
    assert np.array_equal(short.reshape(every, 4)[:, 0], epochs[0])


def test_shards_shorter_than_a_sequence_are_refused():
    with pytest.raises(UserError, match=r"raise data.window_shards"):
        GroupedSampler(0, LENGTH, 1, FinishedShards([10, 16])).window_starts(0, 1, LENGTH)
    assert GroupedSampler(0, LENGTH, 2, FinishedShards([10, 16])).window_starts(0, 1, LENGTH).tolist() == [0]


def test_only_the_shards_of_a_sample_and_of_those_before_it_are_needed():
    class AsFarAs(FinishedShards):
        finished = False

        def tokens_of(self, shard: int) -> int:
            asked.append(shard)
            return super().tokens_of(shard)

    asked: list[int] = []
    sampler = GroupedSampler(0, LENGTH, 2, AsFarAs([LENGTH * 4 + 1] * 10))
    sampler.window_starts(0, 8, LENGTH)
    assert asked == [0, 1]
    sampler.window_starts(8 * LENGTH, 1, LENGTH)
    assert asked == [0, 1, 2, 3]
