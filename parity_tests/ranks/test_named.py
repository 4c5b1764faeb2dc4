"""A check over two ranks with two micro-batches each tells a sum over ranks from a sum over micro-batches."""

from __future__ import annotations

from functools import cache

import pytest

from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.in_a_row import AT_ONCE, TAPS
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.measures.verdict import Check
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults import gradients, outside, ranks
from lockstep.parity_tests.ranks import reductions, sharded
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend

pytestmark = pytest.mark.usefixtures("in_one_process")
CONFIG = tiny_config(train={"batch_size": 8, "ranks": 2})


@cache
def reference() -> Reference:
    return Reference.open(JaxBackend(), CONFIG)


def check_of(backend: TorchBackend) -> Check:
    return judge(gather(backend.open(CONFIG), CONFIG, uneven_weights(text_batch(CONFIG), 0)), reference())


@pytest.mark.parametrize(
    "fault",
    [
        reductions.LastBucketAveraged,
        reductions.RankOneSendsBf16,
        reductions.TailOfRankOneLost,
        reductions.RankOneSendsOneLonger,
        ranks.ReducedInBf16,
        ranks.OneParameterNotReduced,
        # Rank 0 accumulates as it should.
        reductions.RankOneForgets,
    ],
)
def test_a_wrong_sum_over_ranks_is_called_reduction(fault: type[TorchBackend]) -> None:
    check = check_of(fault())
    assert check.origin is not None and check.origin.stage == "reduction"
    assert not [f.tap for f in check.findings if f.stage == "accumulation" and not f.ok]


@pytest.mark.parametrize(
    "fault",
    [reductions.EveryRankAccumulatesInBf16, gradients.DoublesWithEveryMicroBatch, gradients.LastMicroBatchForgotten],
)
def test_a_wrong_sum_over_micro_batches_is_called_accumulation(fault: type[TorchBackend]) -> None:
    check = check_of(fault())
    assert check.origin is not None and check.origin.stage == "accumulation"


@pytest.mark.parametrize("fault", [sharded.GradientsAveraged, sharded.OneBlockNotReduced])
def test_a_wrong_sum_of_what_is_cut_over_ranks_is_called_reduction(fault: type[TorchBackend]) -> None:
    """Gradients of the tapped program are sums over ranks too: no stage is to blame."""
    config = sharded.sharded("fp32")
    evidence = gather(fault().open(config), config, uneven_weights(text_batch(config), 0))
    check = judge(evidence, Reference.open(JaxBackend(), config))
    assert check.origin is not None and check.origin.stage == "reduction"
    assert "seen in the backward pass of" in check.origin.note


def test_honest_ranks_agree() -> None:
    check = check_of(TorchBackend())
    assert check.verdict == "agreed", check.origin
    assert {"accumulation", "reduction"} <= {f.stage for f in check.findings}
    later = {f"{tap}/{CONFIG.train.steps}" for tap in ("clip_coefficient", "learning_rate", "embed.weight")}
    in_a_row = set(TAPS.values())
    assert in_a_row | later <= {f.tap for f in check.findings}
    assert not [words for words in check.not_covered if "one rank" in words or "later step" in words]


def test_gradients_that_no_step_clears_are_found_over_ranks_too() -> None:
    check = check_of(outside.StepsClearNoGradients())
    assert check.origin is not None
    assert (check.origin.stage, check.origin.tap) == ("gradients", TAPS[AT_ONCE])
