"""A worker of the data preparation that is killed: one line, and the preparation goes on where it was."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from lockstep.parity_tests.cli.workspace import Started
from lockstep.parity_tests.loop.runs import one_line
from lockstep.scripts import cli


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the worker in /proc")
def test_a_killed_worker_costs_nothing_but_its_shard(text: Path, tokens: Path, tmp_path: Path) -> None:
    settings = [
        "data",
        "prepare",
        "--data.source",
        str(text),
        "--model.vocab-size",
        "300",
        "--data.val-fraction",
        "0.2",
    ]
    started = Started(tmp_path, *settings, "--data.path", str(tmp_path / "data"), "--workers", "2")

    def worker() -> int | None:
        try:
            return started.worker()
        except AssertionError:
            return None

    started.wait_for(lambda: worker() is not None)
    os.kill(started.worker(), signal.SIGKILL)
    done = started.end()
    assert done.code == 2
    assert "a worker process ended before its work" in one_line(done.err)
    assert "run the command again to go on from here" in done.err
    assert not (tmp_path / "data" / "index.json").exists()
    assert cli.run([*settings, "--data.path", str(tmp_path / "data"), "--workers", "1"]) == 0
    for whole in tokens.glob("*.bin"):
        assert (tmp_path / "data" / whole.name).read_bytes() == whole.read_bytes()
