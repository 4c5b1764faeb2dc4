"""Several ranks make the same later steps as one does, and what follows a step; each is held to the reference."""

from __future__ import annotations

from functools import cache

import pytest

from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.in_a_row import ALIKE, RESTORED, TAPS, WHILE_WRITTEN
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.measures.compare import Reference
from lockstep.core.parity.measures.verdict import Check
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults import later, outside
from lockstep.parity_tests.ranks import on_one_rank
from lockstep.parity_tests.ranks.sharded import sharded
from lockstep.parity_tests.tiny import text_batch
from lockstep.torch_backend.backend import TorchBackend

pytestmark = pytest.mark.usefixtures("in_one_process")
KINDS = (("moments", "exp_avg/"), ("moments", "exp_avg_sq/"), ("update", ""))
CONFIGS = {name: sharded("fp32", strategy=name, sections={"train": {"steps": 20}}) for name in ("ddp", "fsdp")}


@cache
def reference(strategy: str) -> Reference:
    return Reference.open(JaxBackend(), CONFIGS[strategy])


def check(backend: TorchBackend, strategy: str) -> Check:
    config: RunConfig = CONFIGS[strategy]
    return judge(gather(backend.open(config), config, uneven_weights(text_batch(config), 0)), reference(strategy))


@pytest.mark.parametrize("strategy", CONFIGS)
def test_honest_ranks_agree_in_both_later_steps(strategy: str) -> None:
    found = check(TorchBackend(), strategy)
    assert found.verdict == "agreed", found.origin
    taps = {(one.stage, one.tap) for one in found.findings}
    assert {(stage, f"{kind}embed.weight/{n}") for stage, kind in KINDS for n in (13, 20)} <= taps
    assert set(TAPS.values()) <= {tap for _, tap in taps}


FOUND = [
    ("ddp", later.PeakRateAfterWarmUp, ("update", "embed.weight/13")),
    ("fsdp", later.PeakRateAfterWarmUp, ("update", "embed.weight/13")),
    ("ddp", later.MomentumEndsWithWarmUp, ("moments", "exp_avg/embed.weight/13")),
    ("fsdp", later.MomentumEndsWithWarmUp, ("moments", "exp_avg/embed.weight/13")),
    ("ddp", later.FirstTokenLeftOutAfterWarmUp, ("loss", "the same step, as a later one")),
    ("ddp", later.LastCheckpointInBf16, ("checkpoint", "the checkpoint of the last step")),
    ("ddp", outside.PeakRateOnceWritten, ("update", TAPS[WHILE_WRITTEN])),
    ("fsdp", outside.PeakRateOnceWritten, ("update", TAPS[WHILE_WRITTEN])),
    ("ddp", outside.RestoreResetsBetas, ("moments", TAPS[RESTORED])),
    ("ddp", on_one_rank.PeakRateAfterWarmUpOnRankOne, ("update", TAPS[ALIKE])),
]


@pytest.mark.parametrize(
    ("strategy", "fault", "named"), FOUND, ids=[f"{fault.__name__}-{strategy}" for strategy, fault, _ in FOUND]
)
def test_what_one_rank_would_show_several_do(strategy: str, fault: type[TorchBackend], named: tuple[str, str]) -> None:
    origin = check(fault(), strategy).origin
    assert origin is not None and (origin.stage, origin.tap) == named
