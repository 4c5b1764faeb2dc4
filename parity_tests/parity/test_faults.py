"""Every planted fault is caught in the first step and traced to its stage; an honest trainer is not accused."""

from __future__ import annotations

import pytest

from core.parity.evidence import gather, uneven_weights
from core.parity.judge import Reference, judge
from core.parity.stages import PHASES
from core.parity.verdict import Check
from jax_backend.session import JaxBackend
from parity_tests.faults import CATALOG, Fault
from parity_tests.tiny import text_batch, tiny_config
from torch_backend.session import TorchBackend

CONFIG = tiny_config("bf16")


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference.open(JaxBackend(), CONFIG)


def first_check(backend: TorchBackend, reference: Reference) -> Check:
    batch = uneven_weights(text_batch(CONFIG), 0)
    return judge(gather(backend.open(CONFIG), CONFIG, batch), reference)


@pytest.mark.parametrize("fault", CATALOG, ids=lambda f: f.name)
def test_fault_is_caught_and_traced(fault: Fault, reference: Reference) -> None:
    check = first_check(fault.make(), reference)
    assert check.verdict == "disagreed"
    assert check.origin is not None
    assert check.origin.stage == fault.stage


def test_an_honest_trainer_agrees(reference: Reference) -> None:
    check = first_check(TorchBackend(), reference)
    assert check.verdict == "agreed", check.origin


def test_every_stage_has_a_fault_that_trips_it(reference: Reference) -> None:
    """Among projections one stands for all: q, k, v, gate, up, down and o share their check's code."""
    tripped = {f.stage for fault in CATALOG for f in first_check(fault.make(), reference).findings if not f.ok}
    projections = {"q", "k", "v", "o_proj", "gate", "up", "down_proj"}
    assert tripped & projections
    # Eager, in one process; the compiler's link is tripped in test_programs.py, the checkpoint's in test_links.py.
    assert tripped | projections | {"compiler", "reduction", "checkpoint"} == set(PHASES)
