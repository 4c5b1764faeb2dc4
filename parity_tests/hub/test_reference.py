"""`lockstep parity --reference hf`: a third opinion judges a step, and lists what it does not compare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.parity_tests.cross.test_hugging_face import heads_in_turns, twice_epsilon
from lockstep.parity_tests.loop.runs import SETTINGS, Folder, one_line
from lockstep.scripts import cli


def parity(folder: Folder, policy: str, *more: str) -> int:
    told = {**SETTINGS, "data.path": folder.data, "precision.policy": policy, "train.sequence_length": 29}
    words = [word for key, value in told.items() for word in (f"--{key}", str(value).lower())]
    words = ["parity", str(folder.file), "--steps", "1", "--reference", "hf", "--quick", *words, *more]
    return cli.run([*words, "--capsules", str(folder.path / "capsules")])


@pytest.mark.parametrize("policy", ["fp64", "fp32"])
def test_it_judges_a_step(folder: Folder, policy: str, tmp_path: Path) -> None:
    assert parity(folder, policy, "--json", str(tmp_path / "verdict.json")) == 0
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["verdict"] == "agreed"
    compared = {(stage["stage"], stage["phase"]) for stage in verdict["stages"]}
    assert compared >= {("logits", "forward"), ("nll", "forward"), ("loss", "forward"), ("gradients", "backward")}
    missing = " ".join(verdict["not_covered"])
    assert "single stages: hf runs the model as a whole" in missing
    assert "moments and update: hf has no optimizer" in missing


@pytest.mark.parametrize("plant", [heads_in_turns, twice_epsilon], ids=["heads", "epsilon"])
@pytest.mark.parametrize("policy", ["fp64", "fp32"])
def test_a_mistake_that_both_of_ours_make_is_found(
    plant, policy: str, folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch)
    assert parity(folder, policy) == 1
    assert "disagreed" in capsys.readouterr().out


def test_what_it_cannot_do_is_one_line(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert parity(folder, "bf16") == 2
    assert "hf computes in fp32 and fp64" in one_line(capsys.readouterr().err)
    assert folder.train("one", {"precision.policy": "fp16"}, "--backend", "hf") == 2
    assert "a candidate's module computes in fp32, fp64, or bf16 by autocast" in one_line(capsys.readouterr().err)
    assert not (folder.path / "one").exists()
