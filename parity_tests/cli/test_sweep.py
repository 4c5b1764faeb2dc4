"""`lockstep sweep`: a mistake is reported in one line before anything is written, and killed trials cost nothing."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.config.file import load_config
from lockstep.core.files.lock import FolderLock
from lockstep.core.sweep.results import RESULTS
from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.parity_tests.cli.workspace import REPO
from lockstep.parity_tests.sweep.made_up import MadeUp
from lockstep.scripts.commands import sweep as command
from lockstep.scripts.studies import wrong_above

RATES = ("--vary", "optim.peak-lr=1e-3,3e-3")

BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "nothing varied": ((), "the search space is empty: say what to vary, as in --vary optim.peak-lr="),
    "no such setting": (("--vary", "optim.peek-lr=1,2"), "did you mean optim.peak_lr?"),
    "a rule": (
        ("--vary", "train.micro-batch-size=2,3"),
        "trial_001 (train.micro_batch_size 3): command line: train.micro_batch_size: 4 sequences are not",
    ),
    "no trials": ((*RATES, "--trials", "0"), "trials = 0: at least 1"),
    "many threads": ((*RATES, "--threads", "100000"), "threads = 100000: at most 1024"),
    "GPUs": (
        (*RATES, "--gpus", "1000"),
        "gpus = 1000: 1 trial at a time would need 1,000 GPUs, and torch finds",
    ),
    "a setting twice": ((*RATES, "--vary", "optim.peak_lr=1,2"), "optim.peak_lr is varied twice"),
    "a pruner": ((*RATES, "--pruner", "asha"), "pruner = 'asha': must be 'none', 'median' or 'hyperband'"),
    "two objectives": (
        ("--vary", "eval.every=0,4"),
        "vary: a trial with eval.every = 0 (eval.every 0) is ranked by its training loss, and one with evaluation "
        "(eval.every 4) by its validation loss",
    ),
    "a value beside": ((*RATES, "--optim.peak-lr", "1e-3"), "optim.peak_lr is varied and also given as a flag"),
    "grid": (("--vary", "optim.peak-lr=1e-3:1e-2", "--sampler", "grid"), "optim.peak_lr is a range"),
    "a large grid": (
        ("--vary", f"seed={','.join(map(str, range(40)))}", "--vary", f"data.seed={','.join(map(str, range(40)))}"),
        "the grid has 1,600 points: at most 1,000",
    ),
    "widths": ((*RATES, "--widths", "64,100"), "at width 100 model.heads would be 4 × 100 / 64, which is not whole"),
    "jobs": ((*RATES, "--jobs", "-1"), "jobs = -1: at least 0"),
    "an engine": ((*RATES, "--engine", "slurm"), "engine = 'slurm': must be 'local' or 'ray'"),
    "an address": ((*RATES, "--ray-address", "auto"), "ray_address: only with --engine ray"),
    "no Ray there": (
        (*RATES, "--engine", "ray", "--ray-address", "127.0.0.1:1"),
        "cannot reach Ray at 127.0.0.1:1: Connection refused",
    ),
    "no such backend": ((*RATES, "--backend", "nowhere.py:Mine"), "no such file: nowhere.py"),
    "no module of a backend": ((*RATES, "--backend", "no_such:Mine"), "no_such:Mine: there is no module no_such"),
    "no data": (
        (*RATES, "--data.path", "nowhere"),
        "nowhere holds no prepared data; make it with: lockstep data prepare",
    ),
    "no data of a trial": (
        ("--vary", "data.path=nowhere,there", "--vary", "seed=1,2"),
        "--data.path nowhere",
    ),
    "a link to nothing": ((*RATES, "--out", "link"), "link is a file, not a folder for a sweep"),
    "a file": ((*RATES, "--out", "tiny.txt"), "tiny.txt is a file, not a folder for a sweep"),
    "below a file": ((*RATES, "--out", "tiny.txt/sweep"), "cannot make tiny.txt/sweep: Not a directory"),
    "a folder that is read alone": ((*RATES, "--out", "/proc/sweep"), "cannot make /proc/sweep: "),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_wrong_is_said_in_one_line(kind: str, refused: Callable[..., str], run_file: Path, here: Path) -> None:
    words, said = BAD[kind]
    (here / "tiny.txt").write_text("mine")
    (here / "link").symlink_to("nothing")
    assert said in refused("sweep", run_file, *words)


def test_a_folder_that_is_a_mounted_disk_is_refused(
    refused: Callable[..., str], run_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    (here / "disk").mkdir()
    monkeypatch.setattr(Path, "rmdir", busy)
    said = refused("sweep", run_file, *RATES, "--out", "disk")
    assert said == "cannot make disk anew: Device or resource busy; name a folder below it (--out disk/NAME)"


@pytest.mark.parametrize(
    ("name", "make", "said"),
    [
        ("trials", Path.touch, "is a file, and the sweep has a folder there; remove it"),
        ("logs", Path.touch, "is a file, and the sweep has a folder there; remove it"),
        ("sweep.html", Path.mkdir, "is not a file, and the sweep writes one there; remove it"),
        ("results.json", Path.mkdir, "is not a file, and the sweep writes one there; remove it"),
    ],
)
def test_what_stands_in_the_way_is_found_before_the_first_trial(
    name: str,
    make: Callable[[Path], None],
    said: str,
    lockstep: Lockstep,
    refused: Callable[..., str],
    run_file: Path,
    made_up: MadeUp,
    here: Path,
) -> None:
    made_up.stop_after = 0
    assert lockstep("sweep", run_file, *RATES).code == 130
    path = here / "sweeps" / "tiny" / name
    path.unlink(missing_ok=True)
    make(path)
    assert refused("sweep", run_file, *RATES) == f"sweeps/tiny/{name} {said}"


def test_two_sweeps_in_one_folder_at_once_are_refused(
    lockstep: Lockstep, refused: Callable[..., str], run_file: Path, made_up: MadeUp, here: Path
) -> None:
    made_up.stop_after = 0
    assert lockstep("sweep", run_file, *RATES).code == 130
    with FolderLock(here / "sweeps" / "tiny"):
        assert "sweeps/tiny is being written by another process" in refused("sweep", run_file, *RATES)


def test_a_library_that_is_missing_is_named(
    refused: Callable[..., str], run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "ray" else True)
    assert refused("sweep", run_file, *RATES, "--engine", "ray") == (
        "sweep --engine ray: missing packages: ray[tune]; install them with: pip install ray[tune]; "
        "--engine local needs no Ray"
    )
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert (
        refused("sweep", run_file, *RATES) == "sweep: missing packages: optuna; install them with: pip install optuna"
    )


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    """Stand for the engine: runs are written at once."""
    engine = MadeUp()
    monkeypatch.setattr(command, "_engine", lambda options, folder: engine)
    return engine


def test_a_sweep_is_ranked_and_goes_on(lockstep: Lockstep, run_file: Path, made_up: MadeUp, here: Path) -> None:
    words = ("sweep", run_file, *RATES, "--eval.every", "4")
    made_up.stop_after = 1
    stopped = lockstep(*words)
    assert stopped.code == 130 and "stopped; the same command continues sweeps/tiny" in stopped.out
    made_up.stop_after = 99
    done = lockstep(*words)
    assert (done.code, done.err) == (0, "") and made_up.made == ["trial_000", "trial_001"]
    line = "lockstep train sweeps/tiny/config.toml --name trial_001 --out sweeps/tiny/trials --optim.peak-lr=3e-3"
    assert f"best: 4.0010, trial_001: {line}" in done.out and f"trial_001: {line}" in done.out
    results = json.loads((here / "sweeps/tiny" / RESULTS).read_text())
    assert [trial["state"] for trial in results["trials"]] == ["complete"] * 2
    assert results["arms"][0]["best"] == "trial_001"
    other = lockstep("sweep", run_file, "--vary", "optim.peak-lr=1e-3,4e-3", "--eval.every", "4")
    assert other.code == 2 and "sweeps/tiny holds another sweep: vary was" in other.err
    # The printed line is one that a user can run: its configuration is the trial's.
    config = load_config(here / "sweeps/tiny/config.toml", {"optim.peak_lr": "3e-3", "name": "trial_001"})
    assert load_config(here / "sweeps/tiny/trials/trial_001/config.toml") == config


def test_a_marked_trial_ends_the_command_with_1(lockstep: Lockstep, run_file: Path, made_up: MadeUp) -> None:
    made_up.wrong = lambda config: config.optim.peak_lr == 3e-3
    done = lockstep("sweep", run_file, *RATES, "--parity.every", "6")
    assert done.code == 1 and "best: 4.1217, trial_000" in done.out
    assert "trial_001: marked: the parity checks of step 1, 6, 12 disagreed" in done.out


def test_a_sweep_without_a_winner_could_not(lockstep: Lockstep, run_file: Path, made_up: MadeUp) -> None:
    made_up.failing = lambda config: "step 3: the loss is not finite"
    done = lockstep("sweep", run_file, *RATES)
    assert done.code == 2 and "no trial of sweeps/tiny finished without a check that disagreed" in done.err
    assert "trial_000: failed: step 3: the loss is not finite" in done.out


def test_a_ranking_fits_80_columns(
    lockstep: Lockstep, run_file: Path, made_up: MadeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = lockstep("sweep", run_file, *RATES, "--vary", "optim.embedding-weight-decay=0.001,0.1", "--out", "x")
    table = done.out[done.out.index("Ranking: ") : done.out.index("best: ")]
    assert all(len(line) <= 80 for line in table.splitlines()) and "embedding_weight_decay" in table


# Real trials


def _values(folder: Path) -> list[Any]:
    found = json.loads((folder / RESULTS).read_text())["trials"]
    return [[trial[key] for key in ("trial", "settings", "state", "value", "reports")] for trial in found]


def _kill_trials(folder: Path, step: int, killed: list[int], over: threading.Event) -> None:
    """Kill the first two processes that train, each once it has recorded `step` steps."""
    while not over.is_set() and len(killed) < 2:
        for run in sorted((folder / "trials").glob("trial_*")):
            records, lock = run / "records.jsonl", run / ".lock"
            if records.exists() and records.read_bytes().count(b"\n") >= step and len(killed) < 2:
                pid = int(lock.read_text() or 0)
                if pid and pid not in killed and f"{run.name}" not in map(str, killed):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                    step += 2
        time.sleep(0.01)


SMALL = ("--train.steps", "8", "--eval.every", "2", "--checkpoint.every", "2", "--optim.warmup-steps", "2")


def test_killed_trials_and_a_killed_sweep_give_the_same_results(
    lockstep: Lockstep, run_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    words = ("sweep", str(run_file), "--vary", "optim.peak-lr=1e-3:1e-1:log", "--trials", "3", "--threads", "1", *SMALL)
    assert lockstep(*words, "--out", "whole").code == 0
    killed: list[int] = []
    over = threading.Event()
    killing = threading.Thread(target=_kill_trials, args=(here / "harmed", 3, killed, over))
    killing.start()
    process = subprocess.Popen([sys.executable, "-m", "lockstep", *words, "--jobs", "2", "--out", "harmed"], cwd=here)
    try:
        killing.join(300)
    finally:
        over.set()
        process.kill()
        process.wait()
    assert len(killed) == 2
    assert lockstep(*words, "--jobs", "2", "--out", "harmed").code == 0
    assert _values(here / "harmed") == _values(here / "whole")


def test_a_fault_in_one_region_never_wins(
    lockstep: Lockstep, run_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    backend = f"{Path(wrong_above.__file__)}:WrongAbove"
    words = ("--parity.every", "8", "--backend", backend, "--threads", "1", *SMALL)
    done = lockstep("sweep", run_file, "--vary", "optim.peak-lr=1e-3,1e-2", *words)
    first, second = json.loads((here / "sweeps/tiny" / RESULTS).read_text())["trials"]
    assert done.code == 1 and (first["state"], second["state"]) == ("complete", "marked")
    assert second["value"] < first["value"] and "best: " in done.out and ", trial_000: " in done.out


def test_ray_gives_the_same_results(
    lockstep: Lockstep, run_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    words = ("sweep", run_file, *RATES, "--threads", "1", *SMALL)
    assert lockstep(*words, "--out", "here").code == 0
    assert lockstep(*words, "--out", "there", "--engine", "ray", "--jobs", "2").code == 0
    assert _values(here / "there") == _values(here / "here")
    assert not (here / "there" / ".ray").exists()
