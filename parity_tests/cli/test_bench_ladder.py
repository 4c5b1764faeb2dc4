"""`lockstep bench ladder` at tiny size on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.bench import ladder, ladder_page
from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.parity_tests.repository import REPO

TINY = str(REPO / "configs/bench-tiny.toml")
QUICK = ("--rounds", "2", "--warmup", "2", "--threads", "1", "--kilotokens", "64")
FAULTY = "lockstep.parity_tests.bench.faulty_loaders"


def test_a_ladder_its_file_its_page_and_its_picture(lockstep: Lockstep, here: Path) -> None:
    done = lockstep("bench", "ladder", TINY, *QUICK)
    assert (done.code, done.err) == (0, ""), done
    assert "6 + flash attention: " in done.out
    found = json.loads((here / "bench_ladder.json").read_text())
    (row,) = found["rows"]
    assert row["status"] == "measured" and list(row["rungs"]) == list(ladder.NUMBER)
    assert len({rung["losses"][0] for rung in row["rungs"].values()}) > 1, "bf16 rounds"
    assert str(here) not in json.dumps(found) and str(REPO) not in json.dumps(found)
    done = lockstep("bench", "ladder", "--page", "a page.md")
    assert done.code == 0 and "](a%20page.svg)" in (here / "a page.md").read_text()
    assert (here / "a page.svg").read_text().startswith("<svg")


def test_a_planted_fault_in_a_rung(lockstep: Lockstep, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of the next step, in rung 2."""
    planted: dict[str, dict[str, Any]] = {"ram": {"loader": f"{FAULTY}:OneStepLate"}, "compile": {"settings": {}}}
    rungs = tuple(replace(rung, **planted.get(rung.name, {})) for rung in ladder.RUNGS[:4])
    for module in (ladder, ladder_page):
        monkeypatch.setattr(module, "RUNGS", rungs)
    monkeypatch.setattr(ladder, "NUMBER", {rung.name: number for number, rung in enumerate(rungs, 1)})
    done = lockstep("bench", "ladder", TINY, *QUICK)
    assert done.code == 1, done
    assert "2 + tokens in RAM: not the same work: step 1: its batch is not that of rung 3 (vectorised)" in done.out
    (row,) = json.loads((here / "bench_ladder.json").read_text())["rows"]
    assert [rung["status"] for rung in row["rungs"].values()].count("measured") == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "0"], "command line: rounds and warmup: each must be at least 1"),
        (["--threads", "-1"], "command line: threads = -1: must be a number from 0 to 1024"),
        (["--seconds", "nan"], "command line: seconds = nan: must be a number above 0"),
        (["--lengths", "128", "0"], "command line: lengths = 0: must be a number above 0"),
        ([TINY, "--lengths", "48"], "command line: lengths = 48: a micro-batch of 2 sequences of 32 tokens cannot "),
        (["--kilotokens", "0"], "command line: kilotokens = 0: must be a number from 1 to 4000000"),
        ([TINY, "--attention.document-mask", "true"], "attention.document_mask"),
        ([TINY, "--train.ranks", "2"], "bench ladder: its naive loaders do not support train.ranks = 2; "),
        (["--page", "page.md"], "cannot read bench_ladder.json: No such file or directory"),
    ],
)
def test_refusals(refused, arguments: list[str], said: str) -> None:
    assert said in refused("bench", "ladder", *arguments)
