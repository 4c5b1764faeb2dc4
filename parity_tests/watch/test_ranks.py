"""DistributedDataParallel on two gloo ranks: the truth is the mean over all ranks' batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from lockstep.parity_tests.repository import REPO

CASES = ("clean", "compiled", "one batch", "one rank's gradient doubled")


def test_two_ranks(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    module = "lockstep.parity_tests.watch.on_two_ranks"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(tmp_path / "store"), *CASES],
            cwd=REPO,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=120) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), told
    for out, _ in told:
        said = json.loads(out.splitlines()[-1])
        assert said["clean"] == said["compiled"] == "agreed in 3 checks against your own module", said
        assert said["one batch"].startswith("could_not in 3 checks")
        assert "gradients are the mean of 2 ranks'" in said["one batch"]
        assert said["one rank's gradient doubled"].startswith("disagreed"), said
