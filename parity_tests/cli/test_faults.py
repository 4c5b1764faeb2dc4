"""`lockstep parity --candidate`: required faults end with exit code 1 in step 1; honest trainers with 0."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lockstep.parity_tests import kept_references
from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.parity_tests.faults import CATALOG, Fault

FAULTS = Path(__file__).resolve().parents[1] / "faults"
REQUIRED = [fault for fault in CATALOG if fault.required]


def test_nine_faults_are_required() -> None:
    assert len(REQUIRED) == 9


@pytest.mark.parametrize("fault", REQUIRED, ids=lambda fault: fault.name)
def test_a_required_fault_is_caught_in_the_first_step(
    fault: Fault, lockstep: Lockstep, run_file: Path, tmp_path: Path
) -> None:
    file = FAULTS / f"{fault.make.__module__.rpartition('.')[2]}.py"
    verdict = tmp_path / "verdict.json"
    said = lockstep(
        "parity", run_file, "--steps", 1, "--quick", "--candidate", f"{file}:{fault.name}", "--json", verdict
    )  # fmt: skip
    assert said.code == 1, said
    assert not said.err
    found = json.loads(verdict.read_text())
    assert (found["verdict"], found["first_bad_step"], found["origin"]["stage"]) == ("disagreed", 1, fault.stage)
    assert f"first bad step 1; origin: {fault.stage} ({fault.phase}" in said.out


def test_an_alarm_runs_the_step_again_finds_the_cause_and_packs_the_step(
    lockstep: Lockstep, run_file: Path, tmp_path: Path
) -> None:
    verdict, capsules = tmp_path / "verdict.json", tmp_path / "capsules"
    candidate = ("--candidate", f"{FAULTS / 'loss.py'}:OneGradientScaled")
    said = lockstep("parity", run_file, "--steps", 1, *candidate, "--json", verdict, "--capsules", capsules)
    assert said.code == 1, said
    found = json.loads(verdict.read_text())
    assert "gives the same bits" in found["cause"] and "present in every variation tried" in found["cause"]
    packed = capsules / "step_000001"
    assert {"about.json", "repro.py", "stage.npz", "verdict.json", "state", "evidence"} <= {
        path.name for path in packed.iterdir()
    }
    assert lockstep("replay", packed, "--run-again").code == 2, "a capsule's word opens no file"
    kept = lockstep("replay", packed)
    assert kept.code == 1 and "from its evidence" in kept.out and "the verdict is the one that was packed" in kept.out
    assert "other versions" not in kept.out
    again = lockstep("replay", packed, *candidate)
    assert again.code == 1 and "the verdict is the one that was packed" in again.out


@pytest.mark.parametrize("candidate", ["torch", "jax"])
def test_an_honest_trainer_agrees(candidate: str, lockstep: Lockstep, run_file: Path, tmp_path: Path) -> None:
    verdict = tmp_path / "verdict.json"
    said = lockstep("parity", run_file, "--steps", 2, "--candidate", candidate, "--json", verdict)
    assert (said.code, said.err) == (0, "")
    assert "verdict: agreed" in said.out
    found = json.loads(verdict.read_text())
    assert (found["verdict"], found["steps"], found["not_covered"]) == ("agreed", [1, 2], found["not_covered"])
    # JAX has no cache of keys, and nothing between a batch and its program.
    lacking = ("sequences", "ranks", *(("sampling", "read back") if candidate == "jax" else ()))
    assert all(any(word in item for word in lacking) for item in found["not_covered"])
    assert found["not_exercised"] == []
    local = {f["stage"] for f in found["stages"] if f["scope"] == "local"}
    assert {"embed", "q_rope", "attn", "act", "logits", "moments", "update"} <= local


def test_torch_is_a_reference_like_any_other(lockstep: Lockstep, run_file: Path, tmp_path: Path) -> None:
    """Torch in FP64 and uncompiled judges torch: every stage, forward and backward, and the update."""
    verdict = tmp_path / "verdict.json"
    said = lockstep("parity", run_file, "--steps", 1, "--reference", "torch", "--json", verdict)
    assert (said.code, said.err) == (0, "")
    found = json.loads(verdict.read_text())
    local = {(f["stage"], f["phase"]) for f in found["stages"] if f["scope"] == "local"}
    assert {("attn", "forward"), ("attn", "backward"), ("logits", "backward"), ("update", "update")} <= local


def test_torch_as_the_reference_finds_faults(
    lockstep: Lockstep, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal a line names at once what takes so long."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    said = lockstep(
        "parity", run_file, "--steps", 1, "--quick", "--reference", "torch",
        "--candidate", f"{FAULTS / 'loss.py'}:OneGradientScaled",
    )  # fmt: skip
    assert said.code == 1
    assert said.err == "checking step 1: its programs are compiled first; this can take minutes …\n"
    assert "first bad step 1; origin: gradients (backward, layer 0, at blocks.0.mlp.down_proj.weight" in said.out


def test_free_running_shows_a_drift_and_judges_nothing(
    lockstep: Lockstep, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The reference makes steps of its own, and no shared session reads how many the run has.
    monkeypatch.setattr(kept_references, "is_jax", lambda backend: False)
    said = lockstep("parity", run_file, "--steps", 3, "--free-running")
    assert said.code == 0
    assert "nothing was judged" in said.out
    assert [line.split()[0] for line in said.out.splitlines() if line.strip()[:1].isdigit()] == ["1", "2", "3"]
