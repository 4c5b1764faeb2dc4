"""The reference on four devices computes what it computes on one, and each device holds a quarter of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from lockstep.core.errors import UserError
from lockstep.jax_backend.backend import JaxBackend
from lockstep.jax_backend.sharding import Shards
from lockstep.parity_tests.jax_backend.sharded import DEVICES, FAULTS, PARTS, config_of
from lockstep.parity_tests.repository import REPO

# FP64: at most 256 tokens, or 258 classes, are summed in another order (256 · 2⁻⁵³ = 3e-14), a few sums deep.
EXACT = 1e-13
# AdamW divides each element by its own size: one of 1e-3 of the largest gradient is off by 1e3 as much.
MOVED = 1e3 * EXACT


def in_four(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a Python module in a process whose CPU is four devices."""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(DEVICES), "PYTHONPATH": str(REPO)}
    return subprocess.run([sys.executable, "-m", *command], env=environment, capture_output=True, text=True)


# Results that the tests that run by default read (slow_tests.toml); the process of the others is started if they run.
BY_DEFAULT = frozenset({"places", "one"})


class Found:
    """Hold the results of the process with four devices, by part: one for the default run, one for the others."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}

    def __getitem__(self, part: str) -> Any:
        if part not in self.parts:
            parts = [name for name in PARTS if (name in BY_DEFAULT) == (part in BY_DEFAULT)]
            done = in_four("lockstep.parity_tests.jax_backend.sharded", *parts)
            assert done.returncode == 0, done.stderr
            self.parts |= json.loads(done.stdout)
        return self.parts[part]


@pytest.fixture(scope="module")
def found() -> Found:
    return Found()


@pytest.mark.parametrize("variant", ["tied", "untied-biased"])
def test_loss_and_gradients_are_those_of_one_device(found, variant):
    assert max(found[f"exact {variant}"].values()) <= EXACT


def test_documents_are_kept_apart(found):
    assert found["documents"] <= EXACT


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_training_agrees(found, name):
    trained = found[f"trained {name}"]
    assert trained["loss"] <= EXACT and trained["weights"] <= MOVED


@pytest.mark.parametrize(("policy", "most"), [("fp32", 2), ("bf16", 1), ("fp8_tensorwise", 1)])
def test_under_a_policy_less_moves_than_the_policy_costs(found, policy, most):
    """Sums are FP32's, and rounded after they are made over the devices. FP32 itself is as far off from either."""
    assert found[f"under {policy}"]["largest"] <= most


def test_each_device_holds_its_part(found):
    held, whole = found["memory"]["held"], found["memory"]["whole"]
    assert held == [whole // DEVICES] * DEVICES


def test_how_arrays_are_cut(found):
    cut = [(None, 0), (0, None), (0, None), (None, 0), (None, None), (None,), (0,)]
    words = {(None, 0): "P(None, 'shards')", (0, None): "P('shards',)", (0,): "P('shards',)"}
    assert found["places"]["parameters"] == [words.get(where, "P()") for where in cut]
    assert found["places"]["rows"] == {"8": "P('shards',)", "2": "P()"}


def test_one_device_is_left_as_it_was(found):
    assert found["one"]
    one = Shards(1)
    assert one.of((8, 8)) is None and one.in_force() == {}
    rows, tap = object(), lambda name, value: value
    assert one.rows(rows) is rows and one.tap(tap) is tap


def test_what_else_a_session_does(found):
    assert found["evaluated"] <= EXACT and found["stored"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_contribution_is_noticed(found, fault):
    assert found[f"fault {fault}"] > 1e6 * EXACT


def test_more_devices_than_there_are():
    config = config_of(1000)
    for ask in (JaxBackend().open, JaxBackend().describe):
        with pytest.raises(UserError, match=r"^parity.reference_devices = 1000, and JAX finds [^\n]*$"):
            ask(config)
