"""The example for Slurm, with stand-ins for what Slurm brings: two agents instead of nodes, and a queue that notes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.core.run.directory import RunDir
from lockstep.parity_tests.cli.workspace import REPO, write_workspace
from lockstep.parity_tests.ranks.test_restarts import SETTINGS, free_port
from lockstep.scripts import cli

SCRIPT = REPO / "docs/examples/slurm.sh"
# Runs what follows its own options on each of two nodes.
SRUN = """#!/usr/bin/env bash
shift
"$@" & one=$!
"$@" & other=$!
wait "$one"; first=$?; wait "$other"; second=$?
exit $((first > second ? first : second))
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then printf '127.0.0.1\\nnode2\\n'; else echo "$@" >> "$QUEUE"; fi
"""


def stand_ins(folder: Path, torchrun: str) -> dict[str, str]:
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "torchrun": torchrun}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]", "RANKS_PER_NODE": "1"}
    return job | {"PATH": f"{folder}:{os.environ['PATH']}", "QUEUE": str(folder / "queue"), "PYTHONPATH": str(REPO)}


def submitted(folder: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_script_is_a_script() -> None:
    assert subprocess.run(["bash", "-n", str(SCRIPT)]).returncode == 0


def test_a_job_trains_over_its_nodes(tmp_path: Path) -> None:
    file = write_workspace(tmp_path / "workspace")
    assert cli.run(["data", "prepare", str(file)]) == 0
    # All but the port is the script's: another process may have that one.
    command = f"{sys.executable} -m torch.distributed.run --local-addr 127.0.0.1"
    torchrun = f'#!/usr/bin/env bash\nexec {command} "${{@//:24711/:{free_port()}}}"\n'
    done = submitted(tmp_path, stand_ins(tmp_path, torchrun), str(file), *SETTINGS)
    assert done.returncode == 0, done.stderr
    run = RunDir.open(tmp_path / "runs/tiny")
    assert run.info["finished"] and run.info["launch"] == "4711" and run.config.train.ranks == 2
    assert not (tmp_path / "queue").exists()


@pytest.mark.parametrize(("before", "queued"), [("0", True), ("4", True), ("5", False)])
def test_a_job_that_fails_is_queued_again_but_not_for_ever(before: str, queued: bool, tmp_path: Path) -> None:
    environment = stand_ins(tmp_path, "#!/usr/bin/env bash\nexit 1\n") | {"SLURM_RESTART_COUNT": before}
    assert submitted(tmp_path, environment, "a.toml").returncode == 1
    assert (tmp_path / "queue").exists() == queued
    if queued:
        assert (tmp_path / "queue").read_text() == "requeue 4711\n"
