"""The study of `watch`'s false alarms counts what it declares: whole checks, and faults that are found."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.scripts.studies import watch_alarms


def test_a_clean_run_counts_whole_checks_and_accuses_nobody() -> None:
    row = watch_alarms.run(("loop", "gemma2", "autocast", 3, False), "cpu")
    assert (row["checks"], row["accused"], row["left_out"]) == (watch_alarms.STEPS, [], [])


def test_a_planted_fault_is_named_in_the_first_step() -> None:
    row = watch_alarms.run(("loop", "mistral", "bf16", 4, True), "cpu")
    assert row["fault"]
    assert watch_alarms.named(row), row["accused"]


@pytest.mark.parametrize(
    "accused",
    [
        [],
        [{"step": 2, "broken": ["gradients head"]}],
        [{"step": 1, "broken": ["gradients head", "gradients tail"]}],
        [{"step": 1, "broken": ["update head"]}],
    ],
)
def test_other_accusations_do_not_name_the_fault(accused: list[dict[str, Any]]) -> None:
    assert not watch_alarms.named({"fault": "head", "accused": accused})


def test_the_page_counts_accusations_of_clean_runs() -> None:
    row = {"cell": ["loop", "llama", "fp32", 0, False], "fault": "", "checks": 4, "left_out": [], "nearest": 0.5}
    page = watch_alarms.page([row | {"accused": [{"step": 1, "broken": ["loss step"]}]}], "cpu")
    assert "**1 of 4 checks were accused.**" in page
    assert "| loop | llama | 1 of 4 | 0 of 0 | 0 of 0 | 0.50 |" in page
