"""Ctrl-C as a terminal sends it: to every process of the group, at any time, once or twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.parity_tests.cli.workspace import REPO, Started, alive, last_weights, trained
from lockstep.scripts.shared.interrupts import interrupts


def test_the_first_sets_a_flag_and_the_second_raises(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interrupts() as interrupted:
        assert not interrupted.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(500):  # the signal goes to another thread, which tells this one at its next instruction
            if interrupted.is_set():
                break
            time.sleep(0.01)
        assert "Ctrl-C again stops at once" in capfd.readouterr().err
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler may repeat itself; what is under way is finished
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(500):
            time.sleep(0.01)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_compiler_that_was_started_in_a_step_survives() -> None:
    """torch.compile starts a C++ compiler in the same group; if that dies of Ctrl-C, the first step fails with it."""
    program = (
        "import os, signal, subprocess, sys\n"
        "from lockstep.scripts.shared.interrupts import interrupts\n"
        "with interrupts() as interrupted:\n"
        "    compiler = subprocess.Popen(['sleep', '1'])\n"
        "    os.killpg(os.getpgid(0), signal.SIGINT)\n"
        "    sys.exit(0 if compiler.wait() == 0 and interrupted.is_set() else 3)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO, start_new_session=True, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.fixture
def started(run_file: Path, here: Path):
    """`started(*arguments)`: a run in a process group of its own, which is ended in any case."""
    made: list[Started] = []

    def start(*arguments: object) -> Started:
        made.append(Started(here, "train", str(run_file), *map(str, arguments)))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)


def gone(pid: int, seconds: float) -> bool:
    """Return whether the process ends within `seconds`."""
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def test_twice_while_the_reference_works_stops_at_once_and_the_run_goes_on(
    lockstep: Lockstep, started, run_file: Path, here: Path
) -> None:
    run = here / "runs" / "tiny"
    # Long enough not to end before the signal comes; the reference gives no answer, so waiting for it has no end.
    one = started("--train.steps", 200, "--parity.every", 5)
    one.wait_for_step(run, 6)
    worker = one.worker()
    os.kill(worker, signal.SIGSTOP)
    one.interrupt()
    one.wait_for(lambda: any((run / "checkpoints").glob("step_*")))
    one.interrupt()
    done = one.end()
    assert done.code == 130
    assert "Traceback" not in done.err + done.out
    assert done.lines[-1] == "lockstep: stopped"
    assert gone(worker, 60)
    steps = [line[0] for line in trained(run)]
    assert steps == list(range(1, len(steps) + 1))
    # It goes on, to where it would have been; with 2 where the reference had time for fewer than half of the checks.
    resumed = lockstep("train", "--resume", run)
    assert resumed.code == (2 if "due, " in resumed.err and "fewer than half" in resumed.err else 0), resumed
    assert lockstep("train", run_file, "--name", "straight", "--train.steps", 200).code == 0
    straight = here / "runs" / "straight"
    assert trained(run) == trained(straight)
    assert last_weights(run) == last_weights(straight)
