"""`lockstep train` under torchrun: rank 0 is the run, the others serve it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.errors import UserError
from lockstep.core.files.jsonl import read_lines
from lockstep.core.run.launch import launched, require_ranks
from lockstep.parity_tests.cli.workspace import REPO, Done, last_weights, trained, write_workspace
from lockstep.scripts import cli

RANKS = ("--train.ranks", "2", "--train.steps", "3", "--train.batch-size", "8", "--optim.warmup-steps", "1")
# Rounding of sums in another order, after three steps.
WITHIN = 1e-5


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    file = write_workspace(folder)
    assert cli.run(["data", "prepare", str(file)]) == 0
    return file


def torchrun(folder: Path, *arguments: str) -> Done:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "lockstep", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def test_two_ranks_train_as_one(run_file: Path, tmp_path: Path) -> None:
    done = torchrun(tmp_path, "train", str(run_file), *RANKS)
    assert done.code == 0, done.err
    assert cli.run(["train", str(run_file), *RANKS, "--train.ranks", "1", "--out", str(tmp_path / "one")]) == 0
    two, one = (read_lines(tmp_path / folder / "tiny/records.jsonl") for folder in ("runs", "one"))
    assert [r["step"] for r in two] == [1, 2, 3]
    for ours, theirs in zip(two, one, strict=True):
        exact = ("step", "digest", "lr", "loss_weight", "tokens")
        assert {key: ours[key] for key in exact} == {key: theirs[key] for key in exact}
        for key in ("loss", "grad_norm", "clip_coefficient"):
            assert ours[key] == pytest.approx(theirs[key], rel=WITHIN), key
    said = done.out.splitlines()
    assert len([line for line in said if line.startswith("rank 1 of 2: pid ")]) == 1
    assert len([line for line in said if line.startswith("step 3/3")]) == 1
    written: list[Any] = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert written == ["tiny"]


def test_deterministic_ranks_stopped_in_the_midst_of_the_warm_up_end_with_the_same_bits(
    run_file: Path, tmp_path: Path
) -> None:
    settings = (
        "--deterministic",
        "true",
        "--optim.warmup-steps",
        "2",
        "--checkpoint.every",
        "1",
        "--checkpoint.keep",
        "3",
    )
    done = torchrun(tmp_path, "train", str(run_file), *RANKS, *settings)
    assert done.code == 0, done.err
    assert "× the time of a step (measured: " in done.out
    run = tmp_path / "runs/tiny"
    weights, steps = last_weights(run), trained(run)
    for checkpoint in sorted((run / "checkpoints").iterdir())[1:]:
        shutil.rmtree(checkpoint)
    done = torchrun(tmp_path, "train", "--resume", str(run))
    assert done.code == 0, done.err
    assert "going on from step 1" in done.out
    assert (last_weights(run), trained(run)) == (weights, steps)


def test_a_launch_must_fit_the_settings(run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert cli.run(["train", str(run_file), "--train.ranks", "2", "--train.micro-batch-size", "1"]) == 2
    command = f"torchrun --nproc-per-node 2 -m lockstep train {run_file} --train.ranks 2"
    assert command in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert cli.run(["train", str(run_file)]) == 2
    assert "train.ranks = 1, but torchrun launched 2 processes" in capsys.readouterr().err


def test_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched() is None
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert launched() == (3, 4)
    require_ranks(4)
    with pytest.raises(UserError, match="launched 4 processes"):
        require_ranks(2)


@pytest.mark.parametrize(
    ("world", "rank", "said"),
    [("x", "0", "WORLD_SIZE = 'x'"), ("", "0", "WORLD_SIZE = ''"), ("2", "x", "RANK = 'x'"), ("2", "2", "RANK = 2 of")],
)
def test_what_torchrun_cannot_have_said(monkeypatch: pytest.MonkeyPatch, world: str, rank: str, said: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(UserError, match=said):
        launched()


def test_who_trains_in_one_process_says_so(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert cli.run(["train", str(run_file), *RANKS, "--backend", "jax"]) == 2
    assert "jax trains in one process" in capsys.readouterr().err
