"""A trial's process: begun, gone on with after a kill, stopped by the pruner, waited for if it is another sweep's."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.core.errors import UserError
from lockstep.core.files.jsonl import sealed_line
from lockstep.core.files.lock import FolderLock
from lockstep.core.run.directory import RunDir
from lockstep.core.sweep import ray_engine, trial
from lockstep.core.sweep.local import VISIBLE, Local
from lockstep.core.sweep.prune import Earlier, Rule
from lockstep.core.sweep.trial import RESTARTS, End, Job, Records, supervise
from lockstep.parity_tests.sweep.made_up import CONFIG

RULE = Rule("none", CONFIG.train.steps, 2, 2, 0)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    run, log = str(tmp_path / "run"), str(tmp_path / "logs" / "run.txt")
    return Job("run", run, log, ("train", "config.toml"), ("train", "--resume", run), RULE, True, str(tmp_path))


def _run(job: Job, checkpoint: bool = False, finished: bool = False) -> None:
    with RunDir.create(Path(job.run), CONFIG, {}, overwrite=True) as run:
        if checkpoint:
            run.checkpoint_of(4).mkdir()
        if finished:
            run.finish()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Sequence[str]]]:
    """Stand for processes: what each does, in order, and its exit code. Returns the words of each."""

    def play(*acts: tuple[Callable[[], None], int]) -> list[Sequence[str]]:
        words: list[Sequence[str]] = []

        def train(job: Job, given: Sequence[str], stop: Callable[[], bool]) -> tuple[int, bool]:
            act, code = acts[min(len(words), len(acts) - 1)]
            words.append(given)
            act()
            return code, False

        monkeypatch.setattr(trial, "_train", train)
        return words

    return play


def nothing() -> None:
    """Do nothing."""


def never() -> bool:
    """Return that the sweep goes on."""
    return False


def test_a_killed_trial_goes_on_from_its_checkpoint(job: Job, script: Callable[..., list[Sequence[str]]]) -> None:
    words = script(
        (lambda: _run(job), -9), (lambda: _run(job, checkpoint=True), -9), (lambda: _run(job, finished=True), 0)
    )
    assert supervise(job, never) == End(restarts=2)
    assert words == [job.words, (*job.words, "--overwrite"), job.resume]


def test_one_that_is_killed_again_and_again_is_given_up(job: Job, script: Callable[..., list[Sequence[str]]]) -> None:
    words = script((nothing, -9))
    assert supervise(job, never).failure == f"its process was killed {RESTARTS + 1} times (the last time: SIGKILL)"
    assert len(words) == RESTARTS + 1


def test_one_that_cannot_go_on_says_why(job: Job, script: Callable[..., list[Sequence[str]]]) -> None:
    Path(job.log).parent.mkdir()
    Path(job.log).write_text("lockstep: before\nstep 3\nlockstep: step 3: the loss is not finite\n")
    words = script((nothing, 2))
    assert supervise(job, never) == End(failure="step 3: the loss is not finite") and len(words) == 1


def test_one_whose_run_was_taken_meanwhile_is_waited_for(job: Job, script: Callable[..., list[Sequence[str]]]) -> None:
    """A process of an earlier sweep was still loading, and had no lock yet, when this one looked."""
    Path(job.log).parent.mkdir()

    def taken() -> None:
        _run(job, checkpoint=True)
        Path(job.log).write_text(f"lockstep: {job.run} is being written by another process (pid 7)\n")

    words = script((taken, 2), (lambda: _run(job, finished=True), 0))
    assert supervise(job, never) == End(restarts=1) and words == [job.words, job.resume]


def test_a_run_that_an_alarm_stopped_does_not_go_on(job: Job, script: Callable[..., list[Sequence[str]]]) -> None:
    script((lambda: _run(job), 1))
    assert supervise(job, never).failure == "a parity check disagreed, and the run stopped"


def test_a_trial_is_found_from_any_folder(
    job: Job, script: Callable[..., list[Sequence[str]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A worker of Ray runs in the folder that its machine's Ray was started in."""
    words = script((nothing, 0))
    _run(job, finished=True)
    with RunDir.open(Path(job.run), write=True) as run:
        run._records.append({"step": CONFIG.train.steps, "loss": 4.0, "metrics": {"val/loss": 4.0}})  # type: ignore[union-attr]
    above = Path(job.run).parent
    elsewhere = replace(job, run=Path(job.run).name, log="log.txt", folder=str(above))
    with contextlib.chdir(tmp_path_factory.mktemp("elsewhere")):
        assert supervise(elsewhere, never) == End() and words == []
        assert not list(Path().iterdir())


def test_a_finished_trial_is_left_alone(job: Job, script: Callable[..., list[Sequence[str]]]) -> None:
    words = script((nothing, 0))
    _run(job, finished=True)
    with RunDir.open(Path(job.run), write=True) as run:
        run._records.append({"step": CONFIG.train.steps, "loss": 4.0, "metrics": {"val/loss": 4.0}})  # type: ignore[union-attr]
    assert supervise(job, never) == End() and words == []


def test_a_process_of_an_earlier_sweep_is_waited_for(job: Job, script: Callable[..., list[Sequence[str]]]) -> None:
    _run(job, checkpoint=True)
    words = script((lambda: _run(job, finished=True), 0))
    held = FolderLock(Path(job.run))
    asked = []

    def stop() -> bool:
        asked.append(len(words))
        if len(asked) == 2:
            held.release()
        return False

    assert supervise(job, stop) == End() and asked[:2] == [0, 0] and words == [job.resume]
    with FolderLock(Path(job.run)):
        assert supervise(job, lambda: True) == End(stopped=True)


# Processes

# It writes once it listens: a test that waits for a line of it signals it no earlier.
WAITS = """#!/bin/sh
trap 'exit 130' TERM
echo "$OMP_NUM_THREADS $*"
if [ -n "$RECORD" ]; then printf '%s' "$RECORD" >> "$RECORDS"; fi
while true; do sleep 0.02; done
"""


@pytest.fixture
def waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a script that waits for SIGTERM in the place of Python."""
    (tmp_path / "python").write_text(WAITS)
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(trial, "POLL_SECONDS", 0.02)


def test_a_trial_that_falls_behind_is_stopped(job: Job, waits: None) -> None:
    earlier = tuple(Earlier("complete", 4.0, {10: 4.0}) for _ in range(4))
    rule = Rule("median", 20, 2, 2, 4, earlier)
    _run(job)
    records = Path(job.run) / "records.jsonl"
    records.unlink()
    line = sealed_line({"step": 10, "loss": 5.0, "metrics": {"val/loss": 5.0}}).decode()
    behind = replace(job, rule=rule, environment={"RECORD": line, "RECORDS": str(records)})
    assert trial._train(behind, job.words, never) == (130, True)
    # Its records remain: a process that goes on with it is stopped at once, maybe before it listens.
    resumed = replace(job, rule=rule)
    code, given_up = trial._train(resumed, job.resume, never)
    assert given_up and code in (130, -signal.SIGTERM)


def test_the_sweeps_end_stops_a_trial(job: Job, waits: None) -> None:
    job = replace(job, environment={"OMP_NUM_THREADS": "3"})
    assert supervise(job, lambda: Path(job.log).exists() and "3 -m" in Path(job.log).read_text()) == End(stopped=True)
    assert Path(job.log).read_text() == "$ lockstep train config.toml\n3 -m lockstep train config.toml\n"


def test_an_interrupt_stops_all_trials(job: Job, waits: None, tmp_path: Path) -> None:
    ended: list[str] = []
    jobs = [replace(job, name=name, log=str(tmp_path / name), run=str(tmp_path / f"run_{name}")) for name in "abc"]

    def tick() -> None:
        if all((tmp_path / name).exists() and "-m" in (tmp_path / name).read_text() for name in "ab"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Local(2).run(jobs, lambda job, end: ended.append(job.name), tick)
    assert ended == [] and not (tmp_path / "c").exists()
    assert threading.active_count() < 20 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_records_are_read_on_and_anew_when_a_resume_cuts_them(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records = Records(path)
    assert not records.update()
    path.write_bytes(sealed_line({"step": 1}) + sealed_line({"step": 2})[:9])
    assert records.update() and list(records.lines) == [1] and not records.update()
    with path.open("ab") as file:
        file.write(sealed_line({"step": 2})[9:] + b"no record\n")
    assert records.update() and list(records.lines) == [1, 2]
    path.write_bytes(sealed_line({"step": 1}))
    assert records.update() and list(records.lines) == [1]


def test_each_of_several_jobs_has_gpus_of_its_own(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    assert Local(4, 2)._placed(job, 1).environment == {VISIBLE: "2,3"}
    monkeypatch.setenv(VISIBLE, "4,5,6,7")
    assert Local(2, 2)._placed(job, 1).environment == {VISIBLE: "6,7"}
    assert Local(2)._placed(job, 1) is job


# Ray


@pytest.mark.parametrize(("address", "niceness"), [("", "0"), ("auto", None)])
def test_ray_starts_with_workers_of_usual_priority_and_leaves_sigterm(
    address: str, niceness: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of Ray have a low priority otherwise, and its handler of SIGTERM prints a stack."""
    name = "RAY_worker_niceness"
    monkeypatch.setenv(name, "")  # so that the test's end takes it back
    monkeypatch.delenv(name)
    seen = []

    def init(**given: object) -> None:
        seen.append(os.environ.get(name))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        cluster = SimpleNamespace(init=init, cluster_resources=lambda: {"CPU": 2.0})
        monkeypatch.setitem(sys.modules, "ray", cluster)
        ray_engine.OnRay(Path(), address=address).start()
        assert seen == [niceness] and signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_ray_reports_is_how_a_trial_ended() -> None:
    end = End(failure="step 3: the loss is not finite", restarts=2)
    assert ray_engine._end(SimpleNamespace(metrics={"end": asdict(end)}, error=None)) == end
    lost = ray_engine._end(SimpleNamespace(metrics={}, error=RuntimeError("the node\ndied")))
    assert lost.failure == "Ray gave it up: died"


def test_a_cluster_without_room_is_refused() -> None:
    cluster = SimpleNamespace(cluster_resources=lambda: {"CPU": 2.0})
    ray_engine.OnRay(Path(), cpus=2)._require_room(cluster)
    with pytest.raises(UserError, match="a trial needs 1 GPUs, and the Ray cluster has 0 in all"):
        ray_engine.OnRay(Path(), gpus=1)._require_room(cluster)
