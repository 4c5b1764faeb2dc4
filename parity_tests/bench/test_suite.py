"""Rows one after another: what ends badly is listed and ends nothing else; what is there is not measured again."""

from __future__ import annotations

import json
import sys

import pytest

from lockstep.core.bench.page import cells, page, remarks
from lockstep.core.bench.results import STATUSES, load_results, save_results, series_of
from lockstep.core.bench.rows import BY_NAME, bench_config, chosen
from lockstep.core.bench.suite import Plan, Worker, cannot_fit, in_one_line, measure_rows
from lockstep.core.config.file import load_config
from lockstep.core.errors import UserError
from lockstep.core.plan import fits
from lockstep.parity_tests.repository import REPO

ONE_B = REPO / "configs/llama-1b.toml"
H100 = {"kind": "cuda", "name": "NVIDIA H100 80GB HBM3", "driver": "570.1.2", "power_limit_w": 700.0}
# As torch reports it: 79.1 GiB.
OF_80_GB = {**H100, "memory_bytes": 84_933_000_000}
VERSIONS = {"torch": "2.11.0"}
RATES = {"fp32": 50e12, "bf16": 800e12, "fp8": 1500e12}
MEASURED = {
    "status": "measured",
    "in_force": {},
    "first_step_seconds": 60.0,
    "seconds": [0.52, 0.5, 0.51],
    "clocks": {},
    "memory": {"allocated": 14.9e9, "peak_allocated": 60e9, "reserved": 70e9},
    "loss": 11.8,
}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Machine:
    """Answers for the worker: seconds a row takes, and what it answers."""

    def __init__(self, **answers):
        self.clock, self.answers, self.asked, self.limits = Clock(), answers, [], []

    def __call__(self, job, limit):
        self.asked.append(job["row"])
        self.limits.append(limit)
        seconds, answer = self.answers.get(job["row"].replace("-", "_"), (60.0, MEASURED))
        self.clock.now += seconds
        return dict(answer)


def series(results=None, device=H100):
    results = results or load_results(REPO / "no such file")
    made = series_of(results, device, VERSIONS, bench_config(load_config(ONE_B)))
    made["floor"] = {"rates": RATES, "bandwidth": 2.5e12, "side": 8192, "repetitions": {}}
    return made


def measure(machine, made, *names, **plan):
    def configure(row):
        return load_config(ONE_B, row.overrides("cuda"))

    return list(measure_rows(chosen(names), made, configure, machine, Plan(**plan), machine.clock))


def test_a_row_that_fails_is_listed_with_its_reason_and_the_others_go_on():
    out = {"status": "out_of_memory", "reason": "CUDA out of memory. Tried to allocate 16.00 GiB."}
    machine, made = Machine(bf16=(30.0, out)), series()
    found = measure(machine, made, "fp32-eager", "bf16", "fused")
    assert [row["status"] for row in found] == ["measured", "out_of_memory", "measured"]
    assert machine.asked == ["fp32-eager", "bf16", "fused"]
    assert remarks(chosen([]), made)[0] == f"bf16: {out['reason']}"
    assert cells(BY_NAME["bf16"], found[1], 2048)[4] == "out of memory"
    assert all(row["status"] in STATUSES for row in found)


def test_what_follows_from_the_repetitions():
    made = series()
    (row,) = measure(Machine(), made, "checkpoint-1")
    assert (row["median"], row["min"], row["spread"]) == (0.51, 0.5, pytest.approx(0.02 / 0.51))
    assert row["tokens_per_second"] == pytest.approx(16 * 2048 / 0.51)
    assert row["peak"] == {"precision": "bf16", "flops": 989.4e12}
    assert row["mfu"]["6N"] == pytest.approx(6 * 1_241_581_568 * 16 * 2048 / 0.51 / 989.4e12)
    assert row["hfu"]["6N"] > row["mfu"]["6N"]
    assert row["tokens"] == [16, 2048] and row["settings"] == {"recompute.parts": "block"}
    assert 0.2 < row["floor_seconds"] < 0.51
    drawn = cells(BY_NAME["checkpoint-1"], row, 2048)
    assert drawn[2:5] == ["[16, 2048]", "0.6 s", "0.51 (0.5; 3.9 %)"] and drawn[8] == "bf16 989.4"


def test_resuming_leaves_out_what_is_there():
    machine, made = Machine(), series()
    measure(machine, made, "bf16")
    assert [row["row"] for row in measure(machine, made, "bf16", "fused", resume=True)] == ["fused"]
    assert measure(machine, made, "bf16", "fused", resume=True) == []
    assert len(measure(machine, made, "bf16")) == 1
    assert [row["row"] for row in made["rows"]] == ["fused", "bf16"]


def test_another_device_version_or_model_is_another_series():
    results = load_results(REPO / "no such file")
    first = series(results)
    assert series(results) is first
    config = bench_config(load_config(ONE_B))
    for key in (
        ({**H100, "power_limit_w": 500.0}, VERSIONS, config),
        (H100, {"torch": "2.12.0"}, config),
        (H100, VERSIONS, {**config, "sequence_length": 4096}),
    ):
        assert series_of(results, *key) is not first
    assert len(results["series"]) == 4


def test_a_row_that_would_not_fit_is_left_for_the_next_call():
    """90 seconds for rows of 60: after two, the third would end too late."""
    machine, made = Machine(fp32_eager=(20.0, MEASURED)), series()
    found = measure(machine, made, "fp32-eager", "bf16", "fused", "muon", seconds=90.0)
    assert [row["row"] for row in found] == ["fp32-eager", "bf16"]
    assert machine.limits == [90.0, 70.0]
    assert len(measure(machine, made, "fp32-eager", "bf16", "fused", "muon", seconds=90.0, resume=True)) == 1
    assert len(measure(machine, made, "fp32-eager", "bf16", "fused", "muon", resume=True)) == 1


def test_a_row_that_cannot_fit_by_the_plan_is_not_started():
    machine, made = Machine(), series(device=OF_80_GB)
    found = measure(machine, made, "checkpoint-1", "attention-flash-eager", "attention-fa3-eager")
    assert [row["status"] for row in found] == ["measured", "does_not_fit", "does_not_fit"]
    assert machine.asked == ["checkpoint-1"]
    assert cells(BY_NAME["attention-flash-eager"], found[1], 2048)[4] == "does not fit"
    line = remarks(chosen(["attention-flash-eager"]), made)[0]
    assert line.startswith("attention-flash-eager: the plan: ") and " 84.9 GB; --ignore-plan" in line
    assert measure(machine, made, "attention-flash-eager", resume=True) == []


def test_the_plan_may_be_ignored():
    machine, made = Machine(), series(device=OF_80_GB)
    measure(machine, made, "checkpoint-1", "attention-flash-eager")
    found = measure(machine, made, "checkpoint-1", "attention-flash-eager", resume=True, ignore_plan=True)
    assert [(row["row"], row["status"]) for row in found] == [("attention-flash-eager", "measured")]


def test_a_row_cannot_fit_if_its_plan_needs_more_than_the_device_has():
    config = load_config(ONE_B, BY_NAME["checkpoint-1"].overrides("cuda"))
    needed = fits(config, "h100").peak
    assert cannot_fit(config, {**H100, "memory_bytes": needed}) is None
    assert cannot_fit(config, {**H100, "memory_bytes": needed - 1}) is not None
    assert cannot_fit(config, H100) is None
    by_the_compiler = config.recompute.model_copy(update={"memory_budget": 0.5})
    assert cannot_fit(config.model_copy(update={"recompute": by_the_compiler}), {"memory_bytes": 1}) is None


def test_what_took_too_long_is_tried_again_last():
    late = {"status": "timed_out", "reason": "did not finish within 60 s"}
    machine, made = Machine(bf16=(60.0, late)), series()
    measure(machine, made, "bf16")
    machine.answers.clear()
    found = measure(machine, made, "bf16", "fused", resume=True)
    assert [(row["row"], row["status"]) for row in found] == [("fused", "measured"), ("bf16", "measured")]


@pytest.fixture
def worker(tmp_path):
    with (tmp_path / "log").open("w") as log:
        yield lambda program: Worker([sys.executable, "-c", program], REPO, log)
    assert "── bf16" in (tmp_path / "log").read_text()


JOB = {"job": "row", "row": "bf16"}


def test_a_process_answers(worker):
    program = "import json, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(json.dumps(json.load(sys.stdin)))"
    assert worker(program)(JOB, 60.0) == JOB


@pytest.mark.parametrize(
    ("program", "status", "reason"),
    [
        ("import os; os.abort()", "failed", "ended by signal 6"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "failed",
            "as the system does when memory runs out",
        ),
        ("raise SystemExit(3)", "failed", "ended with 3"),
    ],
)
def test_a_process_that_dies_is_a_failed_row(worker, program, status, reason):
    found = worker(program)(JOB, 60.0)
    assert found["status"] == status and reason in found["reason"]


def test_a_process_that_hangs_is_ended_with_all_that_it_started(worker, tmp_path):
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(tmp_path / 'late')!r}).touch()"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert worker(program)(JOB, 1.0)["status"] == "timed_out"
    import time

    time.sleep(3)
    assert not (tmp_path / "late").exists()


def test_reasons_name_no_folders():
    said = "RuntimeError: cannot load\n /home/somebody/.cache/x/kernel.so (see a/b)"
    assert in_one_line(said) == "RuntimeError: cannot load kernel.so (see a/b)"
    assert len(in_one_line("x" * 500)) == 200


def test_the_file_comes_back_and_others_are_refused(tmp_path):
    results = load_results(tmp_path / "bench.json")
    made = series(results)
    measure(Machine(), made, "bf16")
    save_results(tmp_path / "bench.json", results)
    assert load_results(tmp_path / "bench.json") == json.loads(json.dumps(results))
    for text in ("{}", "[]", "nonsense", '{"schema": 2, "suite": "step", "series": []}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(UserError, match="no JSON of `lockstep bench step`"):
            load_results(tmp_path / "other.json")


def test_the_page_has_every_row_measured_or_not():
    results = load_results(REPO / "no such file")
    empty = page(results)
    assert empty.count("| not measured |") == len(BY_NAME) and "No device has been measured" in empty
    assert "| fp32-eager | FP32, eager | [3, 2048] | 1.234 s | not measured |" in empty
    made = series(results)
    measure(Machine(), made, "bf16")
    full = page(results)
    assert "## NVIDIA H100 80GB HBM3" in full and "driver 570.1.2, power limit 700 W" in full
    assert "0.51 (0.5; 3.9 %)" in full and full.count("| not measured |") == len(BY_NAME) - 1
    assert "| 70.0 | 60.0 | 14.9 |" in full
