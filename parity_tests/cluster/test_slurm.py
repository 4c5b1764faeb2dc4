"""The examples for Slurm, with stand-ins for what Slurm and Ray bring: agents for nodes, and a queue that notes."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.core.run.directory import RunDir
from lockstep.parity_tests.cli.workspace import REPO
from lockstep.parity_tests.cluster.commands import EXAMPLES, in_script, parsed, torchrun_problems
from lockstep.parity_tests.ranks.test_restarts import SETTINGS, free_port
from lockstep.parity_tests.repository import REPO as REPOSITORY
from lockstep.scripts import cli
from lockstep.scripts.studies.tiny_workspace import write_workspace

SCRIPTS = {path.stem: path for path in sorted((EXAMPLES / "slurm").glob("*.sh"))}
SCRIPT = SCRIPTS["train"]
# Runs what follows its own option on each of two nodes; it has no other, and ends as srun does at an unknown one.
SRUN = """#!/usr/bin/env bash
[ "$1" = --kill-on-bad-exit=1 ] || { echo "srun: unrecognized option '$1'" >&2; exit 255; }
shift
SLURM_PROCID=0 "$@" & one=$!
SLURM_PROCID=1 "$@" & other=$!
wait "$one"; first=$?; wait "$other"; second=$?
exit $((first > second ? first : second))
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
"show hostnames") printf '127.0.0.1\\nnode2\\n' ;;
"requeue $SLURM_JOB_ID") echo "$@" >> "$QUEUE" ;;
*) echo "scontrol: invalid keyword: $*" >&2; exit 1 ;;
esac
"""
# Runs the command behind `--` on the first node, as `ray symmetric-run` does, and tells what it was given. Where a file
# `broken` lies beside it, it fails as that does: without a word, and with 0.
RAY = """#!/usr/bin/env bash
here=$(dirname "$0")
echo "$SLURM_PROCID $*" >> "$here/ray.txt"
echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN" >> "$here/secret.txt"
[ "$SLURM_PROCID" = 0 ] && [ ! -e "$here/broken" ] || exit 0
while [ "$1" != -- ]; do shift; done
shift
"$@"
"""
LOCKSTEP = """#!/usr/bin/env bash
printf '%s\\n' "$@" >> "$(dirname "$0")/lockstep.txt"
exit "${CODE:-0}"
"""
START = {"prepare": "--num-cpus=64", "sweep": "--num-cpus=64 --num-gpus=8"}
# Options of sbatch that the examples use, and their values, by its manual page.
_NUMBER = r"=\d+"
OPTIONS = {
    "job-name": r"=[\w-]+",
    "nodes": r"=\d+(-\d+)?",
    "ntasks-per-node": _NUMBER,
    "gpus-per-node": r"=(\w+:)?\d+",
    "cpus-per-task": _NUMBER,
    "exclusive": r"(=(user|mcs|topo))?",
    "time": r"=(\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2})",
    "requeue": "",
    "open-mode": "=(append|truncate)",
    "signal": r"=([RB]:|RB:)?(\w+)(@\d+)?",
}


def stand_ins(folder: Path, torchrun: str) -> dict[str, str]:
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "torchrun": torchrun}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]", "RANKS_PER_NODE": "1"}
    return job | {"PATH": f"{folder}:{os.environ['PATH']}", "QUEUE": str(folder / "queue"), "PYTHONPATH": str(REPO)}


def submitted(
    folder: Path, environment: dict[str, str], *arguments: str, script: Path = SCRIPT
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(script), *arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def wrong_lines(text: str) -> list[str]:
    """Return the lines of a script that ask sbatch for what is none of OPTIONS, or with another kind of value."""
    asked = [line.removeprefix("#SBATCH").strip() for line in text.splitlines() if line.startswith("#SBATCH")]
    known = re.compile("|".join(f"--{name}{value}" for name, value in OPTIONS.items()))
    return [line for line in asked if not known.fullmatch(line)]


def torchrun_words(text: str) -> list[str]:
    """Return the words behind `torchrun` of a script, with numbers for its variables."""
    (line,) = [line for line in re.sub(r"\\\n\s*", " ", text).splitlines() if " torchrun " in line and line[0] != "#"]
    return shlex.split(re.sub(r"\$\w+", "2", line.partition(" torchrun ")[2].replace('"$@"', "a.toml")))


def test_there_is_one_for_each_task() -> None:
    assert set(SCRIPTS) == {"train", "prepare", "sweep"}


@pytest.mark.parametrize("script", [*SCRIPTS.values(), EXAMPLES / "on_ray.sh"], ids=lambda path: path.stem)
def test_the_script_is_a_script(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    assert not wrong_lines(script.read_text())


def test_a_planted_mistake_is_found(tmp_path: Path) -> None:
    text = SCRIPT.read_text()
    for before, after in {
        "--nodes=2": "--node=2",
        "--time=24:00:00": "--time=24 hours",
        "--nodes=2 ": "--nodes=two ",
        "--open-mode=append": "--open-mode=add",
        "--requeue": "--requeue=yes",
    }.items():
        assert wrong_lines(text.replace(before.strip(), after.strip())) == [after.strip()]
    (tmp_path / "broken.sh").write_text(text.replace("code=$?", "code=$("))
    assert subprocess.run(["bash", "-n", str(tmp_path / "broken.sh")], stderr=subprocess.DEVNULL).returncode != 0


def test_its_words_are_torchruns() -> None:
    text = SCRIPT.read_text()
    assert list(torchrun_problems(torchrun_words(text))) == []
    for before, after in {
        "--nproc-per-node": "--nproc-per-nodes",
        "--rdzv-id": "--rdzvid",
        "-m lockstep": "-m x",
    }.items():
        assert list(torchrun_problems(torchrun_words(text.replace(before, after))))


@pytest.mark.parametrize("task", ["prepare", "sweep"])
def test_the_script_beside_it_is_found_from_the_repository(task: str) -> None:
    (folder,) = re.findall(r"\$\{LOCKSTEP_EXAMPLES:-([^}]*)\}/on_ray\.sh", SCRIPTS[task].read_text())
    assert (REPOSITORY / folder / "on_ray.sh").is_file()


@pytest.mark.parametrize("task", SCRIPTS)
def test_the_command_is_one_of_lockstep(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ["--vary", "optim.peak-lr=1e-4:3e-3:log"] if task == "sweep" else []
    file = "configs/rollout/h100x8.toml"
    (words,) = in_script(SCRIPTS[task].read_text(), [file, *more])
    if words[0] not in {*cli.COMMANDS, *cli.GROUPS}:
        pytest.skip(f"`lockstep {words[0]}` is not there yet")
    options, config = parsed(words, monkeypatch)
    assert str(options.config) == file and config.train.ranks == (16 if task == "train" else 8)


@pytest.fixture
def head() -> Iterator[int]:
    """Listen at a port, as Ray does on the first node; return a number of a job that has this port."""
    with socket.socket() as listening:
        for port in range(21_000, 40_000):
            with contextlib.suppress(OSError):
                listening.bind(("127.0.0.1", port))
                break
        listening.listen()
        yield listening.getsockname()[1] - 20_000


def ray_job(folder: Path, number: int) -> dict[str, str]:
    for name, text in {"ray": RAY, "lockstep": LOCKSTEP}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(number), "SLURM_CPUS_PER_TASK": "64", "SLURM_GPUS_ON_NODE": "8"}
    return stand_ins(folder, "") | job | {"LOCKSTEP_EXAMPLES": str(EXAMPLES)}


@pytest.mark.parametrize("task", ["prepare", "sweep"])
def test_ray_runs_on_each_node_and_the_command_on_the_first(task: str, head: int, tmp_path: Path) -> None:
    words = ["a.toml", "--data.path", "a b"]
    assert submitted(tmp_path, ray_job(tmp_path, head), *words, script=SCRIPTS[task]).returncode == 0
    asked = sorted((tmp_path / "ray.txt").read_text().splitlines())
    start = f"symmetric-run --address 127.0.0.1:{20_000 + head} --min-nodes 2 {START[task]} -- bash -c "
    assert [line[: 2 + len(start)] for line in asked] == [f"0 {start}", f"1 {start}"]
    first, second = (tmp_path / "secret.txt").read_text().splitlines()
    assert first == second and first.startswith("token ") and len(first) == len("token ") + 64
    command = ["data", "prepare"] if task == "prepare" else ["sweep"]
    more = [] if task == "prepare" else ["--gpus", "1"]
    found = (tmp_path / "lockstep.txt").read_text().splitlines()
    assert found == [*command, *words, "--engine", "ray", "--ray-address", "auto", *more]


@pytest.mark.parametrize("broken", [False, True])
def test_a_job_over_ray_ends_with_the_code_of_its_command(broken: bool, head: int, tmp_path: Path) -> None:
    """Also where Ray does not start on the first node, and symmetric-run ends with 0 all the same."""
    environment = ray_job(tmp_path, head) | {"CODE": "0" if broken else "2"}
    if broken:
        (tmp_path / "broken").touch()
    assert submitted(tmp_path, environment, "a.toml", script=SCRIPTS["prepare"]).returncode == 2
    assert (tmp_path / "lockstep.txt").exists() != broken


def test_a_node_gives_up_where_the_first_one_has_no_ray(tmp_path: Path) -> None:
    environment = ray_job(tmp_path, 1) | {
        "SLURM_PROCID": "1",
        "RAY_AUTH_TOKEN": "a",
        "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT": "1",
    }
    words = ["127.0.0.1:1", "2", "lockstep", "data", "prepare"]
    ended = submitted(tmp_path, environment, *words, script=EXAMPLES / "on_ray.sh")
    assert ended.returncode == 2 and "Ray at 127.0.0.1:1 is not there after 1 s" in ended.stderr
    assert not (tmp_path / "ray.txt").exists()
    del environment["RAY_AUTH_TOKEN"]
    ended = submitted(tmp_path, environment, *words, script=EXAMPLES / "on_ray.sh")
    assert ended.returncode == 2 and "RAY_AUTH_TOKEN is not set" in ended.stderr


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
