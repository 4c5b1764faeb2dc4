"""A sequence-length curriculum repeats nothing and loses nothing, wherever its lengths change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.config.schema import OptimConfig, RunConfig, TrainConfig
from lockstep.core.data.dataset import TokenSplit
from lockstep.core.data.sampler import BlockSampler
from lockstep.core.run.data import RunData
from lockstep.core.train.schedule import sequence_length

TRAIN = TrainConfig(steps=10, batch_size=8, micro_batch_size=4, sequence_length=8, curriculum="8:0.6, 16:0.1, 32:0.3")


class Counted:
    """A data set whose tokens are their own positions."""

    eot_id = 0

    def __init__(self, tokens: int) -> None:
        self._split = TokenSplit([np.arange(tokens, dtype=np.uint32)])

    def split(self, name: str) -> TokenSplit:
        return self._split


def run_data(train: TrainConfig, tokens: int) -> RunData:
    sampler = BlockSampler(7, tokens, train.longest)
    return RunData(config(train), Counted(tokens), sampler, [])  # type: ignore[arg-type]


def config(train: TrainConfig) -> RunConfig:
    return RunConfig(train=train, optim=OptimConfig(warmup_steps=0))


def test_batches_have_the_lengths_of_their_steps_and_as_many_tokens():
    data = run_data(TRAIN, 2000)
    shapes = [data.batch(step).tokens.shape for step in range(1, 11)]
    assert shapes == [(8, 8)] * 6 + [(4, 16)] + [(2, 32)] * 3


def test_windows_are_stretches_of_the_text_with_their_targets():
    data = run_data(TRAIN, 2000)
    for step in range(1, 11):
        batch = data.batch(step)
        assert (np.diff(batch.tokens, axis=1) == 1).all() and (batch.targets == batch.tokens + 1).all()


@pytest.mark.parametrize("curriculum", ["", "8:0.6, 16:0.1, 32:0.3", "32:0.5, 8:0.5", "8:0.3, 32:0.3, 8:0.4"])
def test_an_epoch_has_every_token_once_whatever_the_lengths(curriculum):
    # 640 tokens a run in blocks of the longest, and one epoch is the run: no token twice, none left out.
    train = TRAIN.model_copy(update={"curriculum": curriculum})
    data = run_data(train, 10 * 64 + 1)
    seen = np.concatenate([data.batch(step).tokens.ravel() for step in range(1, 11)])
    assert np.array_equal(np.sort(seen), np.arange(640))


@given(first=st.integers(1, 9), epochs=st.integers(1, 4), seed=st.integers(0, 100))
def test_the_tokens_of_a_step_are_those_of_the_same_step_at_the_longest_length(first, epochs, seed):
    """The order is one of tokens: a length cuts it, and moves none to another step."""
    text = f"8:0.{first}, 32:{1 - first / 10:.1f}"
    tokens = 640 // epochs + 1
    sampler = BlockSampler(seed, tokens, 32)
    of = {
        curriculum: replace(run_data(TRAIN.model_copy(update={"curriculum": curriculum}), tokens), sampler=sampler)
        for curriculum in (text, "32:0.5, 8:0.5")
    }
    for step in range(1, 11):
        one, other = (data.batch(step).tokens.ravel() for data in of.values())
        assert np.array_equal(one, other)
    assert (
        sequence_length(of[text].config.train, first) == 8 and sequence_length(of[text].config.train, first + 1) == 32
    )
