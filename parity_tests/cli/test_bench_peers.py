"""`lockstep bench peers` at tiny size on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.parity_tests.repository import REPO
from lockstep.scripts.commands.bench_peers import _contenders

TINY = str(REPO / "configs/bench-tiny.toml")
QUICK = ("--rounds", "2", "--warmup", "2", "--threads", "1", "--without", "hugging-face", "torchtitan")


def test_a_row_its_file_and_its_page(lockstep: Lockstep, here: Path) -> None:
    done = lockstep("bench", "peers", TINY, "--rows", "fp32-eager", *QUICK)
    assert (done.code, done.err) == (0, ""), done
    assert "lockstep-blas: " in done.out and "of nanogpt" in done.out
    found = json.loads((here / "bench_peers.json").read_text())
    (model,) = found["models"]
    (row,) = model["rows"]
    assert row["status"] == "measured" and set(row["contenders"]) == {"lockstep", "lockstep-blas", "nanogpt"}
    assert str(here) not in json.dumps(found) and str(REPO) not in json.dumps(found)
    done = lockstep("bench", "peers", "--page", "page.md")
    assert done.code == 0 and "### 0.107M, fp32-eager" in (here / "page.md").read_text()
    assert "![" in (here / "page.md").read_text() and "fp32-eager" in (here / "page.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "fp33"], "command line: rows: fp33 is not a row; they are fp32-eager, bf16-eager, "),
        (["--without", "keras"], "command line: without: keras is not a contender; they are lockstep-blas, nanogpt, "),
        (
            ["--without", "nanogpt", "hugging-face", "torchtitan"],
            "command line: without: no contender is left; leave fewer out",
        ),
        (["--rounds", "0"], "command line: rounds and warmup: each must be at least 1"),
        (["--threads", "-1"], "command line: threads = -1: must be a number from 0 to 1024"),
        (["--seconds", "nan"], "command line: seconds = nan: must be a number above 0"),
        ([TINY, "--optim.name", "muon", *QUICK], "bench peers: the peers do not support optim.name = 'muon'; "),
        (["--page", "page.md"], "cannot read bench_peers.json: No such file or directory"),
    ],
)
def test_refusals(refused, arguments: list[str], said: str) -> None:
    assert refused("bench", "peers", *arguments).startswith(said)


def test_a_library_that_is_not_there_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.scripts.commands.bench_peers.find_spec", lambda name: None)
    found, absent = _contenders(())
    assert [one.name for one in found] == ["lockstep", "lockstep-blas", "nanogpt"]
    assert absent == {
        "hugging-face": "not installed (pip install 'lockstep[peers]')",
        "torchtitan": "not installed (pip install 'lockstep[torchtitan]')",
    }


def test_with_no_peer_installed_there_is_nothing_to_compare_with(refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.scripts.commands.bench_peers.find_spec", lambda name: None)
    assert refused("bench", "peers", TINY, "--without", "nanogpt").startswith(
        "command line: without: no contender is left"
    )
