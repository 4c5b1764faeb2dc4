"""The proof at the start of a deterministic run, on sessions that only count and answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.core.backend import Batch, Gradients, NotSupported
from lockstep.core.errors import UserError
from lockstep.core.train.determinism import differences, moves, prove
from lockstep.parity_tests.tiny import text_batch, tiny_config

CONFIG = tiny_config()
BATCH = text_batch(CONFIG)
NAMES = [f"blocks.{i}.attn.q_proj.weight" for i in range(6)]


def answer(**other: Any) -> Gradients:
    grads = {name: np.ones((2, 2), np.float32) for name in NAMES}
    return replace(Gradients(np.ones((1, 2), np.float32), 2.0, grads), **other)


class Answers:
    """A session that gives one answer after the other, the last one for ever."""

    def __init__(self, *answers: Gradients) -> None:
        self.answers = list(answers)
        self.calls = 0

    def gradients(self, batch: Batch) -> Gradients:
        self.calls += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class Measures(Answers):
    def costs_of_determinism(self, batch: Batch) -> Sequence[float]:
        self.rows = len(batch.tokens)
        return [1.5, 1.0, 1.1]


class CannotMeasure(Answers):
    def costs_of_determinism(self, batch: Batch) -> Sequence[float]:
        raise NotSupported("too large")


def proof(session: Any, config: Any = CONFIG) -> Any:
    return prove(config, session, BATCH, 7)


def test_one_extra_step_and_what_is_said_of_it() -> None:
    session = Measures(answer())
    said = str(proof(session))
    assert session.calls == 2 and session.rows == CONFIG.train.micro_batch_size
    assert said.startswith("1.10× the time of a step (measured: 1.00 to 1.50 in 3 pairs")
    assert said.endswith("step 7 repeated bit for bit (loss, 6 gradients)")


def test_of_ranks_the_first_computes_alone_before_the_two() -> None:
    config = CONFIG.model_copy(update={"train": CONFIG.train.model_copy(update={"ranks": 2})})
    session = Answers(answer(loss=4.0), answer(), answer())
    assert proof(session, config).gradients == 6 and session.calls == 3


def test_what_cannot_be_measured_says_why() -> None:
    assert str(proof(Answers(answer()))).endswith("its cost was not measured: the session has no costs_of_determinism")
    assert str(proof(CannotMeasure(answer()))).endswith("its cost was not measured: too large")


def test_a_long_compilation_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 90.0, 90.0, 91.0])
    monkeypatch.setattr("lockstep.core.train.determinism.time.perf_counter", lambda: next(ticks))
    assert "would take about 89 s" in str(proof(Measures(answer()), tiny_config(compiled=True)))


def test_a_bit_is_enough() -> None:
    one, other = answer(), answer()
    other.grads[NAMES[2]].view(np.uint32)[1, 1] ^= 1
    assert differences(one, other) == f"gradients of {NAMES[2]}"
    with pytest.raises(UserError, match=rf"step 7, repeated .*, gave other bits: gradients of {NAMES[2]}$"):
        proof(Answers(one, other))


def test_what_differs_is_listed() -> None:
    other = answer(loss=np.nextafter(2.0, 3.0), grads={name: np.zeros((2, 2), np.float32) for name in NAMES})
    assert differences(answer(), other) == f"the loss and gradients of {', '.join(NAMES[:4])} and 2 more"
    assert differences(answer(), answer(grads={})).endswith("and 2 more")
    assert differences(answer(nll=np.zeros((1, 2), np.float32)), answer()) == "the loss"


def test_bits_are_compared_and_not_numbers() -> None:
    nan = {name: np.full((2, 2), np.nan, np.float32) for name in NAMES}
    assert differences(answer(loss=float("nan"), grads=nan), answer(loss=float("nan"), grads=nan)) == ""
    signs = [answer(grads={NAMES[0]: np.full(2, zero, np.float32)}) for zero in (0.0, -0.0)]
    assert differences(*signs) == f"gradients of {NAMES[0]}"


class Draws(Answers):
    """Its gradients are drawn: the same ones from the same state."""

    def gradients(self, batch: Batch) -> Gradients:
        return answer(loss=random.random() + np.random.random())


def test_random_numbers_are_those_of_the_state_and_stay_so() -> None:
    random.seed(1), np.random.seed(1)
    due = random.random(), np.random.random()
    random.seed(1), np.random.seed(1)
    proof(Draws())
    assert (random.random(), np.random.random()) == due


def test_a_session_without_gradients_proves_nothing() -> None:
    class Silent:
        def gradients(self, batch: Batch) -> Gradients:
            raise NotSupported("no gradients here")

    with pytest.raises(UserError, match="the first step cannot be repeated: no gradients here"):
        proof(Silent())


def test_a_run_goes_on_where_it_began() -> None:
    there = {"device": "cpu", "threads": 4, "torch": "2.13"}
    assert moves(there, dict(there)) == ""
    assert moves(there, {**there, "threads": 2, "torch": "2.14"}) == "threads was 4, is 2; torch was 2.13, is 2.14"
    assert (
        moves(there, {"device": "cpu", "threads": 4, "jax": "0.10"}) == "torch was 2.13, is None; jax was None, is 0.10"
    )
