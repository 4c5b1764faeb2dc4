"""Programs of several processes, a rank each, that print what they saw as JSON in their last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from lockstep.parity_tests.repository import REPO


def answers(program: str, *arguments: str, size: int = 2, timeout: float = 240.0) -> list[dict[str, Any]]:
    """Run `python -m program RANK arguments` for each rank at once; return their answers in the order of ranks.

    program: a module of parity_tests/watch, by its name there.
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
