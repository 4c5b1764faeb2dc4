"""`lockstep` in this process, and a place for it: a run file on a tiny data set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from parity_tests.usage.workspace import write_workspace
from scripts import cli


@dataclass(frozen=True)
class Said:
    """What a command ended with and printed."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Place:
    """A run file whose data is prepared."""

    path: Path
    config: Path


Lockstep = Callable[..., Said]


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    config = write_workspace(tmp_path_factory.mktemp("place"))
    assert cli.run(["data", "prepare", str(config), "--workers", "1"]) == 0
    return Place(config.parent, config)


@pytest.fixture
def lockstep(capsys: pytest.CaptureFixture[str]) -> Lockstep:
    def call(*arguments: object) -> Said:
        capsys.readouterr()
        code = cli.run([str(a) for a in arguments])
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return call
