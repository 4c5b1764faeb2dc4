"""`parity.reference_devices` on the command line: one clear line without the devices, a verdict with them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.parity_tests.cli.workspace import Started, checks

FOUR = ("--parity.reference-devices", "4")


@pytest.fixture
def four_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the processes that a test starts."""
    monkeypatch.setitem(os.environ, "JAX_NUM_CPU_DEVICES", "4")


def test_devices_that_are_not_there(refused, run_file: Path) -> None:
    said = (
        "parity.reference_devices = 4000, and JAX finds 1 device (cpu); "
        "JAX_NUM_CPU_DEVICES=4000 cuts a CPU into as many"
    )
    many = ("--parity.reference-devices", "4000")
    assert refused("parity", run_file, "--steps", 1, *many) == said
    assert refused("train", run_file, "--backend", "jax", *many) == said
    assert "reference_devices" in refused("parity", run_file, "--parity.reference-devices", "0")


def test_a_run_is_checked_by_four_and_replayed_by_one(
    lockstep: Lockstep, run_file: Path, here: Path, four_devices: None
) -> None:
    short = ("--train.steps", "4", "--train.micro-batch-size", "4", "--parity.every", "4")
    done = Started(here, "train", str(run_file), *short, *FOUR).end(300)
    assert done.code == 0, done
    assert [check["verdict"] for check in checks(here / "runs" / "tiny")] == ["agreed", "agreed"]
    os.environ.pop("JAX_NUM_CPU_DEVICES")
    done = lockstep("replay", "runs/tiny", "--step", 4)
    assert done.code == 2 and "parity.reference_devices = 4" in done.err
    done = lockstep("replay", "runs/tiny", "--step", 4, "--reference-devices", 1, "--json", "verdict.json")
    assert done.code == 0, done
    assert json.loads((here / "verdict.json").read_text())["verdict"] == "agreed"
    assert "must be at least 1" in lockstep("replay", "runs/tiny", "--reference-devices", 0).err
