"""`lockstep bench peers` at tiny size on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.parity_tests.repository import REPO

TINY = str(REPO / "configs/bench-tiny.toml")
QUICK = ("--rounds", "2", "--warmup", "2", "--threads", "1", "--without", "hugging-face")


def test_a_row_its_file_and_its_page(lockstep: Lockstep, here: Path) -> None:
    done = lockstep("bench", "peers", TINY, "--rows", "fp32-eager", *QUICK)
    assert (done.code, done.err) == (0, ""), done
    assert "lockstep-blas: " in done.out and "of nanogpt" in done.out
    found = json.loads((here / "bench_peers.json").read_text())
    (row,) = found["rows"]
    assert row["status"] == "measured" and set(row["contenders"]) == {"lockstep", "lockstep-blas", "nanogpt"}
    assert str(here) not in json.dumps(found) and str(REPO) not in json.dumps(found)
    done = lockstep("bench", "peers", "--page", "page.md")
    assert done.code == 0 and "## fp32-eager" in (here / "page.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "fp33"], "command line: rows: fp33 is not a row; they are fp32-eager, bf16-eager, "),
        (["--without", "keras"], "command line: without: keras is nobody; they are lockstep-blas, nanogpt, "),
        (["--without", "nanogpt", "hugging-face"], "command line: without: nobody is left to compare with"),
        (["--rounds", "0"], "command line: rounds and warmup: at least one step each is needed"),
        (["--threads", "-1"], "command line: threads = -1: must be a number from 0 to 1024"),
        (["--seconds", "nan"], "command line: seconds = nan: must be a number above 0"),
        ([TINY, "--optim.name", "muon", *QUICK], "bench peers: the peers know no optim.name = 'muon'; "),
        (["--page", "page.md"], "cannot read bench_peers.json: No such file or directory"),
    ],
)
def test_refusals(refused, arguments: list[str], said: str) -> None:
    assert refused("bench", "peers", *arguments).startswith(said)


def test_a_library_that_is_not_there(refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.scripts.commands.bench_peers.find_spec", lambda name: None)
    said = refused("bench", "peers", TINY)
    assert said == (
        "the peer hugging-face needs transformers and accelerate: pip install 'lockstep[peers]', or go on "
        "--without hugging-face"
    )
