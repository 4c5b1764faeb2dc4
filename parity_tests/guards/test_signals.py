"""SIGTERM, and SIGHUP when a terminal is closed, are Ctrl-C; whatever they meet with is finished first."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.parity_tests.guards.events import before_steps
from lockstep.parity_tests.loop.runs import STEPS, Folder
from lockstep.parity_tests.repository import REPO
from lockstep.parity_tests.stored import stored
from lockstep.torch_backend.session import TorchSession

Straight = Callable[[str], Folder]
STOPS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def _not_under_nohup() -> Iterator[None]:
    """Whoever runs the tests may ignore SIGHUP, which started processes inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def goes_on(folder: Folder, straight: Straight, name: str) -> None:
    assert folder.resume(name) == 0
    assert folder.losses(name) == straight("eager").losses("straight")
    assert folder.weights(name) == straight("eager").weights("straight")


def test_a_terminal_that_hangs_up_leaves_a_checkpoint(folder: Folder, straight: Straight) -> None:
    code, _, error = folder.stop("run", {}, signal.SIGHUP, after=3)
    assert code == 130 and "Traceback" not in error
    last = folder.run("run").latest_checkpoint()
    assert last is not None and last.name == f"step_{len(folder.records('run')):06d}"
    goes_on(folder, straight, "run")


def test_under_nohup_it_does_not_stop(folder: Folder) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as a started process inherits it
    try:
        code, _, _ = folder.stop("run", {}, signal.SIGHUP, after=3)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert code == 0
    assert folder.run("run").info["finished"]


# Takes the terminal of its standard input for its own. Not in `preexec_fn`: that forks, which JAX's threads forbid.
OWN_TERMINAL = (
    "import fcntl, runpy, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "runpy.run_module('lockstep.parity_tests.loop.slowly', run_name='__main__', alter_sys=True)"
)


def test_a_terminal_that_is_gone_takes_no_words_and_no_checkpoint(folder: Folder, straight: Straight) -> None:
    """With the terminal go standard output and error: every line that is written there fails from then on."""
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", OWN_TERMINAL, *folder.arguments("run", {})],
        cwd=REPO,
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
    )
    os.close(inner)
    try:
        deadline = time.monotonic() + 60
        while len(folder.records("run")) < 3:
            assert process.poll() is None and time.monotonic() < deadline
            os.set_blocking(outer, False)
            try:
                os.read(outer, 1 << 16)
            except BlockingIOError:
                time.sleep(0.02)
        os.close(outer)  # the terminal's window is closed
        code = process.wait(60)
    finally:
        process.kill()
    assert code == 130
    done = len(folder.records("run"))
    last = folder.run("run").latest_checkpoint()
    assert 3 <= done < STEPS
    assert last is not None and last.name == f"step_{done:06d}"
    goes_on(folder, straight, "run")


@pytest.mark.parametrize("after", ["step 1/", ""])
def test_a_reader_that_is_gone_does_not_end_the_run(folder: Folder, after: str) -> None:
    """`lockstep train … | tee log`, and tee is killed; or `| head`, which ends before the first step."""
    process = folder.start("run", {})
    assert process.stdout is not None and process.stderr is not None
    while not process.stdout.readline().startswith(after):
        assert process.poll() is None
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(60) == 0, said
    assert said == ""
    assert folder.run("run").info["finished"]


@pytest.mark.parametrize("number", STOPS)
def test_in_the_first_step_which_compiles(
    number: signal.Signals, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        before_steps(patch, {1: lambda: os.kill(os.getpid(), number)})
        settings = {"compile.enabled": True, "compile.backend": "aot_eager"}
        assert folder.train("run", settings) == 130
    assert [r["step"] for r in folder.records("run")] == [1]
    assert [path.name for path in folder.run("run").checkpoints()] == ["step_000001"]


@pytest.mark.parametrize("number", STOPS)
def test_while_a_checkpoint_is_written(
    number: signal.Signals, folder: Folder, straight: Straight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is finished, and the run ends with it: none is written twice."""
    write = TorchSession.write

    def interrupted(self: TorchSession, folder: Path):
        os.kill(os.getpid(), number)
        return write(self, folder)

    with monkeypatch.context() as patch:
        patch.setattr(TorchSession, "write", interrupted)
        assert folder.train("run", {"checkpoint.every": 4}) == 130
    assert [r["step"] for r in folder.records("run")] == [1, 2, 3, 4]
    run = folder.run("run")
    assert [path.name for path in run.checkpoints()] == ["step_000004"]
    assert stored(run.checkpoints()[0]).step == 4
    goes_on(folder, straight, "run")


def test_a_second_ctrl_c_in_a_checkpoint_leaves_the_one_before(
    folder: Folder, straight: Straight, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, asked = TorchSession.write, []

    def interrupted(self: TorchSession, folder: Path):
        asked.append(self.steps_done)
        if len(asked) == 2:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)
        return write(self, folder)

    with monkeypatch.context() as patch:
        patch.setattr(TorchSession, "write", interrupted)
        assert folder.train("run", {"checkpoint.every": 4}) == 130
    run = folder.run("run")
    assert [path.name for path in run.checkpoints()] == ["step_000004"]
    assert len(folder.records("run")) == 8
    goes_on(folder, straight, "run")


def test_a_reader_that_is_gone_before_the_run_began_is_no_disagreement(folder: Folder) -> None:
    """`lockstep train … | head -1`: it cannot start, or has said everything by then and trains on without words."""
    process = folder.start("run", {})
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    said, code = process.stderr.read(), process.wait(60)
    assert said == "" and code in (0, 2)
    assert (folder.path / "run").exists() == (code == 0)
