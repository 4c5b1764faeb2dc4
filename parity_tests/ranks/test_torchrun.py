"""Commands on two ranks: launched by torchrun, or started by the command as torchrun starts them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.errors import UserError
from lockstep.core.files.jsonl import read_lines
from lockstep.core.run.launch import launched, require_ranks
from lockstep.parity_tests.cli.workspace import REPO, Done, last_weights, trained
from lockstep.scripts import cli
from lockstep.scripts.studies.tiny_workspace import write_workspace

# FP32: ranks and one process differ by the order of sums alone. Under bf16 an operand at a tie may round otherwise.
RANKS = (
    *("--train.ranks", "2", "--train.steps", "3", "--train.batch-size", "8", "--optim.warmup-steps", "1"),
    *("--precision.policy", "fp32"),
)


ONE_RANK = "lockstep.parity_tests.ranks.on_one_rank"


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
        # A rank that aborts prints the stacks of its threads.
        env=os.environ | {"PYTHONPATH": str(REPO), "PYTHONFAULTHANDLER": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def launched_run(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """Train with torchrun's two ranks; return the folder and their output."""
    folder = tmp_path_factory.mktemp("launched")
    return folder, torchrun(folder, "train", str(run_file), *RANKS)


def test_two_ranks_train_as_one(run_file: Path, launched_run: tuple[Path, Done]) -> None:
    tmp_path, done = launched_run
    assert done.code == 0, done.err
    assert cli.run(["train", str(run_file), *RANKS, "--train.ranks", "1", "--out", str(tmp_path / "one")]) == 0
    two, one = (read_lines(tmp_path / folder / "tiny/records.jsonl") for folder in ("runs", "one"))
    assert [r["step"] for r in two] == [1, 2, 3]
    for ours, theirs in zip(two, one, strict=True):
        exact = ("step", "digest", "lr", "loss_weight", "tokens")
        assert {key: ours[key] for key in exact} == {key: theirs[key] for key in exact}
        for key in ("loss", "grad_norm", "clip_coefficient"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), key
    said = done.out.splitlines()
    assert len([line for line in said if line.startswith("rank 1 of 2: pid ")]) == 1
    assert len([line for line in said if line.startswith("step 3/3")]) == 1
    written = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert written == ["tiny"]


def lockstep(folder: Path, *arguments: str) -> Done:
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def test_train_starts_its_ranks_itself(run_file: Path, launched_run: tuple[Path, Done], tmp_path: Path) -> None:
    done = lockstep(tmp_path, "train", str(run_file), *RANKS)
    assert done.code == 0, done.err
    assert trained(tmp_path / "runs/tiny") == trained(launched_run[0] / "runs/tiny")
    done = lockstep(tmp_path, "train", str(run_file), *RANKS)
    assert done.code == 2
    assert done.err.splitlines() == [
        "lockstep: runs/tiny holds a run already: --overwrite replaces it, --resume runs/tiny goes on with it"
    ]


def test_a_rank_that_dies_is_told_in_one_line(run_file: Path, tmp_path: Path) -> None:
    backend = "lockstep.parity_tests.ranks.candidates:DiesOnRankOne"
    done = lockstep(tmp_path, "train", str(run_file), *RANKS, "--backend", backend)
    assert done.code == 2
    said = [line for line in done.err.splitlines() if line.startswith("lockstep: ")]
    assert said == ["lockstep: rank 1: its process has ended, or the network does not reach it"]
    assert not (tmp_path / "runs/tiny").exists(), "no step was made"


CHECKED = ("--train.ranks", "2", "--train.batch-size", "8", "--steps", "1", "--reference", "torch", "--quick")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_every_rank_checks_and_rank_0_tells(strategy: str, run_file: Path, tmp_path: Path) -> None:
    settings = ("--precision.policy", "fp32", "--compile.enabled", "false", "--parallel.strategy", strategy)
    done = lockstep(tmp_path, "parity", str(run_file), *CHECKED, *settings, "--json", "verdict.json")
    assert done.code == 0, done.err
    assert done.out.count("step 1: parity agreed") == 1
    found = {line["stage"] for line in json.loads((tmp_path / "verdict.json").read_text())["stages"]}
    assert found >= {"reduction", "evaluation"}


def test_a_fault_between_ranks_gives_the_exit_code_1(run_file: Path, tmp_path: Path) -> None:
    candidate = "lockstep.parity_tests.faults.ranks:OneParameterNotReduced"
    settings = ("--precision.policy", "fp32", "--compile.enabled", "false", "--candidate", candidate)
    done = lockstep(tmp_path, "parity", str(run_file), *CHECKED, *settings)
    assert done.code == 1, done.err
    assert "reduction" in done.out and done.err == ""


@pytest.mark.parametrize(
    ("strategy", "fault", "named"),
    [
        ("ddp", "NoGradient", r"up \(backward, layer 1, at blocks\.1\.mlp\.up_proj\.weight.*\) on rank 1"),
        ("ddp", "RopeInBf16", r"q_rope \(forward, layer 0, at blocks\.0\.attn\.q_rope.*\) on rank 1"),
        ("fsdp", "RopeInBf16", r"q_rope \(forward, layer 0, at blocks\.0\.attn\.q_rope.*\) on rank 1"),
        ("fsdp", "NotUpdated", r"update \(update, layer 1, at blocks\.1\.mlp\.up.*\) rows \d+ to \d+ of rank 1 alone"),
        ("fsdp", "GradientsDoubled", r"reduction \(backward, layer 1, .*\) rows \d+ to \d+ of rank 1 alone"),
        ("fsdp", "OldGradientsMixedIn", r"moments \(update, at the step after, at once, .*\) .* on rank 1"),
        ("fsdp", "PeakRateAfterWarmUp", r"update \(update, at embed\.weight/\d+, .*\)"),
        ("ddp", "PeakRateAfterWarmUp", r"update \(update, at later steps, on every rank, .*\) .* on rank 1"),
        ("ddp", "DoubledAfterWarmUp", r"reduction \(.* at later steps, on every rank, .*\) .* on rank 1"),
        ("fsdp", "LastCheckpointInBf16", r"checkpoint \(.* at the checkpoint of the last step, .*\) .* on rank 1"),
        (
            "ddp",
            "PeakRateOnceWritten",
            r"update \(update, at the step after, while a checkpoint is written, .*\) .* on rank 1",
        ),
        (
            "fsdp",
            "PeakRateOnceWritten",
            r"update \(update, at the step after, while a checkpoint is written, .*\) .* on rank 1",
        ),
        (
            "ddp",
            "RestoreResetsBetas",
            r"moments \(update, at the step after, from a checkpoint that was restored, .*\) .* on rank 1",
        ),
        (
            "fsdp",
            "RestoreResetsBetas",
            r"moments \(update, at the step after, from a checkpoint that was restored, .*\) .* on rank 1",
        ),
        ("ddp", "DecaysWhenNotFinite", r"update \(update, at a step that is not finite, .*\) .* on rank 1"),
        ("fsdp", "DecaysWhenNotFinite", r"update \(update, at a step that is not finite, .*\) .* on rank 1"),
    ],
    ids=[
        "no-gradient-ddp",
        "rope-ddp",
        "rope-fsdp",
        "not-updated-fsdp",
        "doubled-fsdp",
        "old-gradients-fsdp",
        "peak-rate-fsdp",
        "peak-rate-ddp",
        "doubled-later-ddp",
        "last-checkpoint-fsdp",
        "once-written-ddp",
        "once-written-fsdp",
        "restored-ddp",
        "restored-fsdp",
        "not-finite-ddp",
        "not-finite-fsdp",
    ],
)
def test_a_fault_of_one_rank_is_named_with_its_rank(
    strategy: str, fault: str, named: str, run_file: Path, tmp_path: Path
) -> None:
    candidate = f"{ONE_RANK}:{fault}OnRankOne"
    settings = ("--precision.policy", "fp32", "--compile.enabled", "false", "--parallel.strategy", strategy)
    done = lockstep(tmp_path, "parity", str(run_file), *CHECKED, *settings, "--candidate", candidate)
    assert done.code == 1, done.err
    (said,) = [line for line in done.out.splitlines() if line.startswith("first bad step 1; origin: ")]
    assert re.search(named, said), said


@pytest.mark.parametrize(
    ("backend", "code"), [("torch", 0), (f"{ONE_RANK}:NotUpdatedOnRankOne", 1)], ids=["honest", "planted"]
)
def test_each_rank_keeps_its_rows_of_a_training_runs_evidence(
    backend: str, code: int, run_file: Path, tmp_path: Path
) -> None:
    """The worker of rank 0 judges what both have written, and a capsule holds the files of both."""
    settings = ("--compile.enabled", "false", "--parallel.strategy", "fsdp", "--parity.every", "2", "--eval.every", "2")
    done = lockstep(tmp_path, "train", str(run_file), *RANKS, *settings, "--backend", backend)
    assert done.code == code, done.err
    run = tmp_path / "runs/tiny"
    assert not (run / "evidence").exists()
    assert (f"parity {2 - 2 * code}/2 agreed" in done.out) and (run / "capsules").exists() == bool(code)
    if code:
        assert len(re.findall(r"step \d: update .* rows \d+ to \d+ of rank 1 alone; packed in", done.out)) == 2
        packed = run / "capsules/step_000002"
        assert (packed / "evidence/rank-1.blocks.1.safetensors").is_file()
        again = lockstep(tmp_path, "replay", str(packed))
        assert again.code == 1 and "the verdict is the one that was packed" in again.out


@pytest.mark.parametrize(
    ("strategy", "backend", "wrong"),
    [
        ("ddp", "torch", set()),
        ("fsdp", "torch", set()),
        ("ddp", "FirstTokensLeftOutOfTheMean", {"val/loss"}),
        ("fsdp", "NllScaledInEvaluation", {"nll", "validation/nll"}),
    ],
    ids=["honest-ddp", "honest-fsdp", "mean-ddp", "scaled-fsdp"],
)
def test_validation_over_ranks_is_judged(
    strategy: str, backend: str, wrong: set[str], run_file: Path, tmp_path: Path
) -> None:
    settings = ("--compile.enabled", "false", "--parallel.strategy", strategy, "--parity.every", "3")
    validation = ("--eval.every", "3", "--eval.batches", "2")
    name = f"lockstep.parity_tests.faults.evaluation:{backend}" if wrong else backend
    done = lockstep(tmp_path, "train", str(run_file), *RANKS, *settings, *validation, "--backend", name)
    assert done.code == int(bool(wrong)), done.err
    (checked,) = [line for line in read_lines(tmp_path / "runs/tiny/parity.jsonl") if line["step"] == 3]
    found = {stage["tap"]: stage["ok"] for stage in checked["stages"] if stage["stage"] == "evaluation"}
    assert found.keys() >= {"nll", "validation/nll", "val/loss", "val/top1"}
    assert {tap for tap, ok in found.items() if not ok} == wrong


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
