"""The exhibits' files: complete, each with a link or unfixed, and at most three lines of Lockstep in a loop."""

from __future__ import annotations

import json
import re

import pytest

from lockstep.core.errors import UserError
from lockstep.parity_tests.repository import REPO
from lockstep.scripts.commands.museum import NAME, VERSION
from lockstep.scripts.museum.child import lines_of_lockstep
from lockstep.scripts.museum.exhibit import Exhibit, chosen, exhibits, read_exhibit
from lockstep.scripts.museum.repro import repro_of
from lockstep.scripts.studies.real_bugs import PAGE, ROWS, page

GOOD = """
title = "A bug"
link = ""
packages = ["one==1.0"]
fixed = ["one==1.1"]
loop = "stub_loop"
acts_at = 1
stage = "gradients"
words = "twice"
what = "It doubles."
"""


def test_a_dozen_and_more_of_which_at_most_two_are_missed() -> None:
    assert len(exhibits()) >= 12
    assert sum(not one.caught for one in exhibits().values()) <= 2


@pytest.mark.parametrize("exhibit", exhibits().values(), ids=lambda one: one.name)
def test_an_exhibit_is_complete(exhibit: Exhibit) -> None:
    assert exhibit.link.startswith("https://github.com/") or (exhibit.unfixed and not exhibit.link)
    assert len(exhibit.name) <= NAME and len(exhibit.version("shipped")) <= VERSION
    re.compile(exhibit.words)
    source = REPO / "scripts/museum/loops" / f"{exhibit.loop}.py"
    assert 1 <= lines_of_lockstep(source.read_text()) <= 3
    assert (repro_of(exhibit.name) is not None) == exhibit.unfixed


def test_the_page_is_of_these_exhibits_and_all_was_as_promised() -> None:
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    assert all(row["as_expected"] for row in rows)
    made = page(rows)
    assert all(f"## {name}\n" in made and f"## {name}\n" in PAGE.read_text() for name in exhibits())
    with pytest.raises(ValueError, match="rows and exhibits differ"):
        page(rows[1:])
    with pytest.raises(ValueError, match="the row is of"):
        page([*rows[1:], rows[0] | {"packages": ["one==1.0"]}])


def test_a_good_file_is_read() -> None:
    assert read_exhibit("good", GOOD).fixed == ("one==1.1",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("title = ", "Invalid value"),
        (GOOD.replace('loop = "stub_loop"\n', ""), "loop is missing"),
        (GOOD + "year = 2025", "year is not a key of an exhibit"),
        (GOOD.replace("one==1.0", "one>=1.0"), "one>=1.0: write a package as name==version"),
        (GOOD.replace('fixed = ["one==1.1"]\n', ""), "without `fixed`, `mended` must describe"),
        (GOOD + "caught = false", "`missed` gives the reason if `caught` is false"),
        (GOOD + 'missed = "why"', "`missed` gives the reason if `caught` is false"),
        (GOOD.replace('words = "twice"\n', ""), "needs `stage` and `words`"),
    ],
)
def test_a_bad_file_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(UserError, match=rf"^exhibit bad: .*{re.escape(said)}"):
        read_exhibit("bad", text)


def test_a_name_that_is_none_gets_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no exhibit is named 'mean_of_mean'; did you mean mean_of_means\?"):
        chosen(["mean_of_mean"])


def test_lines_of_lockstep_are_counted() -> None:
    loop = '"""Watch a loop."""\nfrom lockstep import watch\nw = 1  # watch\nwatcher = watch(m)\nreturn Seen(watcher)\n'
    assert lines_of_lockstep(loop) == 2
