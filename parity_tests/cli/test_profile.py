"""`lockstep profile` on tiny runs: files, words, and one line where it cannot."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from lockstep.core.profile.summary import REST
from lockstep.core.profile.trace import PART, STEP
from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.parity_tests.profile.made import gpu_trace
from lockstep.scripts.commands.profile import nsys
from lockstep.torch_backend.tools import bench
from lockstep.torch_backend.tools.profile import KEPT

PARTS = {"data", "forward", "backward", "clip", "optimizer"}


def test_steps_of_a_run_are_recorded(
    lockstep: Lockstep, run_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The floor is measured as in earnest, on a product of a smaller side: twenty large ones in bf16 take a minute.
    monkeypatch.setitem(bench.SIDE, "cpu", 64)
    done = lockstep("profile", run_file, "--out", "made")
    assert (done.code, done.err) == (0, "")
    with gzip.open(here / "made" / "trace.json.gz") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert sum(name.startswith(STEP) for name in names) == KEPT
    assert {name.removeprefix(PART) for name in names if name.startswith(PART)} == PARTS | {"step", "micro-batch"}
    found = json.loads((here / "made" / "summary.json").read_text())
    assert found["steps"] == KEPT and found["device"] == "cpu" and found["gpu"] is None
    assert set(found["parts"]) == PARTS | {REST} and found["by_kind"]["product"] > 0
    assert 0 < max(found["by_kind"].values()) < found["profiled_seconds"]
    assert found["step_seconds"] > 0 and found["floor_seconds"] > 0 and found["memory"]["peak_rss"] > 0
    page = (here / "made" / "summary.md").read_text()
    assert done.out.startswith(page) and "tokens of" in page and "aten::mm" in page
    assert sorted(path.name for path in (here / "made").iterdir()) == ["summary.json", "summary.md", "trace.json.gz"]


def test_without_data_tokens_are_random(lockstep: Lockstep, run_file: Path, here: Path) -> None:
    done = lockstep("profile", run_file, "--data.path", "nowhere", "--no-floor", "--train.steps", 1, "--top", 2,
                    "--optim.warmup-steps", 0)  # fmt: skip
    assert done.code == 0 and "random tokens: nowhere holds no prepared data" in done.out
    assert "floor" not in done.out and (here / "profiles" / "tiny" / "summary.md").exists()


def test_a_trace_is_summarized(lockstep: Lockstep, here: Path) -> None:
    (here / "trace.json").write_text(json.dumps(gpu_trace()))
    done = lockstep("profile", "--trace", "trace.json", "--out", "said")
    assert done.code == 0 and "communication that no kernel hides" in done.out
    assert (here / "said" / "summary.md").read_text().replace("&lt;", "<") == done.out
    assert lockstep("profile", "--trace", "trace.json", "--top", 1).out.count("nvjet") == 0


def test_what_cannot_be(refused, run_file: Path, here: Path) -> None:
    (here / "file").write_text("mine")
    assert "name either a run file to profile or --trace" in refused("profile")
    assert "either a run file to profile or --trace FILE" in refused("profile", run_file, "--trace", "file")
    assert "is not JSON" in refused("profile", "--trace", "file")
    assert "none is missing" in refused("profile", "--trace", "none")
    assert "it is no file" in refused("profile", "--trace", "/dev/zero")
    assert "leave out the settings and --nvtx" in refused("profile", "--trace", "file", "--nvtx")
    assert "top = 0" in refused("profile", run_file, "--top", 0)
    assert "cannot make file" in refused("profile", run_file, "--out", "file")
    assert "no prepared data" in refused("profile", run_file, "--data.path", "no", "--attention.document-mask", "true")


def test_nsight_records_from_outside(refused, run_file: Path) -> None:
    assert "this run is on the CPU" in refused("profile", run_file, "--nvtx")
    said = nsys(Path("a b"), ["run.toml", "--train.steps", "3"])
    assert said.startswith("nsys profile --trace=cuda,nvtx") and "--capture-range=cudaProfilerApi" in said
    assert said.endswith("--output='a b/nsys' lockstep profile run.toml --train.steps 3 --nvtx")
    assert " torchrun --nproc-per-node 2 -m lockstep profile run.toml" in nsys(Path("a"), ["run.toml"], 2)
