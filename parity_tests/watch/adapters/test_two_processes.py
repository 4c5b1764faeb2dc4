"""`watch_trainer` and `watch_accelerate` on two gloo processes, with the real packages."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.parity_tests.watch.processes import answers

AGREED = "agreed in 2 checks against your own module"
CASES: dict[str, tuple[str, int | None, set[str], str]] = {
    "accelerate": (AGREED, None, set(), ""),
    "accelerate, past it": ("disagreed", 1, {"gradients"}, "right direction, 2 times the right length"),
    "trainer": (AGREED, None, set(), ""),
    "trainer, bf16": (AGREED, None, set(), ""),
    "trainer, own tokens": ("disagreed", 1, {"gradients", "loss"}, ""),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run on_two_processes.py; return the answers of each process, by case."""
    return answers("adapters.on_two_processes", str(tmp_path_factory.mktemp("two")))


@pytest.mark.parametrize("case", CASES)
def test_two_processes_give_one_verdict(case: str, told: list[dict[str, Any]]) -> None:
    """Past the accelerator, gradients are twice the mean; own tokens are each process's, in place of all processes'."""
    headline, step, stages, words = CASES[case]
    found = told[0][case]
    assert found == told[1][case]
    assert found["headline"].startswith(headline), found
    assert found["step"] == step
    assert set(found["stages"]) == stages
    assert words in (found["cause"] or "")
    assert {"loss/loss", "weights/ranks", "reduction/ranks", "update/ranks"} <= set(found["compared"])
