"""The run directory: all or nothing when it is made, line by line while it lives, bit by bit when it is read back."""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core import checkpoint
from core.backend import State, StepRecord
from core.config import CheckpointConfig, RunConfig
from core.config_file import load_config
from core.errors import UserError
from core.jsonl import read_lines
from core.run import RunDir

CONFIG = RunConfig(name="r", checkpoint=CheckpointConfig(keep=3))


def record(step: int, **changes) -> StepRecord:
    values = {"loss": 8.0 / step, "loss_weight": 2.0, "lr": 1e-3, "grad_norm": 1.0, "clip_coefficient": 0.5}
    return StepRecord(**{"step": step, "digest": "d", "tokens": 2, **values, **changes})


def state(step: int, seed: int = 0) -> State:
    rng = np.random.default_rng([step, seed])
    shapes = {"embed.weight": (7, 4), "final_norm.weight": (4,)}

    def arrays(dtype):
        return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}

    return State(step, arrays(np.float32), {"exp_avg": arrays(np.float32), "exp_avg_sq": arrays(np.float64)})


def assert_same_state(ours: State, theirs: State) -> None:
    assert ours.step == theirs.step
    groups = [(ours.params, theirs.params)]
    assert ours.optimizer.keys() == theirs.optimizer.keys()
    groups += [(ours.optimizer[kind], theirs.optimizer[kind]) for kind in ours.optimizer]
    for left, right in groups:
        assert left.keys() == right.keys()
        for name in left:
            assert left[name].dtype == right[name].dtype and left[name].shape == right[name].shape
            assert left[name].tobytes() == right[name].tobytes(), name


def everything_under(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.fixture
def run(tmp_path):
    with RunDir.create(tmp_path / "runs" / "r", CONFIG, {"backend": "torch", "wandb_id": None}) as run:
        yield run


# Creation


def test_created_run_reads_back(run):
    assert load_config(run.path / "config.toml") == CONFIG
    info = json.loads((run.path / "run.json").read_text())
    assert info["backend"] == "torch" and info["finished"] is False and info["name"] == "r"
    run.update_info(wandb_id="abc")
    run.finish()
    reader = RunDir.open(run.path)
    assert reader.config == CONFIG
    assert reader.info["wandb_id"] == "abc" and reader.info["finished"] is True and reader.info["backend"] == "torch"


def test_existing_run_is_kept_unless_overwritten(run):
    run.append_record(record(1))
    run.close()
    with pytest.raises(UserError, match=r"holds a run already: --overwrite replaces it, --resume .* goes on") as error:
        RunDir.create(run.path, CONFIG, {})
    assert "\n" not in str(error.value)
    assert len(RunDir.open(run.path).records()) == 1
    with RunDir.create(run.path, CONFIG, {}, overwrite=True) as new:
        assert new.records() == []
    assert [p.name for p in run.path.parent.iterdir()] == ["r"]


def test_what_is_not_a_run_is_never_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="not empty and not a run"):
        RunDir.create(tmp_path, CONFIG, {}, overwrite=True)
    with pytest.raises(UserError, match="is a file"):
        RunDir.create(tmp_path / "thesis.tex", CONFIG, {}, overwrite=True)
    assert everything_under(tmp_path) == ["thesis.tex"]


def test_empty_folder_is_taken(tmp_path):
    (tmp_path / "r").mkdir()
    RunDir.create(tmp_path / "r", CONFIG, {}).close()


def test_unwritable_parent_leaves_nothing(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot make"):
        RunDir.create(tmp_path / "file" / "runs" / "r", CONFIG, {})
    assert everything_under(tmp_path) == ["file"]


@pytest.mark.parametrize("occupied", [False, True])
@pytest.mark.parametrize("failing", ["rename", "fsync"])
def test_a_disk_that_fails_leaves_what_was_there(tmp_path, monkeypatch, failing, occupied):
    path = tmp_path / "deep" / "runs" / "r"
    if occupied:
        with RunDir.create(path, CONFIG, {"mark": "first"}):
            pass
    before = everything_under(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, full)
        with pytest.raises(UserError, match="No space left on device"):
            RunDir.create(path, CONFIG, {"mark": "second"}, overwrite=True)
    assert everything_under(tmp_path) == before
    if occupied:
        with RunDir.open(path, write=True) as run:
            assert run.info["mark"] == "first"


def test_open_says_what_is_not_a_run(tmp_path):
    with pytest.raises(UserError, match="is not a run directory"):
        RunDir.open(tmp_path)
    with pytest.raises(UserError, match="is not a run directory"):
        RunDir.open(tmp_path / "nowhere")


def test_one_writer(run):
    for attempt in (
        lambda: RunDir.open(run.path, write=True),
        lambda: RunDir.create(run.path, CONFIG, {}, overwrite=True),
    ):
        with pytest.raises(UserError, match=rf"is being written by another process \(pid {os.getpid()}\)"):
            attempt()
    RunDir.open(run.path).close()  # readers are welcome
    run.append_record(record(1))
    run.close()
    RunDir.open(run.path, write=True).close()


def test_a_killed_writer_leaves_no_lock(tmp_path):
    program = (
        "import os; from pathlib import Path; from core.config import RunConfig; from core.run import RunDir\n"
        f"r = RunDir.create(Path({str(tmp_path / 'r')!r}), RunConfig(), {{}}); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == -9
    RunDir.open(tmp_path / "r", write=True).close()


def test_a_reader_cannot_write(run):
    reader = RunDir.open(run.path)
    for write in (lambda: reader.append_record(record(1)), lambda: reader.update_info(a=1), reader.finish):
        with pytest.raises(RuntimeError, match="opened to read"):
            write()


# Records and checks


def test_records_are_there_before_close(run):
    run.append_record(record(1, metrics={"val/loss": 3.5}, mfu={"6N": 0.4}, sample='a "b"\n[c] é'))
    run.append_record(record(2, loss=float("nan")))
    first, second = RunDir.open(run.path).records()
    assert first["metrics"] == {"val/loss": 3.5} and first["mfu"] == {"6N": 0.4}
    assert first["sample"] == 'a "b"\n[c] é'
    assert set(first) == set(StepRecord.__dataclass_fields__)
    assert second["loss"] != second["loss"]


def test_torn_last_line_is_left_out_and_another_is_an_error(run):
    for step in (1, 2):
        run.append_record(record(step))
    path = run.path / "records.jsonl"
    whole = path.read_bytes()
    for cut in range(len(whole) // 2 + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert [line["step"] for line in run.records()] in ([1], [1, 2])
    path.write_bytes(b"{broken\n" + whole)
    with pytest.raises(UserError, match=r"records.jsonl, line 1: not a JSON object"):
        run.records()


@pytest.mark.parametrize("torn", [b"", b'{"step": 8, "los'])
def test_resume_moves_later_steps_out(run, torn):
    for step in range(1, 8):
        run.append_record(record(step))
        run.append_check({"schema": 1, "step": step, "verdict": "agreed"})
    for step in (2, 4, 6):
        run.save_checkpoint(state(step), {})
    run.finish()
    run.close()
    with open(run.path / "records.jsonl", "ab") as file:
        file.write(torn)
    with RunDir.open(run.path, write=True) as again:
        again.resume_from(4)
        assert again.info["finished"] is False
        assert again.info["resumes"][0]["step"] == 4
        assert [line["step"] for line in again.records()] == [1, 2, 3, 4]
        assert [line["step"] for line in again.checks()] == [1, 2, 3, 4]
        assert [p.name for p in again.checkpoints()] == ["step_000002", "step_000004"]
        again.append_record(record(5, loss=1.0))
        assert [line["step"] for line in again.records()] == [1, 2, 3, 4, 5]
        (branch,) = again.info["branches"]
        assert (branch["from_step"], branch["records"], branch["checks"], branch["checkpoints"]) == (4, 3, 3, [6])
        assert_same_state(checkpoint.load_checkpoint(again.path / branch["path"] / "step_000006")[0], state(6))
        assert [line["step"] for line in read_lines(again.path / branch["path"] / "records.jsonl")] == [5, 6, 7]


def test_resume_at_the_end_makes_no_branch(run):
    run.append_record(record(1))
    run.resume_from(1)
    assert run.info["branches"] == [] and not (run.path / "branches").exists()
    run.append_record(record(2))
    assert [line["step"] for line in run.records()] == [1, 2]


# Checkpoints


def test_checkpoint_gives_the_same_bits(run):
    extra = {"tokens": 12, "name": "é"}
    path = run.save_checkpoint(state(500), extra)
    assert path == run.path / "checkpoints" / "step_000500" == run.latest_checkpoint()
    loaded, loaded_extra = run.load_checkpoint(path)
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
    loaded, _ = run.load_checkpoint(run.save_checkpoint(State(1, odd, {}), {}))
    assert_same_state(loaded, State(1, {k: np.ascontiguousarray(v).reshape(v.shape) for k, v in odd.items()}, {}))


def test_only_the_last_are_kept(run):
    for step in (1, 2, 10, 999_999, 1_000_000):
        run.save_checkpoint(state(step), {})
    assert [p.name for p in run.checkpoints()] == ["step_000010", "step_999999", "step_1000000"]


def test_saving_a_step_again_replaces_it(run):
    run.save_checkpoint(state(3, seed=0), {"n": 1})
    path = run.save_checkpoint(state(3, seed=1), {"n": 2})
    loaded, extra = run.load_checkpoint(path)
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
    """The second rename of a replacement fails: the old one is aside already, the new one not yet in its place."""
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
    """A run with two checkpoints, for tests that damage a copy of it."""
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
        loaded, extra = run.load_latest(warnings.append)
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
    loaded, _ = run.load_latest(warnings.append)
    assert loaded.step == 1
    assert len(warnings) == 1 and str(victim) in warnings[0]
    if file != "manifest.json":
        assert ("is missing" if how == "missing" else f"{len(content)} were written") in warnings[0]
    with pytest.raises(checkpoint.CorruptCheckpoint, match=file):
        run.load_checkpoint(victim.parent)


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


def test_a_run_that_is_discarded_takes_the_parents_along_that_were_made_for_it(tmp_path):
    (tmp_path / "mine").mkdir()
    RunDir.create(tmp_path / "mine" / "new" / "deep" / "r", CONFIG, {}).discard()
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    run = RunDir.create(tmp_path / "mine" / "new" / "r", CONFIG, {})
    (tmp_path / "mine" / "new" / "theirs").touch()
    run.discard()
    assert [path.name for path in (tmp_path / "mine" / "new").iterdir()] == ["theirs"]
