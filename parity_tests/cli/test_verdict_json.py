"""`lockstep parity --json`: the promised keys, in JSON that any reader takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lockstep.core.parity.reference.stages import chain
from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.parity_tests.cli.workspace import Done

PROMISED = [
    "schema",
    "verdict",
    "first_bad_step",
    "origin",
    "cause",
    "fitting",
    "stages",
    "not_covered",
    "not_exercised",
]
BESIDE = {"recipe", "candidate", "reference", "steps", "seconds", "origins"}
STAGE = {"stage", "tap", "phase", "layer", "scope", "measures", "size", "unequal", "note", "ok", "step", "role"}
MEASURE = {"name", "value", "low", "high", "basis", "ok"}

POISONED = """
import torch
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession


class Session(TorchSession):
    def accumulate(self, batch):
        result = super().accumulate(batch)
        self.parameters["blocks.1.attn.v_proj.weight"].grad[0, :3] = {poison}
        return result


class Poisoned(TorchBackend):
    session_class = Session


class LossSession(TorchSession):
    def micro_loss(self, tokens, targets, weights, total):
        loss, nll = super().micro_loss(tokens, targets, weights, total)
        return loss * {poison}, nll


class PoisonedLoss(TorchBackend):
    session_class = LossSession
"""


def no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def check(lockstep: Lockstep, run_file: Path, tmp_path: Path, *more: object) -> tuple[Done, dict[str, Any]]:
    file = tmp_path / "verdict.json"
    said = lockstep("parity", run_file, "--steps", 1, "--json", file, *more)
    text = file.read_text()
    assert text.endswith("}\n")
    return said, json.loads(text, parse_constant=no_constant)


def has_promised_shape(found: dict[str, Any]) -> None:
    assert [key for key in found if key not in BESIDE] == PROMISED
    assert set(found) >= BESIDE
    assert found["schema"] == 2
    assert found["cause"] is None or found["verdict"] == "disagreed"
    assert isinstance(found["not_covered"], list)
    assert found["stages"]
    for stage in found["stages"]:
        assert set(stage) == STAGE
        assert stage["phase"] in (chain().phases[stage["stage"]], "backward")
        assert stage["scope"] in ("local", "end_to_end")
        assert stage["measures"]
        assert stage["ok"] == all(m["ok"] for m in stage["measures"])
        for measure in stage["measures"]:
            assert set(measure) == MEASURE
            assert measure["basis"]


def test_agreed(lockstep: Lockstep, run_file: Path, tmp_path: Path) -> None:
    said, found = check(lockstep, run_file, tmp_path)
    assert said.code == 0
    has_promised_shape(found)
    assert (found["verdict"], found["first_bad_step"], found["origin"], found["steps"]) == ("agreed", None, None, [1])
    assert all(stage["ok"] and stage["step"] == 1 for stage in found["stages"])
    assert (found["recipe"], found["candidate"], found["reference"]) == ("bf16/eager", "torch", "jax")


@pytest.mark.parametrize("poison", ["float('nan')", "float('inf')", "float('-inf')"])
def test_gradients_that_are_no_numbers(poison: str, lockstep: Lockstep, run_file: Path, tmp_path: Path) -> None:
    candidate = tmp_path / "poisoned.py"
    candidate.write_text(POISONED.format(poison=poison))
    said, found = check(lockstep, run_file, tmp_path, "--quick", "--candidate", f"{candidate}:Poisoned")
    assert said.code == 1, said
    assert "Traceback" not in said.out + said.err
    has_promised_shape(found)
    assert (found["verdict"], found["first_bad_step"]) == ("disagreed", 1)
    assert found["origin"] == {
        "stage": "gradients", "tap": "blocks.1.attn.v_proj.weight", "phase": "backward", "layer": 1
    }  # fmt: skip
    bad = [s for s in found["stages"] if (s["stage"], s["tap"]) == ("gradients", "blocks.1.attn.v_proj.weight")]
    assert bad and all(not s["ok"] for s in bad if s["scope"] == "end_to_end")
    assert {m["value"] for s in bad for m in s["measures"] if isinstance(m["value"], str)} & {"nan", "inf"}
    fine = [s for s in found["stages"] if s["stage"] == "gradients" and s["tap"].startswith("blocks.0.")]
    assert fine and all(s["ok"] for s in fine)


def test_a_loss_that_is_no_number(lockstep: Lockstep, run_file: Path, tmp_path: Path) -> None:
    candidate = tmp_path / "poisoned.py"
    candidate.write_text(POISONED.format(poison="float('nan')"))
    said, found = check(lockstep, run_file, tmp_path, "--quick", "--candidate", f"{candidate}:PoisonedLoss")
    assert said.code == 1, said
    has_promised_shape(found)
    assert found["origin"]["stage"] in ("loss", "gradients")
