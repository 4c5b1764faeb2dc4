"""Durations come from a clock that never goes back; the wall clock is a label, and nothing is ordered by it."""

from __future__ import annotations

import ast
import itertools
import math
import time
from collections.abc import Callable

import pytest

import lockstep.core.train.loop
from lockstep.parity_tests.loop.runs import STEPS, Folder
from lockstep.parity_tests.repository import REPO, parsed

Straight = Callable[[str], Folder]
PACKAGES = ("core", "torch_backend", "jax_backend", "scripts")
# Where the wall clock may be read: for a date in run.json, and for a file's age, which is shown and nothing else.
LABELS = {
    "core/run/directory.py",
    "scripts/shared/restart.py",
    "core/live/snapshot.py",
    "core/overview/page.py",
    "core/overview/table.py",
}


def test_a_clock_that_jumps_moves_no_number(
    folder: Folder, straight: Straight, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jumps = itertools.cycle([1e9, -1e9, 0.0, 86400.0])
    now = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + next(jumps))
        assert folder.train("run", {"checkpoint.every": 5}) == 0
    records = folder.records("run")
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert all(0 < r["seconds"] < 600 for r in records)
    assert all(0 < r["tokens_per_second"] < math.inf for r in records)
    assert folder.weights("run") == straight("eager").weights("straight")
    assert [p.name for p in folder.run("run").checkpoints()] == ["step_000010", "step_000012"]


def test_a_clock_that_stands_still_divides_by_nothing(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Standing:
        @staticmethod
        def perf_counter() -> float:
            return 1.0

    with monkeypatch.context() as patch:
        patch.setattr(lockstep.core.train.loop, "time", Standing)
        assert folder.train("run", {"train.steps": 4}) == 0
    assert [(r["seconds"], r["tokens_per_second"]) for r in folder.records("run")] == [(0.0, 0.0)] * 4


def wall_clock(source: str) -> list[int]:
    """Lines that ask the wall clock."""
    asked = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}
    return [
        node.lineno
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, (ast.Name, ast.Attribute))
        and ((node.value.id if isinstance(node.value, ast.Name) else node.value.attr), node.attr) in asked
    ]


def test_nothing_else_asks_the_wall_clock() -> None:
    assert wall_clock("import time\nbegan = time.time()\n") == [2]
    found = {
        str(path.relative_to(REPO))
        for name in PACKAGES
        for path in (REPO / name).rglob("*.py")
        if wall_clock(path.read_text(encoding="utf-8"))
    }
    assert found == LABELS
