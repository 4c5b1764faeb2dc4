"""A run that made fewer than half of its configured checks has not been checked, and reports it."""

from __future__ import annotations

import pytest

from lockstep.core.config.schema import ParityConfig, RunConfig
from lockstep.core.parity.modes.coverage import BUSY, coverage
from lockstep.core.run.directory import RunDir
from lockstep.core.run.resume import Changes
from lockstep.parity_tests.core.run_files import record


def agreed(*steps):
    return [{"step": step, "verdict": "agreed"} for step in steps]


def skipped(*steps, reason="it was late"):
    return [{"step": step, "verdict": "skipped", "reason": reason} for step in steps]


@pytest.mark.parametrize(
    ("due", "lines", "enough"),
    [
        ([], [], True),
        ([1], agreed(1), True),
        ([1], skipped(1), False),
        ([1], [], False),
        ([1, 2], agreed(1) + skipped(2), True),
        ([1, 2, 4], agreed(1) + skipped(2, 4), False),
        ([1, 2, 4, 6], agreed(1, 6) + skipped(2), True),
        # A disagreement is a check that was made; one that compared nothing is none.
        ([1, 2], [{"step": 1, "verdict": "disagreed"}, {"step": 2, "verdict": "could_not"}], True),
        ([1, 2, 4], [{"step": n, "verdict": "could_not"} for n in (1, 2, 4)], False),
        # Lines of steps at which only observations were due, and could not be kept.
        ([4], agreed(4) + skipped(1, 2, 3), True),
        ([4], agreed(1, 2, 3) + skipped(4), False),
    ],
)
def test_half_of_those_due_are_enough(due, lines, enough):
    found = coverage(due, lines, "lost")
    assert found.is_enough is enough
    assert found.due == len(due) == found.made + len(found.skipped)


def test_the_line_counts_and_gives_the_first_reason_and_what_helps():
    busy = skipped(6, 8, reason=f"{BUSY} 2 earlier checks")
    found = coverage([1, 2, 4, 6, 8], [*busy, *skipped(4, reason="no such luck"), *agreed(1)], "lost in runs/r")
    assert found.words == (
        "parity checks: 5 due, 1 made, fewer than half; 4 skipped, the first at step 2: lost in runs/r; "
        "2 because the reference is slower: raise parity.every or parity.queue"
    )
    (alone,) = coverage([1], [{"step": 1, "verdict": "could_not"}], "lost").skipped.values()
    assert alone == "nothing could be compared"


CONFIG = RunConfig(name="r", parity=ParityConfig(every=5))


@pytest.fixture
def path(tmp_path):
    with RunDir.create(tmp_path / "r", CONFIG, {"backend": "torch"}) as run:
        for step in range(1, 9):
            run.append_record(record(step))
    return tmp_path / "r"


def resumed(path, step, every=None):
    """Go on after `step`, checking every so many steps from there; the reports of lost lines."""
    said = []
    settings = {} if every is None else {"parity.every": str(every)}
    with RunDir.open(path, write=True, changes=Changes(settings), done=step) as run:
        run.resume_from(step, said.append)
        for made in range(step + 1, step + 5):
            run.append_record(record(made))
    return said


def test_a_check_was_due_by_the_interval_that_its_step_was_made_with(path):
    assert RunDir.open(path).checks_due(20) == [1, 5, 10, 15, 20]
    assert RunDir.open(path).checks_due(9) == [1, 5]
    resumed(path, 8, every=3)
    assert RunDir.open(path).checks_due(20) == [1, 5, 9, 12, 15, 18]
    assert RunDir.open(path).config.parity.every == 3
    resumed(path, 12)
    assert RunDir.open(path).checks_due(20) == [1, 5, 9, 12, 13, 15, 18]
    resumed(path, 14, every=0)
    assert RunDir.open(path).checks_due(20) == [1, 5, 9, 12, 13]
    # Set back before the first change: the last one holds for what is made anew.
    resumed(path, 6, every=2)
    assert RunDir.open(path).checks_due(20) == [1, 5, 7, 8, 10, 12, 14, 16, 18, 20]


def test_checks_that_begin_later_were_not_due_before(path):
    said = resumed(path, 8, every=4)
    assert [line for line in said if "checks that were due" in line] == [
        f"{path / 'parity.jsonl'}: nothing is left of the checks that were due at steps 1, 5: "
        "lost, or under way when the run stopped"
    ]
