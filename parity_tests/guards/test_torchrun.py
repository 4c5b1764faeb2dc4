"""The same under torchrun: rank 0 reports the rank at fault, in one line of its own among torchrun's."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.parity_tests.guards import candidates
from lockstep.parity_tests.guards.candidates import AT_STEP
from lockstep.parity_tests.ranks.test_torchrun import torchrun
from lockstep.scripts import cli
from lockstep.scripts.studies.tiny_workspace import write_workspace


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = write_workspace(tmp_path_factory.mktemp("guards"))
    assert cli.run(["data", "prepare", str(file)]) == 0
    return file


def test_rank_0_names_the_other(run_file: Path, tmp_path: Path) -> None:
    more = {"train.ranks": 2, "train.batch-size": 8, "checkpoint.every": 1}
    words = [word for key, value in more.items() for word in (f"--{key}", str(value))]
    done = torchrun(tmp_path, "train", str(run_file), *words, "--backend", f"{candidates.__name__}:NanLoss")
    assert done.code == 1
    (line,) = (line for line in done.err.splitlines() if line.startswith("lockstep: "))
    assert line == (
        f"lockstep: step {AT_STEP}: loss nan, gradient norm nan: not finite; on rank 1 first in the loss (nan); "
        "the step was left out; continue with: lockstep train --resume runs/tiny"
    )
    steps = sorted(path.name for path in (tmp_path / "runs" / "tiny" / "checkpoints").glob("step_*"))
    assert steps == ["step_000001", "step_000002"]
