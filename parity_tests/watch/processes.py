"""Run programs of several ranks, which print their results as JSON in the last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from lockstep.parity_tests.repository import REPO


def answers(program: str, *arguments: str, size: int = 2, timeout: float = 240.0) -> list[dict[str, Any]]:
    """Run `python -m program RANK arguments` for all ranks at once; return their results in the order of ranks.

    program: the name of a module in parity_tests/watch.
    """
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", f"lockstep.parity_tests.watch.{program}", str(rank), *arguments],
            cwd=REPO,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    told = [rank.communicate(timeout=timeout) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), told
    return [json.loads(out.splitlines()[-1]) for out, _ in told]


def one_rank(device: str) -> dict[str, Any]:
    """Run on_one_rank.py on a device; return the results by case."""
    command = [sys.executable, "-m", "lockstep.parity_tests.watch.on_one_rank", device]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
