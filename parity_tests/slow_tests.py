"""Deselect the slow tests of slow_tests.toml by default; `--all` runs every test.

A pytest plugin, loaded by conftest.py. A row of the table names a test function, the kind of its check, and the tests
that replace it in the default run: cases of the same function (`keep`) or other tests (`instead`).
house/test_slow_tests.py compares the table with the existing tests.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TABLE = Path(__file__).with_name("slow_tests.toml")
FOLDER = "parity_tests/"
MARK = "slow"
# Prefix of the test properties that count what a test did not run: the reason follows, the value is the count.
NOT_RUN = "not run: "
_COUNT = "lockstep_slow_tests_left_out"
# The ids of all collected tests, before any is deselected.
COLLECTED = pytest.StashKey[tuple[str, ...]]()
_left_out = 0
_all_tests = False


@dataclass(frozen=True)
class Slow:
    """A test function with cases that run only with --all.

    `test` and `instead` are node ids below parity_tests/, without the brackets of a case. A case is the text in the
    brackets. Only `cases` are slow; or, with `keep`, all cases except those.
    """

    test: str
    kind: str
    keep: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.keep) + bool(self.cases) + bool(self.instead) != 1:
            raise ValueError(f"{TABLE.name}: {self.test}: exactly one of keep, cases and instead is needed")

    def moves(self, case: str) -> bool:
        """Return whether this case of the test function runs only with --all."""
        return case in self.cases if self.cases else case not in self.keep


def table() -> dict[str, Slow]:
    """Return the rows of the table by test function. Raises ValueError if a test has two rows."""
    rows = [Slow(**_as_tuples(row)) for row in tomllib.loads(TABLE.read_text(encoding="utf-8"))["slow"]]
    found = {row.test: row for row in rows}
    if len(found) != len(rows):
        raise ValueError(f"{TABLE.name}: a test has two rows")
    return found


def _as_tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


def split(nodeid: str) -> tuple[str, str]:
    """Split a node id into the test function, relative to parity_tests/, and the case, or "" if there is none."""
    function, _, case = nodeid.removeprefix(FOLDER).partition("[")
    return function, case.removesuffix("]")


def is_slow(nodeid: str, rows: dict[str, Slow]) -> bool:
    """Return whether a test runs only with --all."""
    function, case = split(nodeid)
    return function in rows and rows[function].moves(case)


def amount(by_default: int, *, with_all: int) -> int:
    """Return the number of random cases that a test should try: `with_all` under --all, else `by_default`."""
    return with_all if _all_tests else by_default


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--all`."""
    words = f"run every test, also the slow ones of {FOLDER}{TABLE.name}"
    parser.addoption("--all", action="store_true", dest="all_tests", help=words)


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark of slow tests, and store --all for `amount`, before tests are imported."""
    global _all_tests
    _all_tests = config.getoption("all_tests")
    config.addinivalue_line("markers", f"{MARK}: runs only with --all (given by {FOLDER}{TABLE.name})")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the slow tests, and deselect them without --all."""
    global _left_out
    rows = table()
    config.stash[COLLECTED] = tuple(item.nodeid for item in items)
    slow = [item for item in items if is_slow(item.nodeid, rows)]
    for item in slow:
        item.add_marker(MARK)
    if config.getoption("all_tests") or not slow:
        return
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item.get_closest_marker(MARK) is None]
    _left_out = len(slow)
    # In a worker of pytest-xdist: workers collect the tests, and the main process reports.
    getattr(config, "workeroutput", {})[_COUNT] = _left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Read the count from a worker of pytest-xdist. Every worker collects all tests, so any of them will do."""
    global _left_out
    _left_out = getattr(node, "workeroutput", {}).get(_COUNT, _left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the number of deselected tests, also under pytest-xdist, which does not count them."""
    for line in (*_lines(), *_not_run(terminalreporter)):
        terminalreporter.write_line(line)


def _lines() -> Iterator[str]:
    if _left_out:
        yield f"{_left_out} slow tests left out; --all runs them, and {FOLDER}{TABLE.name} names what stands for each"


def _not_run(terminalreporter: pytest.TerminalReporter) -> Iterator[str]:
    """Yield a line with the number of documentation commands that were not run, by reason."""
    counts = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()) if getattr(report, "when", "") == "call" else ():
                if name.startswith(NOT_RUN):
                    counts[name.removeprefix(NOT_RUN)] += value
    if counts:
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
        yield f"{counts.total()} commands of these pages were not run: {reasons}"
