"""Python's collector stands still while modules are imported, and goes on afterwards."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from lockstep.core.collector import Pause, importing
from lockstep.core.errors import UserError
from lockstep.core.load_backend import load_backend
from lockstep.parity_tests.repository import REPO

# Far more cycles than the youngest generation may hold before Python searches it.
BUSY = "import gc\nkept = [[] for _ in range(100_000)]\nfor one in kept:\n    one.append(one)\n"
BACKEND = BUSY + "class Made:\n    def open(self, config): ...\n"


@contextmanager
def searches() -> Iterator[list[int]]:
    """Yield a list that gets the generation of each search of the collector."""
    found: list[int] = []

    def note(phase: str, of: dict[str, int]) -> None:
        if phase == "start":
            found.append(of["generation"])

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


@pytest.mark.parametrize("pause", [True, False])
def test_an_import_is_not_searched(pause):
    with searches() as found, importing() if pause else nullcontext():
        exec(BUSY, {})
        during = len(found)
    assert gc.isenabled()
    assert (during == 0) == pause


def test_a_backend_is_imported_without_searches(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(BACKEND + "found = gc.isenabled()\n")
    backend = load_backend(f"{file}:Made")
    assert not sys.modules[type(backend).__module__].found
    assert gc.isenabled()


def test_the_collector_goes_on_after_an_import_that_fails(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("1 / 0\n")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        load_backend(f"{file}:Made")
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    pause = Pause()
    gc.disable()
    try:
        with importing():
            pause.begin()
            pause.end()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_only_objects_of_the_first_import_are_left_out_of_later_searches():
    program = (
        "import gc; from lockstep.core.collector import importing\n"
        "for _ in range(2):\n    with importing(): kept = [[] for _ in range(1000)]\n    print(gc.get_freeze_count())"
    )
    environment = os.environ | {"PYTHONPATH": str(REPO / "src")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    first, second = map(int, done.stdout.split())
    assert first > 1000
    assert second <= first
