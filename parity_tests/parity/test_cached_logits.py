"""Sampling's cache is held to the reference's logits in a check."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.core.backend import NotSupported
from lockstep.core.components.precision import POLICIES
from lockstep.core.config.schema import AttentionConfig
from lockstep.core.parity.evidence.cached_logits import CACHED, LENGTHS
from lockstep.core.parity.judge.cached_logits import CachedLogits, held
from lockstep.core.parity.measures.compare import Reference
from lockstep.core.parity.measures.distances import Distances
from lockstep.core.parity.measures.verdict import Measure
from lockstep.parity_tests.faults.sampling import RopeNotAdvanced
from lockstep.parity_tests.parity.test_evaluation import checked
from lockstep.parity_tests.tiny import tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession
from lockstep.torch_backend.tools.generate import Decoder

SAMPLING = "sampling"


@pytest.mark.parametrize("policy", ["bf16", "fp32", "fp64", "fp16"])
def test_an_honest_cache_agrees_and_one_that_does_not_rotate_is_named(policy: str) -> None:
    config = tiny_config(policy)
    evidence, check = checked(TorchBackend(), config)
    assert check.verdict == "agreed", check.origin
    found, from_start = (finding for finding in check.findings if finding.stage == SAMPLING)
    assert found.size == 4 * 300 and evidence.evaluated["lengths"].tolist() == [29, 30, 31, 32]
    assert from_start.size == 9 * 300 and from_start.note == "from a prompt of one token"
    _, check = checked(RopeNotAdvanced(), config)
    assert {finding.stage for finding in check.findings if not finding.ok} == {SAMPLING}


def test_where_documents_are_masked_the_first_one_is_decoded() -> None:
    config = tiny_config().model_copy(update={"attention": AttentionConfig(document_mask=True, reset_positions=True)})
    evidence, check = checked(TorchBackend(), config)
    assert check.verdict == "agreed", check.origin
    row = np.flatnonzero(evidence.tapped.weights.any(axis=1))[0]
    assert evidence.tapped.documents is not None
    first = int(np.count_nonzero(evidence.tapped.documents[row] == evidence.tapped.documents[row, 0]))
    if first > 3:
        assert evidence.evaluated["lengths"][-1] == first
    else:
        assert any(line.startswith("sampling: the sequence's first document") for line in check.not_covered)


class _TiredDecoder(Decoder):
    """Its logits are wrong from the fifth token on that it computes alone."""

    alone = 0

    def next_token_logits(self, tokens: np.ndarray) -> np.ndarray:
        self.alone += 1
        logits = super().next_token_logits(tokens)
        return logits * np.float32(1.1) if self.alone > 5 else logits


class _ShortDecoder(Decoder):
    """Its logits are wrong behind fewer than six tokens."""

    def next_token_logits(self, tokens: np.ndarray) -> np.ndarray:
        logits = super().next_token_logits(tokens)
        return logits * np.float32(1.1) if len(tokens) < 6 else logits


def with_decoder(decoder: type[Decoder]) -> TorchBackend:
    session = type("Session", (TorchSession,), {"decoder_class": decoder})
    return type("Candidate", (TorchBackend,), {"session_class": session})()


@pytest.mark.parametrize("decoder", [_TiredDecoder, _ShortDecoder])
def test_a_cache_that_is_wrong_after_some_tokens_or_behind_few_is_named(decoder: type[Decoder]) -> None:
    _, check = checked(with_decoder(decoder), tiny_config())
    assert {finding.stage for finding in check.findings if not finding.ok} == {SAMPLING}


class _DoesNotSample(TorchSession):
    def cached_logits(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        raise NotSupported("mine does not sample")


class DoesNotSample(TorchBackend):
    session_class = _DoesNotSample


def test_a_session_without_a_cache_is_not_covered() -> None:
    _, check = checked(DoesNotSample(), tiny_config())
    assert check.verdict == "agreed" and "sampling: mine does not sample" in check.not_covered


@pytest.mark.parametrize(("policy", "most"), [("bf16", 1.8), ("fp16", 1.8), ("fp32", 50.0)])
def test_the_bound_is_what_clean_runs_reached_and_its_margin(policy: str, most: float) -> None:
    """An error of 2e-7 under FP32, where 1e-5 is none; of four tokens, which carry 64 errors."""

    def measured(excess: float, numbers: int = 64) -> Measure:
        d = Distances(excess, 0.0, 0.0, 2e-7 * excess, 2e-7, 0.0)
        return held(d, numbers, POLICIES[policy])

    found = measured(1.28)
    assert found.ok and found.high == pytest.approx(most, rel=0.01)
    assert not measured(most * 1.02).ok
    many = measured(1.0, 1 << 40).high
    assert many is not None and found.high is not None and many <= found.high


@pytest.mark.parametrize(("uneven", "accused"), [(False, True), (True, False)])
def test_where_one_token_carries_the_twin_s_error_the_ratio_is_that_of_two_draws(uneven: bool, accused: bool) -> None:
    """Four tokens, all errors 1.85 times the twin's: too much of many numbers, and possible of those of one token."""
    session: Any = None
    generator = np.random.default_rng(0)
    truth = generator.standard_normal((1, 4, 1000))
    errors = np.array([1.0, 1.0, 1.0, 4.0 if uneven else 1.0])[:, None] * generator.standard_normal((2, 4, 1000))
    twin, candidate = truth + 1e-3 * errors[:1], truth[0] + 1.85e-3 * errors[1]
    evaluated = {CACHED: candidate, LENGTHS: np.arange(1, 5)}
    judge = CachedLogits(SimpleNamespace(evaluated=evaluated), Reference(tiny_config(), session, session))  # type: ignore[arg-type]
    judge.take(twin, truth)
    (found,) = judge.findings()
    assert found.worst.value == pytest.approx(1.85, rel=0.05) and found.ok != accused
