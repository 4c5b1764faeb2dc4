"""The table of slow tests names tests that are there, and something of each kind stays in the default run."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from lockstep.parity_tests.repository import REPO
from lockstep.parity_tests.slow_tests import COLLECTED, FOLDER, Slow, is_slow, split, table

ROWS = table()


@cache
def functions(file: str) -> frozenset[str]:
    """Return the test functions that a file under parity_tests/ defines."""
    path = REPO / FOLDER / file
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef))


def broken(rows: dict[str, Slow]) -> list[str]:
    """List the errors of rows, without collecting: tests that do not exist, or that stand for others and move."""
    found = []
    for row in rows.values():
        for test in (row.test, *row.instead):
            file, _, function = test.partition("::")
            if function not in functions(file):
                found.append(f"{row.test}: there is no {test}")
        found += [f"{row.test}: {test} moves itself" for test in row.instead if test in rows and rows[test].instead]
    return found


def wrong_cases(rows: dict[str, Slow], collected: tuple[str, ...]) -> list[str]:
    """List the errors in the cases of rows whose functions were collected."""
    cases: dict[str, set[str]] = defaultdict(set)
    for nodeid in collected:
        function, case = split(nodeid)
        cases[function].add(case)
    found = []
    for row in (row for row in rows.values() if row.test in cases):
        there = cases[row.test]
        found += [f"{row.test}: no case {case!r}" for case in (*row.keep, *row.cases) if case not in there]
        moving = {case for case in there if row.moves(case)}
        if not moving or (moving == there and not row.instead):
            found.append(f"{row.test}: {len(moving)} of {len(there)} cases move")
    return found


def test_tests_that_move_and_tests_that_stand_for_them_are_there() -> None:
    assert broken(ROWS) == []
    assert all(row.kind for row in ROWS.values())


def test_cases_that_move_and_cases_that_stay_are_there(request: pytest.FixtureRequest) -> None:
    collected = request.config.stash[COLLECTED]
    if not any(split(nodeid)[0] in ROWS for nodeid in collected):
        pytest.skip("no test of the table was collected with this one")
    assert wrong_cases(ROWS, collected) == []


def test_the_default_run_is_all_tests_but_those_of_the_table(request: pytest.FixtureRequest) -> None:
    every = {nodeid for nodeid in request.config.stash[COLLECTED] if is_slow(nodeid, ROWS)}
    mine = {item.nodeid for item in request.session.items if is_slow(item.nodeid, ROWS)}
    assert mine == (every if request.config.getoption("all_tests") else set())


WHOLE, ONE = "house/test_slow_tests.py::test_a_row_that_is_wrong_is_seen", "house/test_links.py::test_x"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Slow(ONE, "k", instead=(WHOLE,)), f"{ONE}: there is no {ONE}"),
        (Slow(WHOLE, "k", instead=(ONE,)), f"{WHOLE}: there is no {ONE}"),
        (Slow(WHOLE, "k", instead=(WHOLE,)), f"{WHOLE}: {WHOLE} moves itself"),
    ],
    ids=["no such test", "nothing stands for it", "what stands for it moves"],
)
def test_a_row_that_is_wrong_is_seen(row: Slow, said: str) -> None:
    assert broken({row.test: row}) == [said]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Slow("a.py::t", "k", keep=("c",)), ["a.py::t: no case 'c'", "a.py::t: 2 of 2 cases move"]),
        (Slow("a.py::t", "k", cases=("a", "b")), ["a.py::t: 2 of 2 cases move"]),
        (Slow("a.py::t", "k", keep=("a", "b")), ["a.py::t: 0 of 2 cases move"]),
        (Slow("a.py::t", "k", keep=("a",)), []),
        (Slow("a.py::t", "k", cases=("b",)), []),
        (Slow("a.py::t", "k", instead=("a.py::u",)), []),
    ],
)
def test_a_case_that_is_wrong_is_seen(row: Slow, said: list[str]) -> None:
    assert wrong_cases({row.test: row}, ("parity_tests/a.py::t[a]", "parity_tests/a.py::t[b]")) == said


@pytest.mark.parametrize("more", [{}, {"keep": ("a",), "cases": ("b",)}, {"keep": ("a",), "instead": ("u",)}])
def test_a_row_has_one_of_keep_cases_and_instead(more: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(ValueError, match="exactly one of keep, cases and instead"):
        Slow("a.py::t", "k", **more)


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_what_is_left_out_is_counted_and_all_runs_it(workers: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "parity_tests").mkdir()
    (tmp_path / "parity_tests/test_made.py").write_text(
        "import pytest\n"
        "from lockstep.parity_tests.slow_tests import amount\n"
        "@pytest.mark.parametrize('case', ['a', 'b', 'c'])\n"
        "def test_it(case): pass\n"
        "@pytest.mark.parametrize('number', range(amount(2, with_all=5)))\n"
        "def test_numbers(number): pass\n"
    )
    (tmp_path / "table.toml").write_text('[[slow]]\ntest = "test_made.py::test_it"\nkind = "k"\nkeep = ["b"]\n')
    (tmp_path / "made.py").write_text(
        "from pathlib import Path\n"
        "from lockstep.parity_tests import slow_tests\n"
        "slow_tests.TABLE = Path('table.toml')\n"
    )

    def lines(*more: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "lockstep.parity_tests.slow_tests", "-p", "made"]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", "--rootdir", ".", *workers, *more, "parity_tests"],
            cwd=tmp_path,
            env={"PYTHONPATH": f"{tmp_path}:{REPO}", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    said = lines()
    assert "2 slow tests left out; --all runs them, and parity_tests/table.toml names what stands for each" in said
    assert "3 passed" in said[-1]
    said = lines("--all")
    assert "left out" not in "\n".join(said) and "8 passed" in said[-1]
