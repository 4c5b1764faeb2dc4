"""Four workers of a real Ray on this machine: the same bytes, also where one of them is killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.data.prepare import prepare
from lockstep.core.files.atomic import TEMPORARY_SUFFIX
from lockstep.parity_tests.data.conftest import settings_for, write_texts
from lockstep.parity_tests.data.test_prepare import contents
from lockstep.parity_tests.repository import REPO

pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds workers in /proc")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough text that each of four workers is at work for some seconds."""
    return write_texts(tmp_path_factory.mktemp("many"), 1200, seed=1)


@pytest.fixture(scope="module")
def expected(many: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("expected") / "data"
    prepare(settings_for(out, many, shard_tokens=20_000))
    return contents(out)


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """Where Ray keeps its sockets and logs; a socket's path is short."""
    folder = tempfile.mkdtemp(prefix="ray_", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def on_ray(ray_folder: str, out: Path, source: Path, **more: Any) -> dict[str, Any]:
    """Return what scripts/studies/on_ray.py reports."""
    settings = {"out": str(out), "source": str(source), "vocab_size": 300, "val_fraction": 0.2, "workers": 4}
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.scripts.studies.on_ray", json.dumps(settings | more)],
        cwd=out.parent,
        env={**os.environ, "PYTHONPATH": str(REPO), "RAY_TMPDIR": ray_folder},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_killed_worker_changes_no_byte(many: Path, expected: dict[str, str], ray_folder: str, tmp_path: Path) -> None:
    found = on_ray(ray_folder, tmp_path / "out", many, shard_tokens=20_000, kill=[1, 4])
    assert found["killed"] == 2 == found["redone"]
    assert contents(tmp_path / "out") == expected and found["written"] == len(list((tmp_path / "out").glob("*.bin")))
    assert found["written"] > 8


def test_a_file_that_no_worker_can_read_is_said_in_one_line(ray_folder: str, tmp_path: Path) -> None:
    source = write_texts(tmp_path / "texts", 40)
    out = tmp_path / "out"
    prepare(settings_for(out, source))
    (out / "index.json").unlink()
    for path in out.glob("*.bin"):
        path.unlink()
    # The plan stands. One file is another one with the size and time of the listing, which only a worker notices.
    victim = source / "doc_007.txt"
    status = victim.stat()
    victim.write_bytes(b" " * status.st_size)
    os.utime(victim, ns=(status.st_atime_ns, status.st_mtime_ns))
    error = on_ray(ray_folder, out, source, shard_tokens=1000)["error"]
    assert "documents, " in error and "a source was changed while it was read" in error
    assert len(error.splitlines()) == 1 and not (out / "index.json").exists()
    assert not list(out.glob(f".*{TEMPORARY_SUFFIX}"))
