"""`lockstep bench data` at small size on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.parity_tests.repository import REPO

SMALL = ("--rows", "16x128", "--kilotokens", "2000", "--rounds", "1")


def test_a_row_its_file_its_page_and_its_picture(lockstep: Lockstep, here: Path) -> None:
    done = lockstep("bench", "data", *SMALL, "--without", "lockstep-ahead", "mmap", "dataloader")
    assert (done.code, done.err) == (0, ""), done
    assert "lockstep-mapped: " in done.out and "of nanogpt" in done.out
    found = json.loads((here / "bench_data.json").read_text())
    (row,) = found["rows"]
    ours = {"lockstep", "lockstep-mapped", "lockstep-mixture"}
    assert row["status"] == "measured" and set(row["contenders"]) == {*ours, "nanogpt"}
    assert set(found["first"]) == set(row["contenders"]) and len(found["resume"]["at"]) == 4
    assert str(here) not in json.dumps(found) and str(REPO) not in json.dumps(found)
    done = lockstep("bench", "data", "--page", "a page.md")
    assert done.code == 0 and "](a%20page.svg)" in (here / "a page.md").read_text()
    assert (here / "a page.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "1x1"], "command line: rows: 1x1 is not a row; they are 16x128, 64x1024, 512x1024"),
        (["--without", "lockstep"], "command line: without: lockstep is not a contender; they are lockstep-ahead, "),
        (["--rounds", "0"], "command line: rounds = 0: must be a number from 1 to 10000"),
        (["--seconds", "nan"], "command line: seconds = nan: must be a number above 0"),
        (["--kilotokens", "7"], "command line: kilotokens = 7: must be a number from 2000 to 4000000"),
        (["--page", "page.md"], "cannot read bench_data.json: No such file or directory"),
    ],
)
def test_refusals(refused, arguments: list[str], said: str) -> None:
    assert refused("bench", "data", *arguments).startswith(said)
