"""Fixtures that run the command line in this process, in a temporary folder, on a tiny data set."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.parity_tests.cli.workspace import Done
from lockstep.scripts.cli import run
from lockstep.scripts.studies.tiny_workspace import write_workspace

Lockstep = Callable[..., Done]


@pytest.fixture(scope="session")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run file and prepare its data. A test that changes the data must copy them first."""
    file = write_workspace(tmp_path_factory.mktemp("workspace"))
    assert run(["data", "prepare", str(file), "--workers", "1"]) == 0
    return file


@pytest.fixture
def here(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to the folder in which commands run. Their temporary files (tracebacks) go to another folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("aside")))
    # The width of tables and messages does not depend on the terminal in which the tests run.
    monkeypatch.setenv("COLUMNS", "120")
    # Otherwise Python's byte code beside a candidate would count as a file that a command wrote.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


@pytest.fixture
def lockstep(here: Path, capsys: pytest.CaptureFixture[str]) -> Lockstep:
    """Return the function `lockstep(*arguments)` → exit code, stdout and stderr."""

    def call(*arguments: object) -> Done:
        capsys.readouterr()
        try:
            code = run([str(a) for a in arguments])
        except SystemExit as stop:  # --help
            code = int(stop.code or 0)
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return call


@pytest.fixture
def refused(lockstep: Lockstep, here: Path) -> Callable[..., str]:
    """Return the function `refused(*arguments)` → the one line of the error message.

    It asserts that nothing else was printed and that no file was written.
    """

    def call(*arguments: object) -> str:
        before = sorted(here.rglob("*"))
        done = lockstep(*arguments)
        assert done.code == 2, done
        assert len(done.lines) == 1 and done.err.startswith("lockstep: "), done.err
        assert done.out == ""
        assert sorted(here.rglob("*")) == before
        return done.err.removeprefix("lockstep: ").rstrip("\n")

    return call
