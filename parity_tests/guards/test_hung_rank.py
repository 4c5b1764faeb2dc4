"""A rank that hangs is named, with how long was waited and for what; one that only waits for it is not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.parity_tests.guards import candidates
from lockstep.parity_tests.ranks import harness
from lockstep.parity_tests.ranks.harness import RankedSession
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.ranks.process_groups import RankError

SECONDS = 5


def config_of(ranks: int, seconds: int = SECONDS) -> RunConfig:
    config = tiny_config("fp32", train={"batch_size": 6, "micro_batch_size": 1, "sequence_length": 32, "ranks": ranks})
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"timeout_seconds": seconds})})


def opened(backend: TorchBackend, ranks: int) -> RankedSession:
    session = backend.open(config_of(ranks))
    assert isinstance(session, RankedSession)
    return session


pytestmark = pytest.mark.usefixtures("in_one_process")


@pytest.fixture(autouse=True)
def _processes() -> Iterator[None]:
    yield
    harness.let_go()


NOTHING = "it has started the call, and sent none of its gradients' parts"


@pytest.mark.parametrize(
    ("backend", "ranks", "how_far"),
    [
        (candidates.SleepsInAStep, 2, NOTHING),
        (candidates.SleepsInAStep, 3, NOTHING),
        (candidates.IsStopped, 3, NOTHING),
        (candidates.SleepsAfterAStep, 3, "it has started the call, and sent 2 of its gradients' parts"),
    ],
)
def test_the_rank_that_hangs_in_a_step_is_named(backend: type[TorchBackend], ranks: int, how_far: str) -> None:
    session = opened(backend(), ranks)
    batch = text_batch(session.config)
    for _ in range(candidates.AT_STEP - 1):
        session.step(batch)
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        session.step(batch)
    assert str(caught.value) == f"rank 1: no answer within 5 s to `step {candidates.AT_STEP}`: {how_far}"
    assert time.monotonic() - began < 60
    assert isinstance(caught.value, UserError)


def test_a_rank_that_is_stopped_between_steps_is_named() -> None:
    session = opened(TorchBackend(), 3)
    batch = text_batch(session.config)
    session.step(batch)
    process = session.world.processes[2]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(RankError, match=r"^rank 2: no answer within 5 s to `step 2`: it has not started the call$"):
        session.step(batch)
    assert not process.is_alive()


def test_among_three_ranks_only_the_one_in_trouble_is_named() -> None:
    from lockstep.parity_tests.ranks.candidates import DiesOnRankOne, RaisesOnRankOne

    for backend, said in ((RaisesOnRankOne, "ArithmeticError: out of luck"), (DiesOnRankOne, r"its process has ended")):
        session = opened(backend(), 3)
        with pytest.raises(RankError, match=rf"^rank 1: {said}[^;]*$"):
            session.step(text_batch(session.config))
