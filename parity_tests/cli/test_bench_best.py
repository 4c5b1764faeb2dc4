"""`lockstep bench best` at tiny size on the CPU, with real measurement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.core.config.file import load_config
from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.parity_tests.repository import REPO

TINY = str(REPO / "configs/bench-tiny.toml")


def test_a_search_with_one_that_cannot_run(lockstep: Lockstep, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuDNN's attention is refused by the session: struck out, and the other wins."""
    levers = {
        "micro-batch": {"2": {"train.micro_batch_size": "2"}},
        "attention": {name: {"attention.kernel": name} for name in ("cudnn", "auto")},
        "program": {"eager": {"compile.enabled": "false"}},
    }
    monkeypatch.setattr("lockstep.scripts.commands.bench_best.space", lambda *arguments: levers)
    done = lockstep("bench", "best", TINY, "--minutes", "3", "--few", "1", "--many", "1", "--out", "found.toml")
    assert (done.code, done.err) == (0, ""), done
    found = json.loads((here / "found.json").read_text())
    assert {row["choices"]["attention"]: row["status"] for row in found["measured"]} == {
        "cudnn": "refused",
        "auto": "measured",
    }
    assert found["winner"]["attention"] == "auto" and "runs on CUDA alone" in found["differences"][0]["reason"]
    assert str(here) not in json.dumps(found) and str(REPO) not in json.dumps(found)
    config = load_config(here / "found.toml")
    assert not config.compile.enabled and config.model.hidden == 64 and config.device == "auto"
    assert "lockstep train found.toml" in done.out and "## Why" in (here / "found.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to search for; name a run file: lockstep bench best configs/llama-1b.toml"),
        ([TINY, "--minutes", "0"], "command line: minutes = 0.0: must be a number above 0"),
        ([TINY, "--few", "0"], "command line: few = 0: must be at least 1"),
        (
            [TINY, "--out", "no/where.toml"],
            "command line: out = no/where.toml: cannot write there; name a file in an existing folder",
        ),
        ([TINY, "--model.hiden=3"], "command line: model.hiden is not a setting; did you mean model.hidden?"),
        ([TINY, "--gpu", "h1000"], "command line: gpu = h1000: not known; did you mean h100? known are "),
    ],
)
def test_refusals(refused, arguments: list[str], said: str) -> None:
    assert refused("bench", "best", *arguments).startswith(said)


def test_gpu_check_finds_both_and_compares_their_curves(tmp_path: Path) -> None:
    """On the CPU at tiny size: a search for bf16, a search for FP8, real steps of both winners."""
    for kind in ("best_bf16", "best_fp8", "curves"):
        done = subprocess.run(
            ["bash", str(REPO / "scripts/gpu_check.sh"), "--tiny", "--minutes", "2", "--only", kind, str(tmp_path)],
            env=os.environ | {"PYTHON": sys.executable, "COLUMNS": "120"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    for kind, policy in (("bf16", "bf16"), ("fp8", "fp8_tensorwise")):
        assert load_config(tmp_path / f"best_{kind}.toml").precision.policy == policy
    assert "over the last quarter: " in done.stdout and "DISAGREED" not in done.stdout
