"""`lockstep bench step` and scripts/gpu_check.sh at tiny size on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.core.bench.suite import in_one_line
from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.parity_tests.repository import REPO

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the rows are other ones")
ROWS = ("fp32-eager", "attention-flash-eager")
TINY = str(REPO / "configs/bench-tiny.toml")
KEYS = {
    *("row", "status", "reason", "settings", "tokens", "micro_batch", "wall_seconds", "in_force"),
    *("first_step_seconds", "seconds", "median", "min", "spread", "tokens_per_second", "mfu", "hfu", "peak"),
    *("floor_seconds", "memory", "clocks", "loss", "allocator"),
}


def test_two_rows_resumed_and_one_that_cannot_run(lockstep: Lockstep, here: Path) -> None:
    done = lockstep("bench", "step", "--rows", ROWS[0], "--repeat", "2", "--warmup", "1")
    assert (done.code, done.err) == (0, ""), done
    first = json.loads((here / "bench_step.json").read_text())["series"][0]["rows"]
    done = lockstep("bench", "step", "--rows", *ROWS, "attention-cudnn", "--repeat", "2", "--warmup", "1", "--resume")
    assert (done.code, done.err) == (0, ""), done
    found = json.loads((here / "bench_step.json").read_text())
    assert (found["schema"], found["suite"]) == (1, "step")
    (series,) = found["series"]
    assert series["device"]["kind"] == "cpu" and series["versions"]["torch"] == str(torch.__version__)
    assert series["config"]["model"]["hidden"] == 64 and series["config"]["sequence_length"] == 32
    assert series["floor"]["rates"]["bf16"] > 0 and series["floor"]["bandwidth"] > 0
    rows = {row["row"]: row for row in series["rows"]}
    assert rows[ROWS[0]] == first[0]
    for name in ROWS:
        assert set(rows[name]) == KEYS and rows[name]["status"] == "measured"
        assert len(rows[name]["seconds"]) == 2 and rows[name]["memory"]["peak_rss"] > 2**26
        assert rows[name]["peak"] is None and rows[name]["mfu"] == {} and rows[name]["floor_seconds"] > 0
    assert rows[ROWS[0]]["tokens"] == [3, 32] and rows[ROWS[0]]["in_force"]["program"] == "eager"
    assert rows["attention-cudnn"]["status"] == "refused"
    assert "runs on CUDA alone" in rows["attention-cudnn"]["reason"]
    assert "cannot run here" in done.out and "runs on CUDA alone" in done.out
    assert str(here) not in json.dumps(found) and str(REPO) not in json.dumps(found)
    done = lockstep("bench", "step", "--page", "page.md")
    assert done.code == 0
    page = (here / "page.md").read_text()
    assert "| attention-cudnn |" in page and "RSS" in page and "- attention-cudnn: " in page


def test_gpu_check_at_tiny_size(tmp_path: Path) -> None:
    """Tests, data, parity, bench and page: all in one folder, and no wandb is loaded."""
    (tmp_path / "wandb.py").write_text("raise SystemExit('wandb was loaded')\n")
    done = subprocess.run(
        ["bash", str(REPO / "scripts/gpu_check.sh"), "--tiny", "--minutes", "5", str(tmp_path / "out")],
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path), "COLUMNS": "120"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpu_check: all is good" in done.stdout
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert there >= {
        "gpu_tests.xml",
        "gpu_tests.log",
        "parity_bf16_eager.json",
        "unit_sums.md",
        "bench_step.json",
        "bench_step.md",
    }
    assert json.loads((tmp_path / "out/parity_bf16_eager.json").read_text())["verdict"] == "agreed"
    rows = json.loads((tmp_path / "out/bench_step.json").read_text())["series"][0]["rows"]
    assert [row["status"] for row in rows] == ["measured", "measured", "refused"]


def test_gpu_check_says_what_failed_and_does_not_end_well(tmp_path: Path) -> None:
    """A Python that has every package and cannot do anything: each part is tried, each is named."""
    broken = tmp_path / "python"
    broken.write_text('#!/bin/sh\n[ "$2" = lockstep.scripts.shared.needs ] || exit 7\n')
    broken.chmod(0o755)
    done = subprocess.run(
        ["bash", str(REPO / "scripts/gpu_check.sh"), "--tiny", str(tmp_path / "out")],
        env=os.environ | {"PYTHON": str(broken)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    for part in ("gpu_tests", "parity_bf16_eager", "bench_step"):
        assert f"gpu_check: {part}: exit code 7" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "bf17"], "command line: rows: bf17 is not a row; did you mean bf16?"),
        (["--repeat", "0"], "command line: repeat and warmup: each must be at least 1"),
        (["--minutes", "-1"], "command line: minutes = -1.0: must be a number of at least 0"),
        (
            ["--json", "no/where.json"],
            "command line: json = no/where.json: cannot write there; name a file in an existing folder",
        ),
        ([TINY, "--model.hiden=3"], "command line: model.hiden is not a setting; did you mean model.hidden?"),
    ],
)
def test_refusals(refused, arguments: list[str], said: str) -> None:
    assert refused("bench", "step", *arguments) == said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--every", "0"], "command line: every = 0: must be at least 1"),
        (["--repeats", "0"], "command line: repeats = 0: must be at least 1"),
        (["--threads", "-1"], "command line: threads = -1: must be a number from 0 to 1024"),
        (["--page", "page.md"], "cannot read bench_parity.json: No such file or directory"),
    ],
)
def test_refusals_of_bench_parity(refused, arguments: list[str], said: str) -> None:
    assert refused("bench", "parity", *arguments) == said


def test_bench_alone_names_its_suites(refused) -> None:
    assert refused("bench").startswith("bench is the first word of 6 commands: bench step, bench best, ")
    assert refused("bench", "party") == "bench party is not a command; did you mean bench parity?"


def test_what_a_worker_says_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.core.errors import UserError
    from lockstep.parity_tests.tiny import tiny_config
    from lockstep.scripts.shared.bench_worker import answer
    from lockstep.torch_backend.tools import bench

    job = {"job": "row", "config": tiny_config().model_dump(mode="json"), "warmup": 1, "repeat": 1}
    text = "CUDA out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 79.19 GiB"
    for error, status, reason in [
        (UserError("no such kernel"), "refused", "no such kernel"),
        (torch.OutOfMemoryError(text), "out_of_memory", "CUDA out of memory. Tried to allocate 16.00 GiB."),
        (RuntimeError(f"backend failed: {text}"), "out_of_memory", "backend failed: " + text.split(" GPU ")[0]),
        (ValueError("first\nsecond"), "failed", "ValueError: first"),
    ]:

        def fail(*arguments: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(bench, "measure_steps", fail)
        assert answer(job) == {"status": status, "reason": in_one_line(reason)}
