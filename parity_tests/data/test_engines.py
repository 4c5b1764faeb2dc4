"""Engines: what is lost is computed again, what hinders the workers is one line, and nothing is left half-done.

Ray is a stand-in here; test_ray_tasks.py runs a real one.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep.core.data import catalog
from lockstep.core.data.catalog import RecordRules, read_catalog
from lockstep.core.data.encode import limit_threads
from lockstep.core.data.engines import ray_tasks
from lockstep.core.data.engines.processes import Processes
from lockstep.core.data.engines.ray_tasks import MOST_ATTEMPTS, RayTasks
from lockstep.core.data.prepare import prepare
from lockstep.core.data.sources import list_source
from lockstep.core.data.workers import require_source, threads_of
from lockstep.core.errors import UserError
from lockstep.core.files import shared_folder
from lockstep.parity_tests.data.conftest import settings_for
from lockstep.parity_tests.data.test_prepare import contents
from lockstep.scripts import cli


class Lost(Exception):
    """The loss of a worker."""


class Ended(Exception):
    """The end of the Ray that the command is a part of."""


class StandIn(ModuleType):
    """Ray as far as the engine uses it; tasks are computed when they are asked for, the last one first.

    lost: how often the worker of each part dies.
    """

    def __init__(self, lost: dict[Any, int] | None = None) -> None:
        super().__init__("ray")
        self.left = Counter(lost or {})
        self.init_folder, self.most_at_once = Path(), 0
        self.init_arguments: dict[str, Any] = {}
        self.cancelled: list[Any] = []
        self.tasks: dict[int, tuple[Any, ...]] = {}
        self.begun: list[Any] = []
        self.cpus = 2.0

    def init(self, **arguments: Any) -> None:
        self.init_folder, self.init_arguments = Path.cwd(), arguments

    def shutdown(self) -> None:
        self.init_arguments = {}

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.cpus}

    def remote(self, **options: Any) -> Any:
        assert options == {"num_cpus": 1, "max_retries": 0}
        return lambda function: Remote(self, function)

    def wait(self, refs: list[int], num_returns: int = 1, timeout: float = 0.0) -> tuple[list[int], list[int]]:
        self.most_at_once = max(self.most_at_once, len(refs))
        return (refs[-1:], refs[:-1]) if num_returns == 1 else (refs, [])

    def get(self, ref: int) -> Any:
        function, *arguments = self.tasks[ref]
        part = arguments[1]
        if self.left and self.left[part]:
            self.left[part] -= 1
            raise Lost
        return function(*arguments)

    def cancel(self, ref: int, force: bool) -> None:
        self.cancelled.append(ref)


class Remote:
    """A remote function of the stand-in."""

    def __init__(self, ray: StandIn, function: Any) -> None:
        self.ray, self.function = ray, function

    def remote(self, *arguments: Any) -> int:
        self.ray.tasks[len(self.ray.tasks)] = (self.function, *arguments)
        self.ray.begun.append(arguments[1])
        return len(self.ray.tasks) - 1


@pytest.fixture(autouse=True)
def no_ray_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # A worker in the process of the test sets its threads in the environment of the test.
    for name in ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))


def stand_in(monkeypatch: pytest.MonkeyPatch, lost: dict[Any, int] | None = None) -> StandIn:
    ray, exceptions = StandIn(lost), ModuleType("ray.exceptions")
    for name in ("NodeDiedError", "ObjectLostError", "OutOfMemoryError", "WorkerCrashedError"):
        setattr(exceptions, name, type(name, (Lost,), {}))
    exceptions.RayError = Ended  # type: ignore[attr-defined]
    exceptions.WorkerCrashedError = Lost  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    return ray


def double(number: int) -> int:
    if number == 13:
        raise UserError("13 is no number")
    return 2 * number


def test_each_part_is_computed_also_where_workers_are_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = stand_in(monkeypatch, {3: 1, 5: MOST_ATTEMPTS - 1})
    with RayTasks(2) as engine:
        found = dict(engine.map(double, range(9), tmp_path))
    assert found == {number: 2 * number for number in range(9)} and engine.redone == MOST_ATTEMPTS
    assert ray.most_at_once == 2 and Counter(ray.begun)[5] == MOST_ATTEMPTS and Counter(ray.begun)[0] == 1
    assert not list(tmp_path.iterdir())


def test_a_part_that_costs_every_worker_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = stand_in(monkeypatch, {5: MOST_ATTEMPTS})
    with RayTasks(3) as engine, pytest.raises(UserError, match="4 workers in turn were lost with the same part"):
        list(engine.map(double, range(9), tmp_path))
    assert len(ray.cancelled) == 2 and not list(tmp_path.iterdir())


def test_the_end_of_ray_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = stand_in(monkeypatch)

    def get(ref: int) -> Any:
        raise Ended

    monkeypatch.setattr(ray, "get", get)
    with RayTasks(2) as engine, pytest.raises(UserError, match=r"Ray ended before .* was done \(Ended\); run the com"):
        list(engine.map(double, range(9), tmp_path))
    assert not list(tmp_path.iterdir())


def test_what_the_user_must_mend_ends_it_and_what_is_at_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = stand_in(monkeypatch)
    with RayTasks(2) as engine, pytest.raises(UserError, match="13 is no number"):
        list(engine.map(double, [1, 2, 13, 4, 5, 6], tmp_path))
    assert len(ray.cancelled) == 1 and not list(tmp_path.iterdir())


def test_a_cluster_is_given_twice_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = stand_in(monkeypatch)
    with RayTasks(0, "auto") as engine:
        list(engine.map(double, range(9), tmp_path))
    assert ray.most_at_once == 4


def test_ray_starts_where_lockstep_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its workers look for modules first in the folder in which it is started."""
    ray = stand_in(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with RayTasks(2) as engine:
        list(engine.map(double, [1], tmp_path))
        assert ray.init_folder == Path(lockstep.__path__[0]).parent and Path.cwd() == tmp_path
        assert ray.init_arguments["num_cpus"] == 2 and ray.init_arguments["address"] == "local"
    assert ray.init_arguments == {}
    with RayTasks(2, "auto") as engine:
        list(engine.map(double, [1], tmp_path))
        assert ray.init_arguments["address"] == "auto" and "num_cpus" not in ray.init_arguments


def test_the_bytes_are_those_of_the_processes(
    prepared: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    with RayTasks(3) as engine:
        result = prepare(settings_for(tmp_path / "out", texts), engine=engine)
    assert contents(tmp_path / "out") == contents(prepared) and result.shards_kept == 0


def test_a_catalog_is_the_same_whoever_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts come back in any order; files are counted, and copies found, across them."""
    for number in range(12):
        lines = [json.dumps({"text": text}) for text in (f"document {number}", "a copy", "", f"more of {number}")]
        (tmp_path / f"{number:02d}.jsonl").write_text("\n".join([*lines, '{"text": null}', ""]))
    listing = list_source(str(tmp_path))
    rules = RecordRules(duplicates="drop")
    alone = read_catalog(listing, "text", 0.2, lambda done: None, rules)
    seen: list[Any] = []
    stand_in(monkeypatch)
    monkeypatch.setattr(catalog, "_PART_BYTES", 2 * listing.files[0].size)
    with RayTasks(3) as engine:
        found = read_catalog(listing, "text", 0.2, seen.append, rules, engine, tmp_path)
    for name, column in vars(alone).items():
        assert np.array_equal(column, getattr(found, name)) if name != "counts" else column == found.counts
    assert alone.counts.total("duplicate_documents") == 11 and alone.counts.total("empty_documents") == 12
    assert seen == sorted(seen) and seen[-1] == listing.size and 4 <= len(seen) < 12


def test_without_ray_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with RayTasks(2) as engine, pytest.raises(UserError, match=r"pip install 'lockstep\[ray\]'"):
        list(engine.map(double, [1], tmp_path))


def test_nothing_is_left_where_ray_is_not_reached(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        words = ["--data.source", str(texts), "--data.path", str(tmp_path / "out"), "--engine", "ray"]
        assert cli.run(["data", "prepare", *words, "--ray-address", address]) == 2
    err = capsys.readouterr().err
    assert f"cannot reach Ray at {address}: Connection refused" in err and len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [RuntimeError, Exception])
def test_a_ray_of_another_version_is_one_line(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = stand_in(monkeypatch)

    def init(**_: Any) -> None:
        raise kind("Version mismatch: The cluster was started with:\n    Ray: 1\n")

    monkeypatch.setattr(ray, "init", init)
    with RayTasks(2, "auto") as engine, pytest.raises(UserError) as said:
        list(engine.map(double, [1], tmp_path))
    assert str(said.value) == "cannot reach Ray at auto: Version mismatch: The cluster was started with:"


def test_an_address_without_the_engine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["data", "prepare", "--ray-address", "auto"]) == 2
    assert "--ray-address needs --engine ray" in capsys.readouterr().err


def test_a_worker_that_does_not_see_the_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shared_folder, "LATE_SECONDS", 0.0)
    found = ray_tasks._compute(double, 1, (str(tmp_path), "token", ray_tasks._code()), 1)
    assert isinstance(found, UserError)
    assert f"a worker on {socket.gethostname()} does not see {tmp_path}" in str(found)
    (tmp_path / "token").touch()
    assert ray_tasks._compute(double, 1, (str(tmp_path), "token", ray_tasks._code()), 1) == 2


def test_a_worker_with_other_code_is_named(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    found = ray_tasks._compute(double, 1, (str(tmp_path), "other", "0" * 64), 1)
    assert isinstance(found, UserError) and "does not run the same code as this command" in str(found)


def test_a_worker_that_does_not_see_the_source_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("some text")
    listed = list_source(str(file)).files[0]
    require_source(listed)
    file.unlink()
    with pytest.raises(UserError, match=f"a worker on {socket.gethostname()} does not see {file}"):
        require_source(listed)


def test_one_process_computes_in_itself(tmp_path: Path) -> None:
    assert list(Processes(1).map(double, range(5), tmp_path)) == [(n, 2 * n) for n in range(5)]
    with pytest.raises(UserError, match="13 is no number"):
        list(Processes(1).map(double, [1, 13, 2], tmp_path))


@pytest.mark.parametrize(
    ("sizes", "workers", "threads"),
    [
        ([1000], 8, 8),  # one shard, however many workers
        ([1000, 10], 2, 2),  # a small one beside it occupies nobody
        ([1000] * 8, 8, 2),
        ([1000] * 16, 8, 1),
        ([1000] * 3, 2, 2),  # the third one would leave a core idle
        ([1000] * 4, 2, 1),
        ([1000], 1, 1),
        ([0], 4, 4),
    ],
)
def test_workers_have_threads_where_there_are_few_parts(sizes: list[int], workers: int, threads: int) -> None:
    assert threads_of(sizes, workers) == threads


def threads_here(_: int) -> tuple[str, str]:
    return os.environ["RAYON_NUM_THREADS"], os.environ["TOKENIZERS_PARALLELISM"]


@pytest.mark.parametrize("engine", [Processes(2), RayTasks(2)])
def test_an_engine_gives_its_workers_their_threads(
    engine: Processes | RayTasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    assert engine.workers == 2 and RayTasks(0).workers == 1
    # A machine of one core gives a worker one thread.
    both = ("2", "true") if (os.cpu_count() or 1) > 1 else ("1", "false")
    assert dict(engine.map(threads_here, range(3), tmp_path, 2)) == dict.fromkeys(range(3), both)
    assert dict(engine.map(threads_here, range(3), tmp_path)) == dict.fromkeys(range(3), ("1", "false"))


def test_a_text_of_one_shard_is_encoded_by_all_cores(texts: Path, tmp_path: Path, prepared: Path) -> None:
    given = []

    class Engine(Processes):
        def map(self, work: Any, parts: Any, folder: Path, threads: int = 1) -> Any:
            given.append(threads)
            return super().map(work, parts, folder, threads)

    prepare(settings_for(tmp_path / "out", texts, shard_tokens=1 << 20), engine=Engine(4))
    assert given[-1] == 4


def test_a_worker_has_no_more_threads_than_its_machine_has_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS"):
        monkeypatch.setenv(name, "")
    limit_threads(100_000_000)
    assert int(os.environ["RAYON_NUM_THREADS"]) == os.cpu_count()
