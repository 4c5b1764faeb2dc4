"""A rank is killed, torchrun starts all of them anew, and the run ends as one that nobody disturbed; several nodes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.core.errors import UserError
from lockstep.core.run.directory import RunDir
from lockstep.core.run.launch import launch_id, restarts
from lockstep.parity_tests.cli.workspace import REPO, Done, last_weights, trained
from lockstep.parity_tests.ranks import harness, mortal
from lockstep.parity_tests.ranks.sharded import sharded
from lockstep.scripts import cli
from lockstep.scripts.studies.tiny_workspace import write_workspace
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.ranks import peer_session

SETTINGS = ("--train.steps", "8", "--train.batch-size", "8", "--optim.warmup-steps", "1", "--checkpoint.every", "3")
SHARDED = ("--parallel.strategy", "fsdp")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = write_workspace(tmp_path_factory.mktemp("restarts"))
    assert cli.run(["data", "prepare", str(file)]) == 0
    return file


def agent(
    folder: Path, *arguments: str, ranks: int = 2, options: tuple[str, ...] = ("--standalone",)
) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node", str(ranks)]
    environment = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen(
        [*command, "-m", "lockstep", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> Done:
    out, err = process.communicate(timeout=120)
    return Done(process.returncode, out, err)


def train(folder: Path, run_file: Path, *more: str, restarted: int = 3, ranks: int = 2) -> Done:
    options = ("--standalone", "--max-restarts", str(restarted))
    command = ("train", str(run_file), "--train.ranks", str(ranks), *SETTINGS, *more)
    return ended(agent(folder, *command, ranks=ranks, options=options))


@pytest.fixture(scope="module")
def undisturbed(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = train(folder, run_file)
    assert done.code == 0, done.err
    return folder / "runs/tiny"


@pytest.fixture(scope="module")
def alone(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the same run in this process."""
    folder = tmp_path_factory.mktemp("alone")
    assert cli.run(["train", str(run_file), *SETTINGS, "--out", str(folder / "runs")]) == 0
    return folder / "runs/tiny"


@pytest.mark.parametrize(
    ("backend", "step", "more"),
    [
        (mortal.KilledRankOne, 3, ()),
        (mortal.KilledRankZero, 3, SHARDED),
        (mortal.KilledBeforeACheckpoint, 0, ()),
    ],
    ids=["rank_1", "rank_0_sharded", "before_a_checkpoint"],
)
def test_the_run_ends_as_if_nobody_had_been_killed(
    backend: type[TorchBackend], step: int, more: tuple[str, ...], run_file: Path, undisturbed: Path, tmp_path: Path
) -> None:
    done = train(tmp_path, run_file, *more, "--backend", f"{backend.__module__}:{backend.__name__}")
    assert done.code == 0, done.err
    run = RunDir.open(tmp_path / "runs/tiny")
    (noted,) = run.info["restarts"]
    assert (noted["restart"], noted["step"]) == (1, step)
    assert [r["step"] for r in run.info["resumes"]] == ([step] if step else [])
    assert (f"going on from step {step} after restart 1 of this launch" in done.out) == bool(step)
    ours, theirs = trained(run.path), trained(undisturbed)
    if more:  # the norm is a sum of squares in another order, by an ulp
        ours, theirs = ([step[:4] for step in steps] for steps in (ours, theirs))
    assert ours == theirs and run.info["finished"]
    assert last_weights(run.path) == last_weights(undisturbed)


def test_one_rank_that_is_killed_is_started_anew(run_file: Path, alone: Path, tmp_path: Path) -> None:
    """The same with one process a start."""
    backend = mortal.KilledRankZero
    done = train(tmp_path, run_file, "--backend", f"{backend.__module__}:{backend.__name__}", ranks=1)
    assert done.code == 0, done.err
    run = RunDir.open(tmp_path / "runs/tiny")
    (noted,) = run.info["restarts"]
    assert (noted["restart"], noted["step"]) == (1, 3)
    assert "going on from step 3 after restart 1 of this launch" in done.out
    assert trained(run.path) == trained(alone) and run.info["finished"]
    assert last_weights(run.path) == last_weights(alone)


def test_a_run_of_another_launch_is_not_touched(run_file: Path, undisturbed: Path) -> None:
    """The first start refuses it, and so do those that follow."""
    before = (undisturbed / "run.json").read_bytes()
    done = train(undisturbed.parents[1], run_file, restarted=1)
    assert done.code == 1
    said = [line for line in done.err.splitlines() if line.startswith("lockstep: ")]
    assert (
        said
        == ["lockstep: runs/tiny holds a run already: --overwrite replaces it, --resume runs/tiny goes on with it"] * 2
    )
    assert (undisturbed / "run.json").read_bytes() == before


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def nodes(folder: Path, port: int, count: str, *arguments: str) -> list[subprocess.Popen[str]]:
    """Two agents on this machine, each as torchrun on a node."""
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job1")
    options = ("--nnodes", count, *where, "--local-addr", "127.0.0.1", "--max-restarts", "2")
    return [agent(folder, *arguments, ranks=1, options=options) for _ in range(2)]


def test_two_nodes_are_two_ranks(run_file: Path, undisturbed: Path, tmp_path: Path) -> None:
    arguments = ("train", str(run_file), "--train.ranks", "2", *SETTINGS, *SHARDED)
    done = [ended(process) for process in nodes(tmp_path, free_port(), "2", *arguments)]
    assert [one.code for one in done] == [0, 0], done[0].err + done[1].err
    assert sorted(len(one.out.splitlines()) > 1 for one in done) == [False, True], (
        "one rank tells, the other where it is"
    )
    assert last_weights(tmp_path / "runs/tiny") == last_weights(undisturbed)
    assert RunDir.open(tmp_path / "runs/tiny").info["launch"] == "job1"


def test_a_launch_without_a_name_is_refused_after_a_restart(
    run_file: Path, alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(alone.parents[1])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert (launch_id(), restarts()) == (None, 1)
    assert cli.run(["train", str(run_file), *SETTINGS]) == 2
    assert "give torchrun an --rdzv-id" in capsys.readouterr().err


def test_fewer_ranks_go_on_if_the_batch_divides(
    run_file: Path,
    undisturbed: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "runs/tiny"
    shutil.copytree(undisturbed, run)
    shutil.rmtree(run / "checkpoints/step_000008")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", RunDir.open(run).info["launch"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    arguments = ["train", str(run_file), "--train.ranks", "2", *SETTINGS]
    assert cli.run(arguments) == 2
    assert "8 sequences are not a multiple of ranks × micro_batch_size = 3 × 2" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert cli.run(arguments) == 0
    info = RunDir.open(run).info
    assert info["resumes"][-1]["settings"] == {"train.ranks": "1"} and info["restarts"][-1]["step"] == 6
    # Once more, as Slurm queues a job again: nothing is left to do.
    assert cli.run(arguments) == 0
    assert "all steps are done" in capsys.readouterr().out


# The nodes' checkpoints


@pytest.mark.usefixtures("in_one_process")
def test_ranks_must_see_the_run_and_run_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = TorchBackend().open(sharded())
    assert isinstance(session, harness.RankedSession)
    session.require_shared(tmp_path)
    assert list(tmp_path.iterdir()) == []

    @contextmanager
    def elsewhere(folder: Path) -> Iterator[str]:
        yield "what another machine has"

    with monkeypatch.context() as other:
        other.setattr(peer_session, "token", elsewhere)
        with pytest.raises(
            UserError, match=r"rank 1 on .* does not see .*: all nodes must have this folder at the same path"
        ):
            session.require_shared(tmp_path)
    monkeypatch.setattr("lockstep.torch_backend.ranks.node_check._fingerprint", lambda version: "changed")
    with pytest.raises(
        UserError, match=r"rank 1 on .* does not run the same software as rank 0 on .*: torch .* and Lockstep"
    ):
        session.require_shared(tmp_path)
    session.close()
