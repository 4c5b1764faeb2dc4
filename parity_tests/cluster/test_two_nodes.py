"""`data prepare` and `sweep` over two Ray nodes of this machine, of which one is lost in the midst: the same results.

A node is a raylet with workers of its own, as another machine has them. It is lost as a machine is: all of its
processes stop at once and never come back.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.data.prepare import prepare
from lockstep.core.sweep.results import RESULTS
from lockstep.parity_tests.cli.workspace import Done
from lockstep.parity_tests.data.conftest import settings_for, write_texts
from lockstep.parity_tests.data.test_prepare import contents
from lockstep.parity_tests.repository import REPO
from lockstep.scripts.studies.on_ray import below, title
from lockstep.scripts.studies.tiny_workspace import write_workspace

pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")

PATIENCE = 300.0
SHARD_TOKENS = 4000
# `lockstep` with small shards, as no flag sets their size, and with an engine that takes a part up so often.
SMALL_SHARDS = """
import dataclasses
from lockstep.core.data import prepare as module
from lockstep.core.data.engines import ray_tasks
from lockstep.scripts import cli

ray_tasks.MOST_ATTEMPTS = {attempts}
whole = module.prepare
module.prepare = lambda settings, *more: whole(dataclasses.replace(settings, shard_tokens={tokens}), *more)
cli.main()
"""


@dataclass(frozen=True)
class Nodes:
    """Two nodes of one Ray. address: of its head. raylets: process ids, of the head and of the one that is lost."""

    address: str
    raylets: tuple[int, int]

    def at_work(self, words: str) -> tuple[list[int], list[int]]:
        """Return the processes of each node whose command line holds `words`."""
        first, second = ([one for one in below(raylet) if words in title(one)] for raylet in self.raylets)
        return first, second

    def lose_second(self, words: str) -> bool:
        """Kill all processes of the second node while one of them is at work; False if none is any more."""
        all_of_it = [self.raylets[1], *below(self.raylets[1])]
        # Stopped processes end nothing between the look at them and their death.
        _send(all_of_it, signal.SIGSTOP)
        if not self.at_work(words)[1]:
            _send(all_of_it, signal.SIGCONT)
            return False
        _send(dict.fromkeys([*all_of_it, *below(self.raylets[1])]), signal.SIGKILL)
        return True


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Nodes]]:
    """`nodes(cpus)` → two nodes, the second one with so many CPUs."""
    from ray.cluster_utils import Cluster

    # A socket's path is short, so it does not lie in pytest's folder.
    folder = tempfile.mkdtemp(prefix="ray_", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    cluster = Cluster()

    def start(cpus: int) -> Nodes:
        few: dict[str, Any] = {"object_store_memory": 80 << 20, "include_dashboard": False}
        both = [cluster.add_node(num_cpus=count, **few) for count in (1, cpus)]
        first, second = (node.all_processes["raylet"][0].process.pid for node in both)
        return Nodes(cluster.address, (first, second))

    try:
        yield start
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _send(processes: Any, number: signal.Signals) -> None:
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def over_both(command: list[str], nodes: Nodes, folder: Path, words: str, half_way: Callable[[], bool]) -> Done:
    """Run a command over two nodes, and lose the second one once both have worked and the command is half-way.

    words: in the command lines of processes that compute a part of the work.

    Raises:
        AssertionError: the command ended before, as where one node had all of the work.
    """
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    worked: set[int] = set()
    with out.open("wb") as output, err.open("wb") as errors:
        process = subprocess.Popen([sys.executable, *command], cwd=folder, stdout=output, stderr=errors)
        try:
            until, lost = time.monotonic() + PATIENCE, False
            while not lost:
                worked |= {number for number, one in enumerate(nodes.at_work(words)) if one}
                if worked == {0, 1} and half_way():
                    lost = nodes.lose_second(words)
                assert process.poll() is None, f"ended, and nodes {worked} had worked: {err.read_text()}"
                assert time.monotonic() < until, f"after {PATIENCE} s nodes {worked} had worked"
                time.sleep(0.005)
            code = process.wait(PATIENCE)
        finally:
            process.kill()
            process.wait()
    return Done(code, out.read_text(), err.read_text())


def prepared_over_both(nodes: Nodes, folder: Path, source: Path, attempts: int = 4) -> Done:
    """Prepare `source` by the command line into `folder`/out, and lose the second node after three shards."""
    words = ["data", "prepare", "--engine", "ray", "--ray-address", nodes.address, "--data.path", "out"]
    words += ["--data.source", str(source), "--data.val-fraction", "0.2", "--model.vocab-size", "300"]
    code = SMALL_SHARDS.format(tokens=SHARD_TOKENS, attempts=attempts)
    return over_both(
        ["-c", code, *words],
        nodes,
        folder,
        "ray::_compute",
        lambda: len(list((folder / "out").glob("*.bin"))) >= 3,
    )


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write enough text that both nodes are at work for some seconds."""
    return write_texts(tmp_path_factory.mktemp("many"), 1200, seed=1)


def test_a_preparation_over_two_nodes_loses_one_and_no_byte(
    many: Path, nodes: Callable[[int], Nodes], tmp_path: Path
) -> None:
    prepare(settings_for(tmp_path / "alone", many, shard_tokens=SHARD_TOKENS))
    done = prepared_over_both(nodes(1), tmp_path, many)
    assert (done.code, done.err) == (0, "") and "of the work started again" in done.out
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def test_a_node_that_had_no_work_is_noticed(many: Path, nodes: Callable[[int], Nodes], tmp_path: Path) -> None:
    """Without this a test of two nodes could pass on one."""
    with pytest.raises(AssertionError, match=r"ended, and nodes \{0\} had worked"):
        prepared_over_both(nodes(0), tmp_path, many)


def test_parts_of_a_lost_node_that_are_not_computed_again_are_missed(
    many: Path, nodes: Callable[[int], Nodes], tmp_path: Path
) -> None:
    """The node is lost in the midst of a part: an engine that takes up no part again does not end well."""
    done = prepared_over_both(nodes(1), tmp_path, many, attempts=1)
    assert done.code == 2 and "workers in turn were lost with the same part" in done.err
    assert not (tmp_path / "out/index.json").exists()


SWEEP = [
    *("--vary", "optim.peak-lr=1e-3,3e-3", "--threads", "1", "--train.steps", "60", "--optim.warmup-steps", "2"),
    *("--eval.every", "10", "--checkpoint.every", "5", "--precision.policy", "fp32"),
]


def test_a_sweep_over_two_nodes_loses_one_and_no_result(nodes: Callable[[int], Nodes], tmp_path: Path) -> None:
    file = write_workspace(tmp_path / "space")
    both = nodes(1)
    for words in (["data", "prepare", str(file), "--workers", "1"], ["sweep", str(file), *SWEEP, "--out", "alone"]):
        subprocess.run([sys.executable, "-m", "lockstep", *words], cwd=tmp_path, check=True, capture_output=True)
    trials = tmp_path / "there/trials"

    def half_way() -> bool:
        """Return whether each trial has a checkpoint."""
        return len(list(trials.glob("*/checkpoints/step_*5"))) == 2

    words = ["sweep", str(file), *SWEEP, "--out", "there", "--engine", "ray", "--jobs", "2"]
    command = ["-m", "lockstep", *words, "--ray-address", both.address]
    done = over_both(command, both, tmp_path, f"--out\0{Path('there/trials')}", half_way)
    assert done.code == 0, done.err
    alone, there = (json.loads((tmp_path / name / RESULTS).read_text())["trials"] for name in ("alone", "there"))
    same = ("trial", "settings", "state", "value", "step", "reports")
    assert [[trial[key] for key in same] for trial in there] == [[trial[key] for key in same] for trial in alone]
    assert sorted(trial["resumes"] for trial in there) == [0, 1] and not any(trial["resumes"] for trial in alone)
