"""`lockstep calibrate`: bounds of clean checks on this machine, and how later checks use them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.core.errors import UserError
from lockstep.core.parity.measures import calibrated_bounds
from lockstep.core.parity.measures import here as of_this_machine
from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.parity_tests.tiny import tiny_config


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set a folder of its own for calibrations."""
    monkeypatch.setenv(of_this_machine.FOLDER, str(tmp_path / "kept"))
    calibrated_bounds.table.cache_clear()
    yield tmp_path / "kept"
    calibrated_bounds.table.cache_clear()


def test_what_was_measured_here_is_the_basis_of_later_checks(
    here: Path, lockstep: Lockstep, run_file: Path, kept: Path
) -> None:
    done = lockstep("calibrate", run_file, "--checks", 1, "--between", 0)
    assert done.code == 0, done.err
    (file,) = kept.iterdir()
    assert str(file) in done.out
    rows = json.loads(file.read_text())["rows"]
    assert {"forward/logits", "gradients/together", "update"} <= rows.keys()
    assert rows["forward/logits"]["sharp"]["draws"] == 1
    calibrated_bounds.table.cache_clear()
    assert lockstep("parity", run_file, "--steps", 1, "--json", "verdict.json").code == 0
    stages = json.loads((here / "verdict.json").read_text())["stages"]
    (logits,) = (s for s in stages if (s["stage"], s["phase"], s["scope"]) == ("logits", "forward", "local"))
    assert all("calibrated on this machine, 1 checks" in m["basis"] for m in logits["measures"])


def rows(distance: float) -> of_this_machine.Here:
    row = {"log_excess": 0.0, "distance": distance, "gain": 0.0, "draws": 3}
    return of_this_machine.Here({"forward/q": row}, 3, "2026-01-01")


def test_a_bound_is_never_narrower_than_shipped_and_wider_in_words(kept: Path) -> None:
    shipped = calibrated_bounds.shipped()["bf16/eager"]["forward/q"]
    of_this_machine.write("bf16/eager", rows(0.0))
    assert calibrated_bounds.table()["bf16/eager"]["forward/q"].distance == shipped.distance
    assert calibrated_bounds.widened("bf16/eager", rows(0.0)) == ()
    of_this_machine.write("bf16/eager", rows(3.0))
    calibrated_bounds.table.cache_clear()
    assert calibrated_bounds.table()["bf16/eager"]["forward/q"].distance == 3.0
    (told,) = calibrated_bounds.widened("bf16/eager", rows(3.0))
    assert told == f"forward/q: distance: {shipped.distance:.3g} → 3"
    assert calibrated_bounds.table()["fp32/eager"] == calibrated_bounds.shipped()["fp32/eager"]


def test_what_was_measured_on_a_gpu_is_no_bound_of_the_cpu(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = "bf16/eager" + of_this_machine.ON_GPU
    config = tiny_config("bf16")
    assert calibrated_bounds.recipe_of(config.model_copy(update={"device": "cuda"})) == on_gpu
    assert calibrated_bounds.recipe_of(config.model_copy(update={"device": "cpu"})) == "bf16/eager"
    monkeypatch.setattr(of_this_machine, "gpu_name", lambda: "NVIDIA H200")
    of_this_machine.write(on_gpu, rows(3.0))
    calibrated_bounds.table.cache_clear()
    assert calibrated_bounds.table()[on_gpu]["forward/q"].distance == 3.0
    assert calibrated_bounds.table()["bf16/eager"] == calibrated_bounds.shipped()["bf16/eager"]
    assert calibrated_bounds.measured_under("fp8_rowwise/eager" + of_this_machine.ON_GPU, "forward/attn") == on_gpu
    (told,) = calibrated_bounds.widened(on_gpu, rows(3.0))
    assert told.endswith("→ 3")
    monkeypatch.setattr(of_this_machine, "gpu_name", lambda: "NVIDIA B200")
    assert of_this_machine.read(on_gpu) is None


def test_no_gpu_is_looked_for_where_nothing_was_measured(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_this_machine, "gpu_name", lambda: pytest.fail("asked for the GPU's name"))
    assert calibrated_bounds.table().keys() > calibrated_bounds.shipped().keys()


def test_what_was_measured_under_other_casts_counts_there_alone(kept: Path) -> None:
    kind = "gradients/qk"
    shipped = calibrated_bounds.shipped()["bf16/eager"][kind]
    other = kind + calibrated_bounds.OTHER_PLAN
    measured = of_this_machine.Here({other: replace(shipped, gain=2 * shipped.gain).to_json()}, 4, "2026-11-25")
    assert any(line.startswith(f"{other}: gain") for line in calibrated_bounds.widened("bf16/eager", measured))
    of_this_machine.write("bf16/eager", measured)
    calibrated_bounds.table.cache_clear()
    own, wider = (calibrated_bounds.limits("bf16/eager", name, 4096).gain for name in (kind, other))
    assert wider > own == calibrated_bounds.limits("bf16/eager", kind, 4096).gain
    assert "calibrated on this machine" in calibrated_bounds.extremes_of("bf16/eager", other).where
    assert not calibrated_bounds.extremes_of("bf16/eager", kind).where


def test_a_file_that_was_changed_is_refused(kept: Path) -> None:
    path = of_this_machine.write("bf16/eager", rows(1.0))
    path.write_text(path.read_text().replace("1.0", "9.0"))
    with pytest.raises(UserError, match="lockstep calibrate"):
        of_this_machine.read("bf16/eager")


def test_another_machine_has_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    path = of_this_machine.write("bf16/eager", rows(1.0))
    monkeypatch.setattr(of_this_machine, "machine", lambda: {"machine": "another"})
    assert of_this_machine.path_of("bf16/eager") != path
    assert of_this_machine.read("bf16/eager") is None
    monkeypatch.setenv(of_this_machine.FOLDER, "off")
    with pytest.raises(UserError, match="is off"):
        of_this_machine.write("bf16/eager", rows(1.0))


def test_where_a_shipped_bound_does_not_hold_nothing_is_kept(
    here: Path, lockstep: Lockstep, run_file: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if kernels here gave norms whose error is larger than any bound."""
    monkeypatch.setattr(calibrated_bounds, "FP32_LIMIT", 0.0)
    monkeypatch.setattr(calibrated_bounds, "LEAST_OF_SUMS", 1e-9)
    monkeypatch.setattr(calibrated_bounds, "MARGIN", 1e-9)
    done = lockstep("calibrate", run_file, "--checks", 1, "--between", 0)
    assert done.code == 1
    assert "--widen" in done.err
    assert not kept.exists()
    assert lockstep("calibrate", run_file, "--checks", 1, "--between", 0, "--widen").code == 0
    assert len(list(kept.iterdir())) == 1
