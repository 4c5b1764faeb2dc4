"""`lockstep parity --candidate`: required faults end with exit code 1 in step 1; honest trainers with 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parity_tests.cli.conftest import Lockstep, Place
from parity_tests.faults import CATALOG, Fault

FAULTS = Path(__file__).resolve().parents[1] / "faults"
REQUIRED = [fault for fault in CATALOG if fault.required]


def test_nine_faults_are_required() -> None:
    assert len(REQUIRED) == 9


@pytest.mark.parametrize("fault", REQUIRED, ids=lambda fault: fault.name)
def test_a_required_fault_is_caught_in_the_first_step(
    fault: Fault, lockstep: Lockstep, place: Place, tmp_path: Path
) -> None:
    file = FAULTS / f"{fault.make.__module__.rpartition('.')[2]}.py"
    verdict = tmp_path / "verdict.json"
    said = lockstep(
        "parity", place.config, "--steps", 1, "--candidate", f"{file}:{fault.name}", "--json", verdict
    )  # fmt: skip
    assert said.code == 1, said
    assert not said.err
    found = json.loads(verdict.read_text())
    assert (found["verdict"], found["first_bad_step"], found["origin"]["stage"]) == ("disagreed", 1, fault.stage)
    assert f"first bad step 1; origin: {fault.stage} at " in said.out


@pytest.mark.parametrize("candidate", ["torch", "jax"])
def test_an_honest_trainer_agrees(candidate: str, lockstep: Lockstep, place: Place, tmp_path: Path) -> None:
    verdict = tmp_path / "verdict.json"
    said = lockstep("parity", place.config, "--steps", 2, "--candidate", candidate, "--json", verdict)
    assert (said.code, said.err) == (0, "")
    assert "verdict: agreed" in said.out
    found = json.loads(verdict.read_text())
    assert (found["verdict"], found["steps"], found["not_covered"]) == ("agreed", [1, 2], [])
    local = {f["stage"] for f in found["stages"] if f["scope"] == "local"}
    assert {"embed", "q_rope", "attn", "act", "logits", "moments", "update"} <= local


def test_a_reference_that_runs_no_single_stages_says_what_it_leaves_out(
    lockstep: Lockstep, place: Place, tmp_path: Path
) -> None:
    """Torch as the reference compares NLL, loss and gradients; forward stages and update are listed, not agreed."""
    verdict = tmp_path / "verdict.json"
    said = lockstep("parity", place.config, "--steps", 1, "--reference", "torch", "--json", verdict)
    assert (said.code, said.err) == (0, "")
    found = json.loads(verdict.read_text())
    stages = {f["stage"] for f in found["stages"]}
    assert {"nll", "loss", "gradients"} <= stages
    assert not stages & {"embed", "q_rope", "attn", "act", "logits", "moments", "update"}
    assert {item.partition(":")[0] for item in found["not_covered"]} == {"forward", "update"}
    assert all(f"not covered: {item}" in said.out for item in found["not_covered"])


def test_what_torch_as_the_reference_covers_it_judges(lockstep: Lockstep, place: Place) -> None:
    said = lockstep(
        "parity", place.config, "--steps", 1, "--reference", "torch",
        "--candidate", f"{FAULTS / 'loss.py'}:OneGradientScaled",
    )  # fmt: skip
    assert said.code == 1
    assert "first bad step 1; origin: gradients at blocks.0.mlp.down_proj.weight" in said.out
