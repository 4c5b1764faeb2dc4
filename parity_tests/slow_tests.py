"""Leave the slow tests of slow_tests.toml out of the default run; `--all` runs every test.

A pytest plugin, loaded by conftest.py. A row of the table names a test function, the kind of check that it makes, and
what stands for it in the default run: cases of the same function (`keep`) or other tests (`instead`).
house/test_slow_tests.py holds the table against the tests that are there.
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
# Begins the properties by which a test reports what it did not run: the reason follows, the value is a count.
NOT_RUN = "not run: "
_COUNT = "lockstep_slow_tests_left_out"
# The node ids that were collected, before any was deselected.
COLLECTED = pytest.StashKey[tuple[str, ...]]()
_left_out = 0
_all_tests = False


@dataclass(frozen=True)
class Slow:
    """A test function of which some cases, or all, run only with --all.

    `test` and `instead` are node ids under parity_tests/, without the brackets of a case. Cases are what stands in
    the brackets: `cases` move and the others stay, or all move except those of `keep`.
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
        """Return whether this case of the function runs only with --all."""
        return case in self.cases if self.cases else case not in self.keep


def table() -> dict[str, Slow]:
    """Read the table, by test function."""
    rows = [Slow(**_as_tuples(row)) for row in tomllib.loads(TABLE.read_text(encoding="utf-8"))["slow"]]
    found = {row.test: row for row in rows}
    if len(found) != len(rows):
        raise ValueError(f"{TABLE.name}: a test has two rows")
    return found


def _as_tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


def split(nodeid: str) -> tuple[str, str]:
    """Split a node id into the function, relative to parity_tests/, and the case, empty if there is none."""
    function, _, case = nodeid.removeprefix(FOLDER).partition("[")
    return function, case.removesuffix("]")


def is_slow(nodeid: str, rows: dict[str, Slow]) -> bool:
    """Return whether a test runs only with --all."""
    function, case = split(nodeid)
    return function in rows and rows[function].moves(case)


def amount(by_default: int, *, with_all: int) -> int:
    """Return how many drawn cases a test tries: fewer by default than with --all."""
    return with_all if _all_tests else by_default


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--all`."""
    words = f"run every test, also the slow ones of {FOLDER}{TABLE.name}"
    parser.addoption("--all", action="store_true", dest="all_tests", help=words)


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark that slow tests are given, and note --all for `amount`, before tests are imported."""
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
    # A worker of pytest-xdist: its process collects, and another one reports.
    getattr(config, "workeroutput", {})[_COUNT] = _left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the count from a worker of pytest-xdist; each of them collects all tests."""
    global _left_out
    _left_out = getattr(node, "workeroutput", {}).get(_COUNT, _left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests were left out, also under pytest-xdist, which does not count them."""
    for line in (*_lines(), *_not_run(terminalreporter)):
        terminalreporter.write_line(line)


def _lines() -> Iterator[str]:
    if _left_out:
        yield f"{_left_out} slow tests left out; --all runs them, and {FOLDER}{TABLE.name} names what stands for each"


def _not_run(terminalreporter: pytest.TerminalReporter) -> Iterator[str]:
    """Yield a line that counts the commands of pages that bear a mark and were not run, by their reasons."""
    counts = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()) if getattr(report, "when", "") == "call" else ():
                if name.startswith(NOT_RUN):
                    counts[name.removeprefix(NOT_RUN)] += value
    if counts:
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
        yield f"{counts.total()} commands of these pages were not run: {reasons}"
