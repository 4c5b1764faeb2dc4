"""Checkpoints of a run: bit by bit when they are read, replaced whole, and damage named."""

import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.backend import State
from lockstep.core.checkpoint.format import CorruptCheckpoint, load_checkpoint
from lockstep.core.errors import UserError
from lockstep.core.run.directory import RunDir
from lockstep.parity_tests.core.run_files import CONFIG, assert_same_state, everything_under, state


@pytest.fixture
def run(tmp_path):
    with RunDir.create(tmp_path / "runs" / "r", CONFIG, {"backend": "torch", "wandb_id": None}) as run:
        yield run


def test_checkpoint_gives_the_same_bits(run):
    extra = {"tokens": 12, "name": "é"}
    path = run.save_checkpoint(state(500), extra)
    assert path == run.path / "checkpoints" / "step_000500" == run.latest_checkpoint()
    loaded, loaded_extra = load_checkpoint(path)
    assert_same_state(loaded, state(500))
    assert loaded_extra == extra
    manifest = json.loads((path / "manifest.json").read_text())
    assert set(manifest["files"]) == {p.name for p in path.iterdir()} - {"manifest.json"}


def test_odd_arrays_survive(run):
    odd = {
        "transposed": np.arange(6.0).reshape(2, 3).T,
        "scalar": np.array(3.5, np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "special": np.array([np.nan, -0.0, np.inf, 5e-324]),
        "steps": np.array([2**40]),
    }
    loaded, _ = load_checkpoint(run.save_checkpoint(State(1, odd, {}), {}))
    assert_same_state(loaded, State(1, {k: np.ascontiguousarray(v).reshape(v.shape) for k, v in odd.items()}, {}))


def test_only_the_last_are_kept(run):
    for step in (1, 2, 10, 999_999, 1_000_000):
        run.save_checkpoint(state(step), {})
    assert [p.name for p in run.checkpoints()] == ["step_000010", "step_999999", "step_1000000"]


def test_saving_a_step_again_replaces_it(run):
    run.save_checkpoint(state(3, seed=0), {"n": 1})
    path = run.save_checkpoint(state(3, seed=1), {"n": 2})
    loaded, extra = load_checkpoint(path)
    assert_same_state(loaded, state(3, seed=1))
    assert extra == {"n": 2}
    assert [p.name for p in path.parent.iterdir()] == ["step_000003"]


@pytest.mark.parametrize("failing", ["rename", "fsync"])
def test_a_save_that_fails_keeps_the_old_one_and_leaves_nothing(run, monkeypatch, failing):
    run.save_checkpoint(state(3), {"n": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    for step in (3, 4):
        with monkeypatch.context() as patch:
            patch.setattr(os, failing, full)
            with pytest.raises(UserError, match=r"cannot write the checkpoint .* No space left on device"):
                run.save_checkpoint(state(step), {"n": 2})
        assert [p.name for p in (run.path / "checkpoints").iterdir()] == ["step_000003"]
    assert run.load_latest(pytest.fail)[1] == {"n": 1}


def refuse_to_rename_to(target: Path, monkeypatch) -> None:
    """Make the second rename of a replacement fail: the old one is aside already, the new one not yet in its place."""
    rename = os.rename
    refused: list[Path] = []

    def selective(source, destination):
        if Path(destination) == target and not refused:
            refused.append(source)
            raise OSError(5, "Input/output error")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", selective)


def test_a_replacement_that_fails_midway_puts_the_old_one_back(run, tmp_path, monkeypatch):
    path = run.save_checkpoint(state(3), {"n": 1})
    refuse_to_rename_to(path, monkeypatch)
    with pytest.raises(UserError, match="Input/output error"):
        run.save_checkpoint(state(3), {"n": 2})
    assert run.load_latest(pytest.fail)[1] == {"n": 1}
    run.update_info(mark="first")
    run.close()
    refuse_to_rename_to(run.path, monkeypatch)
    with pytest.raises(UserError, match="Input/output error"):
        RunDir.create(run.path, CONFIG, {"mark": "second"}, overwrite=True)
    assert RunDir.open(run.path).info["mark"] == "first"
    assert [p.name for p in run.path.parent.iterdir()] == ["r"]


def test_left_overs_of_a_killed_process_are_cleared(run):
    run.save_checkpoint(state(3), {})
    run.close()
    (run.path / "checkpoints" / ".step_000004.1.tmp").mkdir()
    (run.path / "checkpoints" / ".step_000002.1.old").mkdir()
    with RunDir.open(run.path, write=True):
        assert [p.name for p in (run.path / "checkpoints").iterdir()] == ["step_000003"]


@pytest.mark.parametrize("kind", ["params", "a/b", "..", ""])
def test_optimizer_state_cannot_name_a_file_elsewhere(run, kind):
    with pytest.raises(ValueError, match="cannot be the name of optimizer state"):
        run.save_checkpoint(State(1, {}, {kind: {}}), {})
    assert everything_under(run.path / "checkpoints") == []


FILES = ("params.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors", "extra.json", "manifest.json")


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """Make a run with two checkpoints, for tests that damage a copy of it."""
    path = tmp_path_factory.mktemp("intact") / "r"
    with RunDir.create(path, CONFIG, {}) as run:
        run.save_checkpoint(state(1), {"n": 1})
        run.save_checkpoint(state(2), {"n": 2})
    return path


def damaged_copy(intact: Path, folder: str) -> RunDir:
    return RunDir.open(Path(shutil.copytree(intact, Path(folder) / "r")))


@settings(max_examples=200, deadline=None)
@given(file=st.sampled_from(FILES), where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_any_changed_byte_is_noticed_or_without_effect(intact, file, where, flip):
    with tempfile.TemporaryDirectory() as folder:
        run = damaged_copy(intact, folder)
        victim = run.path / "checkpoints" / "step_000002" / file
        content = bytearray(victim.read_bytes())
        content[int(where * len(content))] ^= flip
        victim.write_bytes(content)
        warnings: list[str] = []
        loaded, extra, _ = run.load_latest(warnings.append)
        if warnings:
            assert len(warnings) == 1 and str(victim) in warnings[0]
            assert_same_state(loaded, state(1))
            assert extra == {"n": 1}
        else:  # white space between the manifest's words
            assert file == "manifest.json"
            assert_same_state(loaded, state(2))
            assert extra == {"n": 2}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("how", ["missing", "torn", "empty", "longer"])
def test_a_damaged_file_is_named_and_the_one_before_is_used(intact, tmp_path, file, how):
    run = damaged_copy(intact, str(tmp_path))
    victim = run.path / "checkpoints" / "step_000002" / file
    content = victim.read_bytes()
    victim.unlink()
    if how != "missing":
        victim.write_bytes({"torn": content[: len(content) // 2], "empty": b"", "longer": content + b"}"}[how])
    warnings: list[str] = []
    loaded, _, _ = run.load_latest(warnings.append)
    assert loaded.step == 1
    assert len(warnings) == 1 and str(victim) in warnings[0]
    if file != "manifest.json":
        assert ("is missing" if how == "missing" else f"{len(content)} were written") in warnings[0]
    with pytest.raises(CorruptCheckpoint, match=file):
        load_checkpoint(victim.parent)


def test_a_renamed_checkpoint_is_not_taken_for_another_step(intact, tmp_path):
    run = damaged_copy(intact, str(tmp_path))
    (run.path / "checkpoints" / "step_000002").rename(run.path / "checkpoints" / "step_000009")
    warnings: list[str] = []
    assert run.load_latest(warnings.append)[0].step == 1
    assert "the folder was renamed" in warnings[0]


def test_no_good_checkpoint_is_an_error(intact, tmp_path, run):
    with pytest.raises(UserError, match="has no checkpoint to go on from"):
        run.load_latest(pytest.fail)
    damaged = damaged_copy(intact, str(tmp_path))
    rng = random.Random(0)
    for path in damaged.checkpoints():
        (path / "params.safetensors").write_bytes(rng.randbytes(100))
    warnings: list[str] = []
    with pytest.raises(UserError, match="has no intact checkpoint to go on from"):
        damaged.load_latest(warnings.append)
    assert len(warnings) == 2
