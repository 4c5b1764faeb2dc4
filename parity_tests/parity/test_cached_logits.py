"""Sampling's cache is held to the reference's logits in a check."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.core.backend import NotSupported
from lockstep.core.components.precision import POLICIES
from lockstep.core.config.schema import AttentionConfig
from lockstep.core.parity.evidence.cached_logits import (
    ALONE_FROM_DRAWN,
    CACHED,
    FROM_DRAWN,
    LENGTHS,
    SECOND,
    UNCACHED,
    sampled_logits,
)
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.judge.cached_logits import CachedLogits, held
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.measures.compare import Reference
from lockstep.core.parity.measures.distances import Distances
from lockstep.core.parity.measures.verdict import Measure
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults import sampling
from lockstep.parity_tests.faults.sampling import RopeNotAdvanced
from lockstep.parity_tests.parity.test_evaluation import checked
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession
from lockstep.torch_backend.tools.generate import Decoder

SAMPLING = "sampling"


@pytest.mark.parametrize("policy", ["bf16", "fp32", "fp64", "fp16"])
def test_an_honest_cache_agrees_and_one_that_does_not_rotate_is_named(policy: str) -> None:
    config = tiny_config(policy)
    evidence, check = checked(TorchBackend(), config)
    assert check.verdict == "agreed", check.origin
    found = [finding for finding in check.findings if finding.stage == SAMPLING]
    assert [finding.size // 300 for finding in found] == [4, 9, 17, 4, 2]
    assert [finding.tap for finding in found] == ["logits"] * 4 + ["next_token_logits"]
    first, second, length = (evidence.evaluated[lengths][0] for _, lengths in (FROM_DRAWN, SECOND, UNCACHED))
    assert [finding.note for finding in found] == [
        "",
        "from a prompt of one token",
        f"from a prompt of {first} tokens",
        f"from a prompt of {second} tokens, in a cache that served another prompt before",
        "without a cache",
    ]
    assert evidence.evaluated[LENGTHS].tolist() == [29, 30, 31, 32] and 1 <= length < 32
    _, check = checked(RopeNotAdvanced(), config)
    assert {(finding.stage, finding.tap) for finding in check.findings if not finding.ok} == {(SAMPLING, "logits")}


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


@pytest.mark.parametrize(
    ("fault", "tap", "note"),
    [
        (sampling.FirstTokenOfAPageLost, "logits", "from a prompt of {} tokens"),
        (sampling.CacheTrustedByItsLength, "logits", "in a cache that served another prompt before"),
        (sampling.SamplesAtAnotherTemperature, "next_token_logits", "without a cache"),
        (sampling.SamplesFollowTheTokenBefore, "next_token_logits", "without a cache"),
    ],
)
def test_what_goes_wrong_in_one_way_to_sample_is_named_by_it(fault: type[TorchBackend], tap: str, note: str) -> None:
    evidence, check = checked(fault(), tiny_config())
    wrong = [finding for finding in check.findings if not finding.ok]
    assert {(finding.stage, finding.tap) for finding in wrong} == {(SAMPLING, tap)}
    assert wrong[0].note.endswith(note.format(evidence.evaluated[FROM_DRAWN[1]][0]))


def test_every_token_has_its_turn_to_be_computed_alone() -> None:
    """By the micro-batch; with the first place of a page of 16 in each check."""
    config, alone = tiny_config(), set[int]()
    session, taps = TorchBackend().open(config), {"logits": np.zeros(0)}
    for number in range(40):
        found = sampled_logits(session, config, text_batch(config, number), taps, [])
        lengths = found[FROM_DRAWN[1]].tolist()
        assert len(lengths) == ALONE_FROM_DRAWN + 1 and 17 in lengths[1:] and lengths[-1] <= 32
        alone |= set(lengths[1:])
    assert alone == set(range(2, 33))


class _NeitherDecodesNorSamples(TorchSession):
    decoder = next_token_logits = None  # type: ignore[assignment]

    def cached_logits(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return np.stack([Decoder(self.config, self.parameters).next_token_logits(tokens[:n]) for n in lengths])


def test_each_way_to_sample_that_a_session_lacks_is_not_covered_by_itself() -> None:
    class Candidate(TorchBackend):
        session_class = _NeitherDecodesNorSamples

    _, check = checked(Candidate(), tiny_config())
    assert check.verdict == "agreed" and len([f for f in check.findings if f.stage == SAMPLING]) == 3
    lacking = {line for line in check.not_covered if line.startswith("sampling")}
    assert lacking == {
        "sampling of a second prompt: the session has no decoder",
        "sampling without a cache: the session has no next_token_logits",
    }


def test_jax_as_a_candidate_samples_without_a_cache() -> None:
    config = tiny_config()
    evidence = gather(JaxBackend().open(config), config, text_batch(config))
    check = judge(evidence, Reference.open(JaxBackend(), config))
    assert check.verdict == "agreed", check.origin
    assert [f.tap for f in check.findings if f.stage == SAMPLING] == ["next_token_logits"]


class _DoesNotSample(TorchSession):
    def cached_logits(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        raise NotSupported("mine does not sample")


class DoesNotSample(TorchBackend):
    session_class = _DoesNotSample


def test_a_session_without_a_cache_is_not_covered() -> None:
    _, check = checked(DoesNotSample(), tiny_config())
    assert check.verdict == "agreed" and "sampling: mine does not sample" in check.not_covered


@pytest.mark.parametrize(("policy", "most"), [("bf16", 2.16), ("fp16", 2.16), ("fp32", 50.0)])
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
    """Four tokens, all errors 2.3 times the twin's: too much of many numbers, and possible of those of one token."""
    session: Any = None
    generator = np.random.default_rng(0)
    truth = generator.standard_normal((1, 4, 1000))
    errors = np.array([1.0, 1.0, 1.0, 4.0 if uneven else 1.0])[:, None] * generator.standard_normal((2, 4, 1000))
    twin, candidate = truth + 1e-3 * errors[:1], truth[0] + 2.3e-3 * errors[1]
    evaluated = {CACHED: candidate, LENGTHS: np.arange(1, 5)}
    judge = CachedLogits(SimpleNamespace(evaluated=evaluated), Reference(tiny_config(), session, session))  # type: ignore[arg-type]
    judge.take(twin, truth)
    (found,) = judge.findings()
    assert found.worst.value == pytest.approx(2.3, rel=0.05) and found.ok != accused


def test_more_tokens_of_a_sequence_scatter_as_four_do() -> None:
    """Seventeen tokens of a clean check reached 1.47 times the twin's error, which they share."""
    session: Any = None
    generator = np.random.default_rng(0)
    truth, errors = generator.standard_normal((1, 17, 1000)), generator.standard_normal((2, 17, 1000))
    twin, candidate = truth + 1e-3 * errors[:1], truth[0] + 1.47e-3 * errors[1]
    judge = CachedLogits(
        SimpleNamespace(evaluated={CACHED: candidate, LENGTHS: np.arange(1, 18)}),  # type: ignore[arg-type]
        Reference(tiny_config(), session, session),
    )
    judge.take(twin, truth)
    (found,) = judge.findings()
    assert found.ok and found.worst.value == pytest.approx(1.47, rel=0.02)
