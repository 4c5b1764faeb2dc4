"""A step's record is held to its batch, state, weights and gradients in what no other link reads."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from lockstep.core.backend import Backend, Batch, NotSupported, StepRecord
from lockstep.core.config.schema import AttentionConfig, RunConfig
from lockstep.core.parity.evidence import recorded
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.attention_logits import largest
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.judge.reports import STAGE, reports
from lockstep.core.parity.measures import scalar_bounds
from lockstep.core.parity.measures.verdict import Check
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults import reports as faults
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

PARTS = ("embedding", "matrices", "gains", "blocks.0", "blocks.1")
LOGITS = {"attention_logit/blocks.0", "attention_logit/blocks.1"}
ALWAYS = {"tokens", "loss_weight", *LOGITS}
NORMS = {f"{norm}/{part}" for norm in ("grad_norm", "param_norm", "update_ratio") for part in PARTS}
FP32 = np.dtype(np.float32)


@cache
def reference(config: RunConfig) -> Reference:
    return Reference.open(JaxBackend(), config)


def checked(backend: Backend, config: RunConfig, norms: bool = True, training: bool = False) -> Check:
    batch = uneven_weights(text_batch(config), 0)
    probe = recorded.probe_of(batch, config) if training else None
    return judge(gather(backend.open(config), config, batch, probe, norms), reference(config))


def of_record(check: Check) -> dict[str, float]:
    """Return how far each report is within its bounds."""
    return {finding.tap: finding.worst.strain for finding in check.findings if finding.stage == STAGE}


@pytest.mark.parametrize(
    ("backend", "policy", "compiled"),
    [
        (TorchBackend, "bf16", False),
        (TorchBackend, "bf16", True),
        (TorchBackend, "fp32", False),
        (TorchBackend, "fp64", False),
        (JaxBackend, "bf16", False),
        (JaxBackend, "fp32", False),
    ],
)
def test_an_honest_record_agrees(backend: type[Backend], policy: str, compiled: bool) -> None:
    check = checked(backend(), tiny_config(policy, compiled))
    assert check.verdict == "agreed", check.origin
    found = of_record(check)
    assert found.keys() == ALWAYS | NORMS
    assert max(found.values()) < 0.1


def test_what_fp16_counts_of_its_loss_scale_is_that_of_the_state() -> None:
    found = of_record(checked(TorchBackend(), tiny_config("fp16")))
    assert found.keys() == ALWAYS | NORMS | {"loss_scale", "finite_steps", "skipped_steps"}
    assert max(found.values()) < 0.1


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("fault", "taps"),
    [
        (faults.TokensOfOneMicroBatch, {"tokens"}),
        (faults.LossWeightIsAMean, {"loss_weight"}),
        (faults.NormsByGroupAfterClipping, {f"grad_norm/{part}" for part in PARTS}),
        (faults.WeightNormsAreSquares, {f"param_norm/{part}" for part in PARTS}),
        (faults.UpdateRatioHalved, {f"update_ratio/{part}" for part in PARTS}),
    ],
)
def test_a_report_that_is_wrong_is_named_and_nothing_else(
    fault: type[TorchBackend], taps: set[str], training: bool
) -> None:
    check = checked(fault(), tiny_config(), training=training)
    assert {(f.stage, f.tap) for f in check.findings if not f.ok} == {(STAGE, tap) for tap in taps}
    assert check.origin is not None and check.origin.stage == STAGE and check.origin.tap in taps


@pytest.mark.parametrize(
    ("fault", "policy"),
    [
        (faults.AttentionLogitsUnscaled, "bf16"),
        (faults.AttentionLogitsUnscaled, "fp32"),
        (faults.AttentionLogitsOfOtherLayers, "fp32"),
    ],
)
def test_attention_logits_that_are_wrong_are_named(fault: type[TorchBackend], policy: str) -> None:
    check = checked(fault(), tiny_config(policy))
    assert {(f.stage, f.tap) for f in check.findings if not f.ok} == {(STAGE, tap) for tap in LOGITS}


@pytest.mark.parametrize("masked", [False, True])
def test_the_largest_logit_is_of_keys_that_a_query_may_see(masked: bool) -> None:
    """In sequences of three tokens, two of them of one document; in some a product that is not seen is larger."""
    attention = AttentionConfig(document_mask=masked, reset_positions=masked)
    config = tiny_config("fp64").model_copy(update={"attention": attention})
    session, unseen = TorchBackend().open(config), 0
    for seed in range(8):
        batch = text_batch(config, seed)
        batch = Batch.of({name: array[:, :3].copy() for name, array in batch.arrays.items()})
        if batch.documents is not None:
            batch.documents[:] = [0, 1, 1]
        names = [f"blocks.{layer}.attn.{what}_rope" for layer in range(config.model.layers) for what in "qk"]
        taps = session.observe(batch, names)
        shown = session.attention_logits(batch)  # type: ignore[attr-defined]
        for layer, value in enumerate(shown):
            q, k = (taps[f"blocks.{layer}.attn.{what}_rope"] for what in "qk")
            assert largest(q, k, batch.documents, config.model.score_scale) == pytest.approx(value, rel=1e-12)
            everything = np.einsum("bshe,bthe->bhst", q, np.repeat(k, 2, axis=2)).max() / np.sqrt(q.shape[-1])
            unseen += bool(
                (largest(q, k, None, config.model.score_scale) if masked else everything) > value * (1 + 1e-9)
            )
    assert unseen


def test_an_honest_record_of_masked_documents_agrees() -> None:
    attention = AttentionConfig(document_mask=True, reset_positions=True)
    check = checked(TorchBackend(), tiny_config("fp32").model_copy(update={"attention": attention}))
    assert check.verdict == "agreed", check.origin
    assert max(of_record(check).values()) < 0.1


class _HidesLogits(TorchSession):
    def attention_logits(self, batch: Batch) -> np.ndarray:
        raise NotSupported("mine are fused")


def test_attention_logits_that_are_not_shown_are_not_covered() -> None:
    class Candidate(TorchBackend):
        session_class = _HidesLogits

    check = checked(Candidate(), tiny_config(), norms=False)
    assert check.verdict == "agreed" and "the largest attention logits: mine are fused" in check.not_covered
    assert of_record(check).keys() == {"tokens", "loss_weight"}


def test_without_norms_there_are_none_to_hold() -> None:
    check = checked(TorchBackend(), tiny_config(), norms=False)
    assert of_record(check).keys() == ALWAYS
    assert not any("norms" in line for line in check.not_covered)


class _NoNorms(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        return super().step(batch)


class _HidesGradients(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        return super().step(batch, norms=norms)

    def gradients(self, batch: Batch) -> None:  # type: ignore[override]
        raise NotSupported("mine shows none")


@pytest.mark.parametrize(
    ("session", "said", "left"),
    [
        (_NoNorms, "the record's norms by group: the session's step gives none", set()),
        (
            _HidesGradients,
            "the record's gradient norms by group: the candidate does not show the step's gradients",
            {name for name in NORMS if not name.startswith("grad_norm/")},
        ),
    ],
)
def test_what_cannot_be_held_is_not_covered(session: type[TorchSession], said: str, left: set[str]) -> None:
    class Candidate(TorchBackend):
        session_class = session

    check = checked(Candidate(), tiny_config())
    assert check.verdict == "agreed" and said in check.not_covered
    assert of_record(check).keys() == {"tokens", "loss_weight", *LOGITS, *left}


def test_a_loss_weight_that_was_summed_in_fp32_holds() -> None:
    """One after another, as the plainest loop does, of weights that FP32 rounds in every addition."""
    weights = np.random.default_rng(0).random((64, 512), np.float32)
    tokens = np.zeros(weights.shape, np.int32)
    record = StepRecord(1, 1.0, float(np.cumsum(weights.ravel())[-1]), 1e-3, 1.0, 1.0, "", tokens.size)
    state = SimpleNamespace(scalars={})
    evidence = SimpleNamespace(record=record, batch=Batch(tokens, tokens, weights), after=state)
    assert all(finding.ok for finding in reports(evidence, tiny_config(), []))  # type: ignore[arg-type]
    without_last = replace(record, loss_weight=float(weights[:, :-1].sum(dtype=np.float64)))
    evidence.record = without_last
    assert [f.ok for f in reports(evidence, tiny_config(), [])] == [True, False]  # type: ignore[arg-type]


def test_an_update_may_be_measured_before_it_is_rounded_into_the_weights() -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(1 << 14).astype(np.float32)
    for size in (1e-3, 1e-6, 1e-8):
        update = (size * rng.standard_normal(weights.size)).astype(np.float32)
        rounded = (weights + update) - weights
        own, due = (float(np.linalg.norm(x) / np.linalg.norm(weights)) for x in (update, rounded))
        assert scalar_bounds.update_ratio(own, due, weights.size, FP32).ok
    assert not scalar_bounds.update_ratio(0.99e-3, 1e-3, weights.size, FP32).ok


def test_a_norm_that_is_not_finite_is_inherited_and_one_that_hides_it_is_not() -> None:
    assert scalar_bounds.norm_of_group(np.nan, np.inf, 9, FP32).ok
    assert not scalar_bounds.norm_of_group(1.0, np.inf, 9, FP32).ok
    assert not scalar_bounds.norm_of_group(np.nan, 1.0, 9, FP32).ok
