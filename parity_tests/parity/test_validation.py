"""Validation in a checked step: scores are held to the reference after the step, the record's means to the scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.evidence import saved
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.recorded import probe_of
from lockstep.core.parity.evidence.saved import open_evidence, save_evidence
from lockstep.core.parity.evidence.store import FolderStore
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.judge.validation import means
from lockstep.core.parity.measures.verdict import Check, Finding
from lockstep.core.train.validation import LOSS, TOP1, Validation
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults import evaluation as faults
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend

OF_VALIDATION = {"val/loss", "val/top1", "validation/nll", "validation/top1"}


def checked(backend: TorchBackend, config: RunConfig) -> Evidence:
    """Gather the evidence of a check during training, with two held-out micro-batches."""
    batch = text_batch(config)
    held_out = Validation(text_batch(config, 1).micro_batches(config.train.micro_batch_size))
    return gather(backend.open(config), config, batch, probe_of(batch, config), validation=held_out)


def judged(evidence: Evidence, config: RunConfig) -> Check:
    return judge(evidence, Reference.open(JaxBackend(), config))


def findings_of(check: Check) -> dict[str, Finding]:
    return {found.tap: found for found in check.findings if found.stage == "evaluation"}


@pytest.mark.parametrize("policy", ["bf16", "fp32", "fp64"])
def test_an_honest_validation_agrees(policy: str) -> None:
    config = tiny_config(policy)
    evidence = checked(TorchBackend(), config)
    check = judged(evidence, config)
    assert check.verdict == "agreed", check.origin
    found = findings_of(check)
    assert set(found) >= OF_VALIDATION | {"nll", "top1"}
    assert found["val/loss"].size == 4 * 32 and found["validation/nll"].size == 2 * 32
    assert evidence.record.metrics.keys() == {LOSS, TOP1} and "validation" not in check.not_exercised


@pytest.mark.parametrize(
    ("fault", "taps"),
    [
        (faults.NllScaledInEvaluation, {"nll", "validation/nll"}),
        (faults.NllScaledWithoutLossMask, {"nll", "validation/nll"}),
        (faults.FirstTokensLeftOutOfTheMean, {"val/loss"}),
        (faults.LastTokensLeftOutOfEvaluation, {"nll", "top1", "validation/nll", "validation/top1"}),
    ],
)
def test_a_wrong_validation_is_named(fault: type[TorchBackend], taps: set[str]) -> None:
    config = tiny_config()
    check = judged(checked(fault(), config), config)
    assert {found.stage for found in check.findings if not found.ok} == {"evaluation"}
    assert {found.tap.removesuffix("_fp32") for found in check.findings if not found.ok} == taps


@pytest.mark.parametrize("every", [0, 50])
def test_fp32_is_evaluated_in_training_if_the_run_asks_for_it(every: int) -> None:
    config = tiny_config()
    config = config.model_copy(update={"log": config.log.model_copy(update={"fp32_loss_every": every})})
    assert ("nll_fp32" in checked(TorchBackend(), config).evaluated) == bool(every)


@pytest.mark.parametrize("change", [lambda v: 0.97 * v, lambda v: v * (1 + 1e-12), lambda v: float("nan")])
def test_a_mean_that_is_not_that_of_the_scores_is_found(change: Callable[[float], float]) -> None:
    nll = np.random.default_rng(0).gamma(2.0, 3.0, 512).astype(np.float32)
    every = {"nll": nll, "top1": (nll < 5).astype(np.int32)}
    right = {LOSS: float(nll.mean(dtype=np.float64)), TOP1: float((nll < 5).mean())}
    assert all(found.ok for found in means(right, every))
    for metric in (LOSS, TOP1):
        wrong = {found.tap for found in means({**right, metric: change(right[metric])}, every) if not found.ok}
        assert wrong == {metric}


def test_the_mean_of_a_data_set_of_a_mixture_is_held_to_its_own_scores() -> None:
    nll = np.random.default_rng(0).gamma(2.0, 3.0, 512).astype(np.float32)
    source = np.repeat([0, 1, 0, 1], 128).astype(np.int32)
    every = {"nll": nll, "top1": (nll < 5).astype(np.int32), "source": source}
    right = {LOSS: float(nll.mean(dtype=np.float64)), TOP1: float((nll < 5).mean())}
    for number, name in enumerate(("code", "web")):
        right[f"{LOSS}/{name}"] = float(nll[source == number].mean(dtype=np.float64))
    assert len(list(means(right, every))) == 4 and all(found.ok for found in means(right, every))
    swapped = {**right, f"{LOSS}/code": right[f"{LOSS}/web"], f"{LOSS}/web": right[f"{LOSS}/code"]}
    assert {found.tap for found in means(swapped, every) if not found.ok} == {f"{LOSS}/code", f"{LOSS}/web"}
    one_is_lost = {name: value for name, value in right.items() if name != f"{LOSS}/web"}
    assert not all(found.ok for found in means(one_is_lost, every))
    assert not all(found.ok for found in means({**right, f"{LOSS}/x": 1.0}, every))


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_mean_of_what_is_not_finite_only_inherits_that(odd: float) -> None:
    every = {"nll": np.array([1.0, odd], np.float32), "top1": np.zeros(2, np.int32)}
    assert all(found.ok for found in means({LOSS: odd, TOP1: 0.0}, every))
    assert not all(found.ok for found in means({LOSS: 1.0, TOP1: 0.0}, every))
    assert not all(found.ok for found in means({TOP1: 0.0}, every))


def test_it_is_judged_from_a_folder_and_evidence_of_before_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config()
    evidence = checked(faults.FirstTokensLeftOutOfTheMean(), config)
    save_evidence(evidence, FolderStore.create(tmp_path / "evidence"))
    found = judged(open_evidence(tmp_path / "evidence"), config)
    assert found.findings == judged(evidence, config).findings and not findings_of(found)[LOSS].ok
    monkeypatch.setattr(saved, "asdict", lambda of: {k: v for k, v in asdict(of).items() if k != "held_out"})
    saved.save_evidence(evidence, FolderStore.create(tmp_path / "before"))
    assert open_evidence(tmp_path / "before").held_out is None


def test_the_micro_batch_that_is_judged_changes_with_the_step() -> None:
    config = tiny_config()
    chosen = set()
    session = TorchBackend().open(config)
    micros = text_batch(config, 9).micro_batches(2)
    for seed in range(6):
        batch = text_batch(config, seed)
        evidence = gather(session, config, batch, probe_of(batch, config), validation=Validation(micros))
        assert evidence.held_out is not None
        chosen.add(next(i for i, m in enumerate(micros) if np.array_equal(m.tokens, evidence.held_out.batch.tokens)))
    assert chosen == {0, 1}
