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


def test_an_alarm_over_gradients_that_are_nan_without_watch_is_no_false_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuDNN's attention gave on an H100: NaN for queries that see padding alone."""
    made = watch_alarms.model_of

    def with_nan(family: str, draw: watch_alarms.Draw) -> Any:
        model = made(family, draw)
        next(model.parameters()).register_hook(lambda gradient: gradient * float("nan"))
        return model

    monkeypatch.setattr(watch_alarms, "model_of", with_nan)
    row = watch_alarms.run(("loop", "llama", "fp32", 3, False), "cpu")
    assert row["accused"] and row["not_finite"] == ["model.embed_tokens.weight"]
    page = watch_alarms.page([row], "cpu")
    assert "**0 of 0 checks were accused.**" in page and "Not counted, as the alarm is right: loop, llama" in page


def test_finite_gradients_are_found_finite() -> None:
    assert watch_alarms.not_finite(("loop", "mistral", "bf16", 4, False), "cpu") == []
