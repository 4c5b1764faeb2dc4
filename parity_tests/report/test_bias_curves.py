"""The bias curves are the sums' own, and their bounds those that the engine holds them to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.core.parity.evidence.sketch import K
from lockstep.core.parity.judge import bias
from lockstep.core.parity.measures.calibrated_bounds import independent
from lockstep.core.parity.measures.verdict import Check, Finding, Measure
from lockstep.core.report.bias_curves import KEYS, bias_curves
from lockstep.core.report.checks import Checks

DISTANCE, GAIN = 0.6, 0.4
SIZES = {"blocks.0.attn.q": 5000, "blocks.0.attn_norm.weight": independent((64,)), "final_norm": 256}
STAGES = {"blocks.0.attn.q": "q", "blocks.0.attn_norm.weight": "attn_norm", "final_norm": "final_norm"}


def run(path: Path, checks: int, leaning: str = "") -> tuple[Checks, bias.Bias]:
    """Make a run of `checks` checks of three comparisons; `leaning` is biased by a fifth of the twin's error."""
    rng, sums, read = np.random.default_rng(0), bias.Bias(), Checks()
    for step in range(1, checks + 1):
        findings = []
        for tap, size in SIZES.items():
            n, key = min(size, K), (STAGES[tap], "forward", tap)
            error, truth = rng.normal(0, 1e-3, n), rng.normal(0, 1, n)
            apart = 1e-3 * (rng.normal(0, 0.1, n) + (0.4 if tap == leaning else 0.0))
            sums.add(key, apart, error, truth, np.float32, float(rng.normal(0, 2e-6)))
            one = Measure("twin_distance", 0.1, None, DISTANCE, "calibration")
            findings.append(Finding(*key[:1], tap, "forward", None, "local", (one,), size))
            if measures := sums.measures(key, DISTANCE, GAIN, size):
                findings.append(Finding(*key[:1], tap, "forward", None, "over_steps", measures, size))
        read.add(Check(10 * step, tuple(findings), ()).to_json())
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **sums.to_arrays())  # type: ignore[arg-type]
    return read, sums


def drawn(path: Path, checks: Checks) -> dict[str, Any]:
    notes: list[str] = []
    found = bias_curves(path, checks, notes)
    assert found is not None and notes == [] and found["left"] == 0
    return {curve["tap"]: curve for curve in found["curves"]}


@pytest.mark.parametrize("tap", SIZES)
def test_a_curve_is_that_of_the_sums_and_its_bound_that_of_the_engine(tmp_path, tap):
    checks, sums = run(tmp_path / "bias.npz", 40)
    curve = drawn(tmp_path / "bias.npz", checks)[tap]
    table = sums.curve((STAGES[tap], "forward", tap))
    assert curve["unit"] == "checks" and curve["x"] == table[:, 0].tolist() == list(range(1, 41))
    for name, column in (("bias", 1), ("gain_bias", 2)):
        assert curve[name]["value"] == pytest.approx(table[:, column], rel=1e-3)
        assert curve[name]["recent"] == pytest.approx(table[:, column + 2], rel=1e-3)
        early = bias.LEAST_CHECKS - 1
        assert curve[name]["bound"][:early] == curve[name]["recent_bound"][:early] == [None] * early
        for forget, bounds in zip(bias.MEMORIES, (curve[name]["bound"], curve[name]["recent_bound"]), strict=True):
            for t in range(bias.LEAST_CHECKS, 41):
                weights = forget ** np.arange(t)
                effective = weights.sum() ** 2 / (weights**2).sum()
                expected = bias.limits(effective, DISTANCE, GAIN, SIZES[tap])[column - 1]
                assert bounds[t - 1] == pytest.approx(expected, rel=1e-3)


def test_what_leans_stands_first_and_beyond_its_bound(tmp_path):
    checks, _ = run(tmp_path / "bias.npz", 60, leaning="final_norm")
    curves = list(drawn(tmp_path / "bias.npz", checks).values())
    assert curves[0]["tap"] == "final_norm" and curves[0]["strain"] > 1
    assert all(curve["strain"] < 1 for curve in curves[1:])
    assert curves[0]["bias"]["value"][-1] > curves[0]["bias"]["bound"][-1]


def test_without_the_file_the_checks_own_values_are_drawn(tmp_path):
    checks, sums = run(tmp_path / "bias.npz", 12)
    curve = drawn(tmp_path / "missing.npz", checks)["final_norm"]
    assert curve["unit"] == "steps" and curve["x"] == [10 * t for t in range(bias.LEAST_CHECKS, 13)]
    table = sums.curve(("final_norm", "forward", "final_norm"))[bias.LEAST_CHECKS - 1 :]
    assert curve["bias"]["value"] == pytest.approx(table[:, 1], rel=1e-3)
    assert curve["bias"]["bound"][-1] == pytest.approx(bias.limits(12, DISTANCE, GAIN, 256)[0], rel=1e-3)


def test_sums_of_other_checks_are_not_taken_for_these(tmp_path):
    checks, _ = run(tmp_path / "bias.npz", 12)
    run(tmp_path / "other.npz", 12, leaning="final_norm")
    assert drawn(tmp_path / "other.npz", checks)["final_norm"]["unit"] == "steps"


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"no archive"], ids=["empty", "torn", "text"])
def test_a_damaged_file_is_noted(tmp_path, content):
    checks, _ = run(tmp_path / "bias.npz", 6)
    (tmp_path / "bias.npz").write_bytes(content)
    notes: list[str] = []
    found = bias_curves(tmp_path / "bias.npz", checks, notes)
    assert found is not None and found["curves"][0]["unit"] == "steps"
    assert len(notes) == 1 and notes[0].startswith("bias.npz could not be read")


def test_sums_of_another_version_are_noted(tmp_path):
    checks, sums = run(tmp_path / "bias.npz", 6)
    np.savez(tmp_path / "bias.npz", **(sums.to_arrays() | {"version": np.asarray(99)}))
    notes: list[str] = []
    found = bias_curves(tmp_path / "bias.npz", checks, notes)
    assert found is not None and len(notes) == 1 and "version 99" in notes[0]


def test_too_few_checks_have_no_curves(tmp_path):
    checks, _ = run(tmp_path / "bias.npz", bias.LEAST_CHECKS - 1)
    assert bias_curves(tmp_path / "bias.npz", checks, []) is None
    assert len(SIZES) <= KEYS


def test_a_nan_among_the_sums_is_beyond_any_bound(tmp_path):
    checks, _ = run(tmp_path / "bias.npz", 6)
    cells = checks.measures["bias"]
    cells.value[-1] = float("nan")
    found = bias_curves(tmp_path / "missing.npz", checks, [])
    assert found is not None and found["curves"][0]["strain"] == "inf"
    assert found["curves"][0]["bias"]["value"][-1] is None or found["curves"][0]["bias"]["value"][-1] == "nan"
