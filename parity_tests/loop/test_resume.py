"""A run that is stopped and goes on ends with the bits of one that was never stopped."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from lockstep.core.checkpoint.format import checkpoint_step
from lockstep.parity_tests.loop.conftest import KINDS
from lockstep.parity_tests.loop.runs import STEPS, Folder, one_line

Straight = Callable[[str], Folder]


def ends_as(straight: Folder, folder: Folder) -> None:
    """Check that the run `stopped` has every record once, with the losses of `straight`, and its weights."""
    assert folder.losses("stopped") == straight.losses("straight")
    assert [step for step, _ in folder.losses("stopped")] == list(range(1, STEPS + 1))
    assert folder.weights("stopped") == straight.weights("straight")
    assert folder.run("stopped").info["finished"]


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("eager", signal.SIGINT),
        ("eager", signal.SIGTERM),
        ("aot_eager", signal.SIGINT),
        ("inductor", signal.SIGINT),
    ],
)
def test_a_signal_leaves_a_checkpoint_and_the_run_goes_on(
    kind: str, number: signal.Signals, folder: Folder, straight: Straight
) -> None:
    code, out, error = folder.stop("stopped", KINDS[kind], number, after=3)
    assert code == 130
    assert "finishing this step, then writing a checkpoint" in error
    assert "Traceback" not in error
    assert f"continue with: lockstep train --resume {folder.path / 'stopped'}" in out
    done = len(folder.records("stopped"))
    last = folder.run("stopped").latest_checkpoint()
    assert 3 <= done < STEPS
    assert last is not None and last.name == f"step_{done:06d}"
    assert not folder.run("stopped").info["finished"]
    assert folder.resume("stopped") == 0
    ends_as(straight(kind), folder)
    assert [r["step"] for r in folder.run("stopped").info["resumes"]] == [done]


def test_a_checked_run_that_is_stopped_goes_on_with_its_checks(folder: Folder, straight: Straight) -> None:
    settings = {"parity.every": 4, "parity.queue": 10}
    code, _, _ = folder.stop("stopped", settings, signal.SIGINT, after=5)
    assert code == 130
    # The write that was under way has ended.
    done = len(folder.records("stopped"))
    assert [c["step"] for c in folder.run("stopped").checks()] == [s for s in (1, 4, 8) if s <= done]
    assert folder.resume("stopped") == 0
    ends_as(straight("eager"), folder)
    checks = folder.run("stopped").checks()
    due = sorted({1, 4, done + 1, 8, 12})
    assert [(c["step"], c["verdict"]) for c in checks] == [(step, "agreed") for step in due]


def test_without_a_checkpoint_a_killed_run_cannot_go_on(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert folder.stop("stopped", {}, signal.SIGKILL, after=2)[0] == -signal.SIGKILL
    assert folder.resume("stopped") == 2
    said = one_line(capsys.readouterr().err)
    assert "has no checkpoint to go on from" in said and "--overwrite" in said


def test_a_killed_run_goes_on_from_its_last_checkpoint(
    folder: Folder, straight: Straight, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.stop("stopped", {"checkpoint.every": 3}, signal.SIGKILL, after=5, saved=True)
    last = checkpoint_step(folder.run("stopped").checkpoints()[-1])
    assert folder.resume("stopped") == 0
    assert f"going on from step {last}" in capsys.readouterr().out
    ends_as(straight("eager"), folder)


def test_what_a_killed_run_did_after_its_checkpoint_is_kept_aside(folder: Folder) -> None:
    folder.stop("stopped", {"checkpoint.every": 3}, signal.SIGKILL, after=5, saved=True)
    late = [line for line in folder.losses("stopped") if line[0] > 3]
    assert folder.resume("stopped") == 0
    (branch,) = folder.run("stopped").info["branches"]
    if branch["from_step"] == 3:
        assert branch["records"] == len(late)
        assert (folder.path / "stopped" / branch["path"] / "records.jsonl").is_file()
