"""Deterministic ranks: when a step repeats, and which rank reports a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.train.determinism import differences, prove
from lockstep.parity_tests.loop.candidates import Puts
from lockstep.parity_tests.ranks import harness
from lockstep.parity_tests.ranks.harness import RankedSession
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.tools.deterministic import switch

pytestmark = pytest.mark.usefixtures("in_one_process")


@pytest.fixture(autouse=True)
def _processes() -> Iterator[None]:
    yield
    harness.let_go()
    switch(tiny_config(), torch.device("cpu"))


def strict(ranks: int, **model: Any) -> RunConfig:
    train = {"ranks": ranks, "batch_size": 2 * ranks, "sequence_length": 32}
    config = tiny_config("fp32", train=train, **model)
    parallel = config.parallel.model_copy(update={"bucket_mb": 1})
    return config.model_copy(update={"deterministic": True, "parallel": parallel})


def test_four_ranks_repeat_their_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP lays its buckets anew after its first backward pass, and a sum of four then begins with another rank."""
    config = strict(4, layers=1, hidden=128, ffn_hidden=512, vocab_size=2048)
    batch = text_batch(config)
    session, another = (TorchBackend().open(config) for _ in range(2))
    proof = prove(config, session, batch, 1)
    assert proof.gradients == len(session.gradients(batch).grads) and len(proof.costs) > 0
    first, second = another.gradients(batch), another.gradients(batch)
    assert differences(first, second) == ""
    assert differences(second, session.gradients(batch)) == ""
    session.close()
    another.close()


def test_what_torch_refuses_rank_0_says() -> None:
    config = strict(2, layers=1)
    session = Puts().open(config)
    with pytest.raises(UserError, match=r"^deterministic = true: put_ has no deterministic kernel on cpu"):
        prove(config, session, text_batch(config), 1)
    assert isinstance(session, RankedSession) and session.world.peers.lost is None, "the other rank waits for nothing"
    session.close()
