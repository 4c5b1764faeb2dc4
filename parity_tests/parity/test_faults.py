"""Every planted fault is caught in the first step and traced to its stage; an honest trainer is not accused."""

from __future__ import annotations

from functools import cache

import pytest

from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.evidence.probe import probe_of
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.parity.reference.stages import chain, forward_stages, library_heads
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults import CATALOG, Fault
from lockstep.parity_tests.faults.device import WeightsShiftedOnTheWay
from lockstep.parity_tests.faults.state import BlocksExchangedOnLoad
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend

pytestmark = pytest.mark.usefixtures("in_one_process")
CONFIG = tiny_config("bf16")


@cache
def reference(config: RunConfig) -> Reference:
    return Reference.open(JaxBackend(), config)


def first_check(backend: TorchBackend, config: RunConfig = CONFIG) -> Check:
    batch = uneven_weights(text_batch(config), 0)
    return judge(gather(backend.open(config), config, batch), reference(config))


@cache
def check_of(name: str) -> Check:
    """Judge the first step of a fault; two tests read it."""
    (fault,) = (fault for fault in CATALOG if fault.name == name)
    return first_check(fault.make(), fault.configured(CONFIG))


@pytest.mark.parametrize("fault", CATALOG, ids=lambda f: f.name)
def test_fault_is_caught_and_traced(fault: Fault) -> None:
    check = check_of(fault.name)
    assert check.verdict == "disagreed"
    assert check.origin is not None
    assert check.origin.stage == fault.stage


@pytest.mark.parametrize("training", [False, True], ids=["parity", "training"])
def test_shifted_weights_are_named_although_those_of_the_step_are_equal(training: bool) -> None:
    batch = text_batch(CONFIG)
    assert (batch.weights == 1).all()
    session = WeightsShiftedOnTheWay().open(CONFIG)
    probe = probe_of(batch.cut(CONFIG.train)[0], CONFIG) if training else None
    origin = judge(gather(session, CONFIG, batch, probe), reference(CONFIG)).origin
    assert origin is not None and origin.stage == "tokens"
    assert origin.tap == "weights of the examined micro-batch on the device"


@pytest.mark.parametrize(("layers", "named"), [(3, ("params/blocks.0.attn.q_proj.weight", 0)), (2, ("state", None))])
def test_a_checkpoint_that_loses_some_blocks_is_named_with_the_first(
    layers: int, named: tuple[str, int | None]
) -> None:
    config = tiny_config("fp32", layers=layers)
    origin = first_check(BlocksExchangedOnLoad(), config).origin
    assert origin is not None and origin.stage == "checkpoint"
    assert (origin.tap, origin.layer) == named


@pytest.mark.parametrize("settings", [{}, *({f.name: f.settings for f in CATALOG if f.settings}).values()])
def test_an_honest_trainer_agrees(settings: dict[str, str]) -> None:
    check = first_check(TorchBackend(), Fault(TorchBackend, "loss", settings=settings).configured(CONFIG))
    assert check.verdict == "agreed", check.origin


def test_every_stage_has_a_fault_that_trips_it() -> None:
    """Among projections one stands for all: q, k, v, gate, up, down and o share their check's code."""
    tripped: set[str] = set()
    for fault in (fault for fault in CATALOG if not fault.settings):
        if fault.stage not in tripped:
            tripped |= {finding.stage for finding in check_of(fault.name).findings if not finding.ok}
    projections = {"q", "k", "v", "o_proj", "gate", "up", "down_proj"}
    assert tripped & projections
    # Eager bf16, in one process; the compiler's link is tripped in test_programs.py, the checkpoint's in test_links.py,
    # the reduction's in ranks/, that of the loss scale in cross/test_loss_scale.py, that of FP8's amaxes in
    # cross/test_delayed_scaling.py, the record's in test_reports.py, that of torch's loss head in
    # cross/test_library_heads.py, whose other two need a GPU. Stages that no Llama has are tripped in
    # cross/test_families.py.
    elsewhere = {"compiler", "reduction", "checkpoint", "loss_scale", "fp8_amax", "record", *library_heads()}
    elsewhere |= chain().kinds.keys() - {stage.id for stage in forward_stages(CONFIG.model)}
    assert tripped | projections | elsewhere == set(chain().phases)
