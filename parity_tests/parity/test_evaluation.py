"""Evaluation is held to the reference's logits: NLL by excess, guesses exactly but for ties."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from lockstep.core.backend import Arrays, Batch, NotSupported
from lockstep.core.components.precision import POLICIES
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.evidence.evaluation import TARGETS
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.evaluation import FURTHEST, Due, Scores, furthest
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.train.validation import Validation, means
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults.evaluation import GuessesShifted, NllScaledInEvaluation
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

# One micro-batch, of whose sequences two are examined.
FOUR = {"batch_size": 4, "micro_batch_size": 4}


def checked(backend: TorchBackend, config: RunConfig) -> tuple[Evidence, Check]:
    evidence = gather(backend.open(config), config, uneven_weights(text_batch(config), 0))
    return evidence, judge(evidence, Reference.open(JaxBackend(), config))


@pytest.mark.parametrize(("policy", "compiled"), [("bf16", True), ("fp32", False), ("fp64", False)])
def test_an_honest_evaluation_agrees_under_both_policies(policy: str, compiled: bool) -> None:
    _, check = checked(TorchBackend(), tiny_config(policy, compiled, train=FOUR))
    assert check.verdict == "agreed", check.origin
    found = {finding.tap: finding for finding in check.findings if finding.stage == "evaluation"}
    assert set(found) == {"nll", "top1", "nll_fp32", "top1_fp32", "nll_others", "nll_fp32_others"}
    assert found["nll_others"].worst.strain < 0.5 > found["nll_fp32_others"].worst.strain
    assert found["top1"].size > 32  # most tokens are no tie


@pytest.mark.parametrize(("fault", "taps"), [(NllScaledInEvaluation, {"nll"}), (GuessesShifted, {"top1"})])
def test_what_is_wrong_is_named_under_fp32_too(fault: type[TorchBackend], taps: set[str]) -> None:
    _, check = checked(fault(), tiny_config())
    assert {finding.stage for finding in check.findings if not finding.ok} == {"evaluation"}
    wrong = {finding.tap for finding in check.findings if not finding.ok}
    assert wrong == taps | {f"{tap}_fp32" for tap in taps}


class _WrongInTheMiddle(TorchSession):
    wrong = 0.99

    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        found = super().evaluate(batch, policy)
        nll = found["nll"].copy()
        nll[1:-1] *= self.wrong
        return {**found, "nll": nll}


class _GaveUpInTheMiddle(_WrongInTheMiddle):
    wrong = math.nan


@pytest.mark.parametrize("session", [_WrongInTheMiddle, _GaveUpInTheMiddle])
def test_sequences_whose_stages_are_not_examined_are_held_to_the_step(session: type[TorchSession]) -> None:
    class Backend(TorchBackend):
        session_class = session

    _, check = checked(Backend(), tiny_config(train=FOUR))
    assert {finding.tap for finding in check.findings if not finding.ok} == {"nll_others", "nll_fp32_others"}
    assert check.origin is not None and check.origin.stage == "evaluation"


def test_a_token_that_counts_nothing_in_the_step_is_not_compared() -> None:
    """A candidate may give any NLL for a token that its loss leaves out."""
    config = tiny_config(train=FOUR)
    batch = text_batch(config)
    weights = batch.weights.copy()
    weights[:, -3:] = 0
    session = TorchBackend().open(config)
    evidence = gather(session, config, replace(batch, weights=weights))
    stepped = evidence.stepped
    assert stepped is not None
    nll = stepped.nll.copy()
    nll[:, -3:] = 0
    check = judge(replace(evidence, stepped=replace(stepped, nll=nll)), Reference.open(JaxBackend(), config))
    assert not [finding for finding in check.findings if finding.stage == "evaluation" and not finding.ok]


class _CannotScore(TorchSession):
    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        raise NotSupported("mine scores nothing")


class _CannotUnderFp32(TorchSession):
    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        if policy is not None:
            raise NotSupported("mine has one policy")
        return super().evaluate(batch)


@pytest.mark.parametrize(
    ("session", "said", "left"),
    [
        (_CannotScore, "evaluation: mine scores nothing", set()),
        (_CannotUnderFp32, "evaluation under fp32: mine has one policy", {"nll", "top1"}),
    ],
)
def test_what_a_session_does_not_score_is_not_covered(session: type[TorchSession], said: str, left: set[str]) -> None:
    class Backend(TorchBackend):
        session_class = session

    _, check = checked(Backend(), tiny_config())
    assert check.verdict == "agreed" and said in check.not_covered
    assert {finding.tap for finding in check.findings if finding.stage == "evaluation"} == left


def test_a_tie_is_either_s_and_a_clear_lead_is_not() -> None:
    """Logits of three tokens; the twin's are off by 0.01, so a lead of 0.001 is none and one of 1 is."""
    config = tiny_config("bf16", vocab_size=300)
    reference = Reference.open(JaxBackend(), config)
    truth = np.zeros((1, 4, 300))
    truth[0, :, 1] = [1.0, 1.0, 1.0, 0.001]
    twin = truth + np.where(np.arange(300) % 2, 0.01, -0.01)
    targets = np.array([[1, 1, 2, 2]], np.int32)
    right = {TARGETS: targets, "nll": Due.of(twin, truth, targets).twin_nll.astype(np.float32)}
    for top1, mismatches in (([1, 1, 0, 0], 0), ([1, 1, 0, 1], 0), ([0, 1, 0, 0], 1), ([1, 1, 1, 0], 1)):
        scores = Scores(right | {"top1": np.array([top1], np.int32)}, reference)
        scores.take(twin, truth)
        found = next(finding for finding in scores.findings([]) if finding.tap == "top1")
        assert found.measures[0].value == mismatches and found.size == 3


@pytest.mark.parametrize(("policy", "times"), [("bf16", 3.0), ("fp16", 3.0), ("fp32", 8.0)])
def test_a_tie_is_wider_than_what_clean_runs_reached(policy: str, times: float) -> None:
    assert furthest(POLICIES[policy]) == times >= 2 * FURTHEST[POLICIES[policy].rounds]


def test_where_every_target_is_in_a_tie_no_guess_is_judged() -> None:
    config = tiny_config()
    truth, zeros = np.zeros((1, 4, 300)), np.zeros((1, 4), np.int32)
    given = {TARGETS: zeros, "nll": np.full((1, 4), 5.7), "top1": zeros}
    scores = Scores(given, Reference.open(JaxBackend(), config))
    scores.take(truth + 0.01, truth)
    missing: list[str] = []
    assert [finding.tap for finding in scores.findings(missing)] == ["nll"]
    assert missing == ["evaluation: top1: for every token the target is in a tie"]


class _Scored:
    """Gives the same scores of every batch."""

    def __init__(self, nll: np.ndarray) -> None:
        self._nll = nll

    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        return {"nll": self._nll, "top1": self._nll < 5}


def test_the_validation_loss_is_the_mean_over_all_tokens() -> None:
    """A mean that leaves out the last token of a sequence, or is summed in FP32, is further off."""
    nll = np.random.default_rng(0).gamma(2.0, 3.0, (64, 512)).astype(np.float32)
    batch = text_batch(tiny_config())
    found = means(Validation([batch] * 3).scores(_Scored(nll)))  # type: ignore[arg-type]
    due = math.fsum(nll.ravel().tolist()) / nll.size
    assert abs(found["val/loss"] / due - 1) <= 4 * np.finfo(np.float64).eps
    assert found["val/top1"] == np.count_nonzero(nll < 5) / nll.size
    for wrong in (float(nll[:, :-1].mean(dtype=np.float64)), float(np.cumsum(nll.ravel())[-1] / np.float32(nll.size))):
        assert abs(wrong / due - 1) > 1e-9
