"""Python's collector stands still while modules are imported, and goes on afterwards."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from lockstep.core import collector
from lockstep.core.collector import Pause, importing
from lockstep.core.errors import UserError
from lockstep.core.load_backend import load_backend

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


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Return a function that writes importable modules `NAME0`, `NAME1`, …, and imports them."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def load(name: str, number: int, text: str = "") -> None:
        for i in range(number):
            (tmp_path / f"{name}{i}.py").write_text(text)
        importlib.invalidate_caches()
        for i in range(number):
            importlib.import_module(f"{name}{i}")

    yield load
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("pause", [True, False])
def test_an_import_is_not_searched(pause, modules):
    with searches() as found, importing() if pause else nullcontext():
        modules("busy", 1, BUSY)
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


@pytest.mark.parametrize(("number", "frozen"), [(1, 0), (collector.MANY + 1, 1)])
def test_objects_are_left_out_of_later_searches_after_a_large_import(number, frozen, modules, monkeypatch):
    calls = []
    monkeypatch.setattr(collector.gc, "freeze", lambda: calls.append(1))
    with importing():
        modules("small", number)
    assert len(calls) == frozen
