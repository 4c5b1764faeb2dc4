"""A reference that is killed or hangs: training goes on, and every check that is lost has a reason."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable

import pytest

from lockstep.parity_tests.guards.events import before_steps
from lockstep.parity_tests.loop.runs import STEPS, Folder, one_line

Straight = Callable[[str], Folder]


def signalled(number: signal.Signals) -> None:
    (worker,) = (p for p in multiprocessing.active_children() if p.name == "lockstep-reference")
    assert worker.pid is not None
    os.kill(worker.pid, number)


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (signal.SIGKILL, "the reference's process has died (exit code -9); training goes on unchecked"),
        (
            signal.SIGSTOP,
            "the reference's process gave no answer within 3 s and was ended; training goes on unchecked",
        ),
    ],
)
def test_training_goes_on_and_what_is_lost_says_why(
    number: signal.Signals,
    why: str,
    folder: Folder,
    straight: Straight,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    others = set(multiprocessing.active_children())  # ranks of other modules' sessions
    with monkeypatch.context() as patch:
        before_steps(patch, {4: lambda: signalled(number)})
        settings = {"parity.every": 4, "parity.queue": 10, "parity.timeout_seconds": 3}
        assert folder.train("run", settings) == 2
    out, error = capsys.readouterr()
    assert out.count(why) == 1
    said = one_line(error)
    assert "parity checks: 4 due, " in said and "fewer than half" in said and said.endswith(f": {why}")
    checks = {c["step"]: c for c in folder.run("run").checks()}
    assert sorted(checks) == [1, 4, 8, 12]
    assert all((checks[step]["verdict"], checks[step]["reason"]) == ("skipped", why) for step in (4, 8, 12))
    assert len(folder.records("run")) == STEPS
    assert folder.run("run").info["finished"]
    assert folder.weights("run") == straight("eager").weights("straight")
    assert set(multiprocessing.active_children()) <= others
