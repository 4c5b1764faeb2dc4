"""A run, a capsule or a data folder names nothing outside it, to read, to write or to remove."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lockstep.core.checkpoint import format as checkpoint
from lockstep.core.checkpoint.reader import Stored
from lockstep.core.data.dataset import TokenDataset
from lockstep.core.errors import UserError
from lockstep.core.files.atomic import read_sealed_json, write_atomically, write_sealed_json
from lockstep.core.files.lock import FolderLock
from lockstep.core.parity.evidence.capsule import read_capsule
from lockstep.core.parity.modes.rerun import initial_state
from lockstep.core.report.build import build_report
from lockstep.core.run.branches import RunBranch
from lockstep.core.run.directory import RunDir
from lockstep.parity_tests.guards.planted import CONFIG, planted_capsule, seal_capsule, seal_checkpoint
from lockstep.parity_tests.report import fake_run
from lockstep.scripts import cli

SECRET = "[registry]\ntoken = 'very secret'\n"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Write a file of the user's, which nothing may touch."""
    path = tmp_path / "home" / "mine.toml"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


NAMES = ["../../home/mine.toml", "/etc/passwd", "params/../../../home/mine.toml", "..", "", "a//b", "./extra.json"]


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoints_manifest_names_files_of_its_folder(name: str, tmp_path: Path, mine: Path) -> None:
    folder = checkpoint.save_checkpoint(tmp_path / "checkpoints", initial_state(CONFIG), {})
    files = json.loads((folder / checkpoint.MANIFEST).read_text())["files"]
    seal_checkpoint(folder, files=files | {name: {"size": len(SECRET), "sha256": checkpoint._sha256(mine)}})
    with pytest.raises(checkpoint.CorruptCheckpoint, match="which is not a file of this folder"):
        checkpoint.verify_checkpoint(folder)


def test_a_capsules_about_names_the_files_of_a_capsule(tmp_path: Path, mine: Path) -> None:
    path = planted_capsule(tmp_path / "capsule")
    about = json.loads((path / "about.json").read_text())
    entry = {"size": len(SECRET), "sha256": checkpoint._sha256(mine)}
    for files in (about["files"] | {"../home/mine.toml": entry}, {"config.toml": about["files"]["config.toml"]}):
        seal_capsule(path, about | {"files": files})
        with pytest.raises(UserError, match="names other files than a capsule has"):
            read_capsule(path)


@pytest.mark.parametrize("path", ["../../other", "/etc", "branches/../..", "branches/x", "branches/001/../../.."])
def test_a_branch_lies_in_its_run(path: str, tmp_path: Path) -> None:
    RunDir.create(tmp_path / "run", CONFIG, {"branches": [{"path": path, "from_step": 0}]}).close()
    with pytest.raises(UserError, match="which is no folder of a branch"):
        RunBranch(RunDir.open(tmp_path / "run"), 1)


@pytest.mark.parametrize("name", ["../x", "a/b", "/etc/x", "..", ".x", "a b", "x" * 201, "x\n"])
def test_the_name_of_a_run_is_that_of_a_folder(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(f"name = {json.dumps(name)}\n")
    assert cli.run(["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "runs")]) == 2
    assert "name = " in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_names_of_tensors_are_none_of_folders(tmp_path: Path) -> None:
    folder = checkpoint.save_checkpoint(tmp_path / "checkpoints", initial_state(CONFIG), {})
    params = load_file(folder / "params.safetensors")
    offsets = {"saved_offsets": [0]}
    for name in ("params/../../x", "../x/y", "par.ams/x", "params/", "x"):
        metadata = {"DCP_SHARDING_INFO": json.dumps({name: offsets})}
        save_file({name: np.zeros(3, np.float32)}, folder / "params.safetensors", metadata=metadata)
        seal_checkpoint(folder)
        with pytest.raises(checkpoint.CorruptCheckpoint, match="cannot be the name of"):
            checkpoint.load_checkpoint(folder)
        with pytest.raises(ValueError):
            Stored(folder)
    save_file({"../../x": np.zeros(3, np.float32), **params}, folder / "params.safetensors")
    seal_checkpoint(folder)
    with pytest.raises(checkpoint.CorruptCheckpoint, match="cannot be the name of a parameter"):
        checkpoint.load_checkpoint(folder)


# Data folders


@pytest.fixture
def data(tokens: Path, tmp_path: Path) -> Path:
    shutil.copytree(tokens, tmp_path / "data")
    return tmp_path / "data"


SHARDS = ["../home/mine.toml", "/etc/passwd", "train_00000.bin/../../home/mine.toml", "mine.toml", "", 7]


@pytest.mark.parametrize("name", SHARDS, ids=repr)
def test_a_data_folders_index_and_plan_name_its_shards(
    name: object, data: Path, text: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Preparing removes what the index names and is damaged, and writes what the plan names."""
    again = ["data", "prepare", "--data.source", str(text), "--data.path", str(data), "--workers", "1"]
    again += ["--model.vocab-size", "300", "--data.val-fraction", "0.2"]
    assert cli.run(again) == 0
    whole = {file: (data / file).read_bytes() for file in ("index.json", "plan.json")}
    for file, indent in (("index.json", 2), ("plan.json", None)):
        content = read_sealed_json(data / file, indent=indent)
        shards = content["splits"]["train"]["shards"] if file == "index.json" else content["shards"]
        shards[0]["file"] = name
        write_sealed_json(data / file, content, indent=indent)
        if file == "index.json":
            with pytest.raises(UserError, match="is not the name of a shard"):
                TokenDataset.open(data)
        capsys.readouterr()
        assert cli.run(again) == 2
        assert "is not the name of a shard" in capsys.readouterr().err
        assert mine.read_text() == SECRET
        (data / file).write_bytes(whole[file])
    assert cli.run(again) == 0


# Links


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunDir.create(tmp_path / "run", CONFIG, {}) as made:
        made.save_checkpoint(initial_state(CONFIG), {})
    return tmp_path / "run"


LINKS = [
    "checkpoints",
    "records.jsonl",
    "parity.jsonl",
    "checkpoints.jsonl",
    "observations",
    "capsules",
    "spikes",
    "wandb",
    "branches/001",
    "damaged/001",
    "checkpoints/step_000009",
]


@pytest.mark.parametrize("name", LINKS)
def test_a_run_that_leads_out_of_its_folder_is_not_written(name: str, run: Path, tmp_path: Path, mine: Path) -> None:
    """Going on with it would prune, cut, move or append there."""
    link = run / name
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.parent.mkdir(exist_ok=True)
    is_file = name.endswith("jsonl")
    link.symlink_to(mine if is_file else mine.parent)
    with pytest.raises(UserError, match="outside the run: a run is written in its own folder alone"):
        RunDir.open(run, write=True)
    assert mine.read_text() == SECRET and os.listdir(mine.parent) == [mine.name]
    RunDir.open(run)
    link.unlink()
    inside = run / "kept"
    inside.touch() if is_file else inside.mkdir()
    link.symlink_to(os.path.relpath(inside, link.parent))
    RunDir.open(run, write=True).close()


def test_a_run_that_is_itself_reached_by_a_link_is_written(run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").symlink_to(run)
    RunDir.open(tmp_path / "elsewhere", write=True).close()


def test_a_lock_that_is_a_link_empties_nothing(run: Path, mine: Path) -> None:
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(mine)
    with pytest.raises(UserError):
        FolderLock(run)
    assert mine.read_text() == SECRET


def test_a_file_that_is_written_whole_goes_through_no_link(tmp_path: Path, mine: Path) -> None:
    """Neither through one in its place, nor through one of the name that it has until it is whole."""
    (tmp_path / "report.html").symlink_to(mine)
    (tmp_path / f".report.html.{os.getpid()}.lockstep-tmp").symlink_to(mine)
    write_atomically(tmp_path / "report.html", [b"new"])
    assert mine.read_text() == SECRET and (tmp_path / "report.html").read_bytes() == b"new"
    assert not (tmp_path / "report.html").is_symlink()


def test_a_config_that_is_a_link_tells_nothing(tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in a refusal nor in the report, which may be sent on."""
    run = fake_run.write_run(tmp_path / "run", steps=20)
    (run / "config.toml").unlink()
    (run / "config.toml").symlink_to(mine)
    with pytest.raises(UserError) as said:
        RunDir.open(run)
    assert "is a link that leads out of the run" in str(said.value) and "secret" not in str(said.value)
    page = build_report(run)
    assert "secret" not in page and "is a link that leads out of the run" in page


def test_a_base_tells_the_names_of_its_keys_at_most(tmp_path: Path, mine: Path) -> None:
    from lockstep.core.config.file import load_config

    (tmp_path / "run.toml").write_text('base = "home/mine.toml"\n')
    with pytest.raises(UserError) as said:
        load_config(tmp_path / "run.toml")
    assert "registry.token is not a setting" in str(said.value) and "secret" not in str(said.value)
    mine.write_text("root:x:very secret:0\n")
    with pytest.raises(UserError) as said:
        load_config(tmp_path / "run.toml")
    assert "secret" not in str(said.value)


# Pipes and devices, which a copy of a folder can bring


@pytest.mark.parametrize("name", ["run.json", "records.jsonl", "checkpoints/step_000000/manifest.json"])
@pytest.mark.parametrize("to", ["pipe", "/dev/zero"])
def test_what_is_no_file_is_not_waited_for(name: str, to: str, run: Path, tmp_path: Path) -> None:
    path = run / name
    path.unlink(missing_ok=True)
    if to == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(to)
    with pytest.raises(UserError):
        made = RunDir.open(run)
        made.records()
        made.last_intact(print)


@pytest.mark.parametrize("name", ["tokenizer.json", "train_00000.bin", "index.json"])
def test_nor_in_a_data_folder(name: str, data: Path) -> None:
    (data / name).unlink()
    os.mkfifo(data / name)
    with pytest.raises(UserError):
        TokenDataset.open(data)


def test_nor_in_a_capsule(tmp_path: Path) -> None:
    path = planted_capsule(tmp_path / "capsule")
    (path / "stage.npz").unlink()
    os.mkfifo(path / "stage.npz")
    with pytest.raises(UserError, match="it is no file"):
        read_capsule(path)
