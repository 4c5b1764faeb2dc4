"""Measures besides the step: when they are made, and their values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lockstep.core.backend import Batch
from lockstep.core.config.schema import EvalConfig, LogConfig, RunConfig
from lockstep.core.run.data import RunData
from lockstep.core.train import loop
from lockstep.core.train.loop import due, evaluated, sample, step_records
from lockstep.core.train.validation import Validation, means
from lockstep.parity_tests.clock import Clock
from lockstep.parity_tests.loop.runs import STEPS, Folder
from lockstep.torch_backend.session import TorchSession

MEASURED = {"val/loss", "val/top1"}, {"fp32/loss", "fp32/difference", "train/top1"}


def steps_with(folder: Folder, name: str, metric: str) -> list[int]:
    return [r["step"] for r in folder.records(name) if metric in r["metrics"]]


def test_each_at_its_own_interval_and_at_the_last_step(folder: Folder) -> None:
    settings = {
        "eval.every": 5,
        "log.fp32_loss_every": 4,
        "log.norms_every": 7,
        "log.sample_every": 9,
        "log.sample_tokens": 3,
        "checkpoint.every": 5,
        "checkpoint.keep": 9,
    }
    assert folder.train("all", settings) == 0
    for metric in MEASURED[0]:
        assert steps_with(folder, "all", metric) == [5, 10, STEPS]
    for metric in MEASURED[1]:
        assert steps_with(folder, "all", metric) == [4, 8, STEPS]
    for metric in ("grad_norm/matrices", "param_norm/gains", "update_ratio/embedding"):
        assert steps_with(folder, "all", metric) == [7, STEPS]
    samples = {r["step"]: r["sample"] for r in folder.records("all") if r["sample"] is not None}
    assert list(samples) == [9, STEPS]
    assert all(text.startswith("The meaning of life is ") and len(text) > 23 for text in samples.values())
    assert [p.name for p in folder.run("all").checkpoints()] == ["step_000005", "step_000010", "step_000012"]


def test_zero_is_never(folder: Folder) -> None:
    assert folder.train("none", {"log.sample_every": 0}) == 0
    assert all(not r["metrics"] and r["sample"] is None for r in folder.records("none"))
    assert not folder.run("none").checks()
    assert [p.name for p in folder.run("none").checkpoints()] == ["step_000012"]


@pytest.mark.parametrize(("every", "steps"), [(0, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_due(every: int, steps: list[int]) -> None:
    assert [step for step in range(1, 6) if due(every, step, 5)] == steps


@pytest.fixture(scope="module")
def config(tokens, tmp_path_factory) -> RunConfig:
    folder = Folder(tmp_path_factory.mktemp("config"), tokens)
    assert folder.train("model", {"train.steps": 4, "eval.every": 2, "log.fp32_loss_every": 2, "eval.batches": 2}) == 0
    return folder.run("model").config


def test_validation_is_what_a_direct_computation_says(config: RunConfig) -> None:
    data = RunData.open(config)
    records = list(step_records(TorchSession(config), data, 1, "cpu"))
    session = TorchSession(config)
    for record in records:
        batch = data.batch(record.step)
        session.step(batch)
        if record.step % 2:
            assert not record.metrics
            continue
        nll, hits = [], []
        for held_out in data.validation:
            logits = [
                [session.next_token_logits(row[: i + 1]).astype(np.float64) for i in range(len(row))]
                for row in held_out.tokens
            ]
            at = np.asarray(logits)
            largest = at.max(-1)
            normal = largest + np.log(np.exp(at - largest[..., None]).sum(-1))
            nll.append(normal - np.take_along_axis(at, held_out.targets[..., None], -1)[..., 0])
            hits.append(at.argmax(-1) == held_out.targets)
        assert len(nll) == 2
        assert record.metrics["val/loss"] == pytest.approx(np.mean(nll), abs=2e-4)
        assert record.metrics["val/top1"] == pytest.approx(np.mean(hits), abs=0.02)
        part = replace_batch(batch, config.log.fp32_loss_sequences)
        full = evaluated(session, part, config.train, "fp32")["nll"].mean(dtype=np.float64)
        assert record.metrics["fp32/loss"] == full
        trained = evaluated(session, part, config.train)["nll"].mean(dtype=np.float64)
        assert record.metrics["fp32/difference"] == trained - full
        assert record.metrics["fp32/difference"] != 0


def replace_batch(batch: Batch, count: int) -> Batch:
    return Batch(batch.tokens[:count], batch.targets[:count], batch.weights[:count])


def test_the_fp32_slice_has_its_own_size(config: RunConfig) -> None:
    config = config.model_copy(update={"log": LogConfig(norms_every=0, fp32_loss_every=1, fp32_loss_sequences=1)})
    data = RunData.open(config)
    record = next(iter(step_records(session := TorchSession(config), data, 1, "cpu")))
    one = session.evaluate(replace_batch(data.batch(1), 1), "fp32")["nll"].mean(dtype=np.float64)
    assert record.metrics["fp32/loss"] == one


def test_every_validation_batch_weighs_the_same() -> None:
    class Scores:
        def evaluate(self, batch: Batch) -> dict[str, np.ndarray]:
            value = float(batch.tokens[0, 0])
            return {"nll": np.full((2, 2), value, np.float32), "top1": np.full((2, 2), value > 1)}

    def batch(value: int) -> Batch:
        tokens = np.full((2, 2), value, np.int32)
        return Batch(tokens, tokens, np.ones((2, 2), np.float32))

    found = means(Validation([batch(1), batch(2), batch(6)]).scores(Scores()))  # type: ignore[arg-type]
    assert found == {"val/loss": 3.0, "val/top1": pytest.approx(2 / 3)}


def test_seconds_are_those_of_the_step_alone(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    class SlowToMeasure(TorchSession):
        def step(self, batch, *, norms=False):
            clock.sleep(2)
            return super().step(batch, norms=norms)

        def evaluate(self, batch, policy=None):
            clock.sleep(500)
            return super().evaluate(batch, policy)

    monkeypatch.setattr(loop, "time", clock)
    config = config.model_copy(update={"eval": EvalConfig(every=1, batches=1)})
    data = RunData.open(config)
    for record in step_records(SlowToMeasure(config), data, 1, "cpu"):
        assert (record.seconds, record.tokens_per_second) == (2, record.tokens / 2)
    assert clock.now > 500


def test_looking_changes_no_bit_of_the_weights(folder: Folder, straight) -> None:
    settings = {"eval.every": 1, "log.fp32_loss_every": 1, "log.norms_every": 1, "log.sample_every": 6}
    assert folder.train("looked", settings | {"log.sample_tokens": 2}) == 0
    assert folder.weights("looked") == straight("eager").weights("straight")
    assert folder.losses("looked") == straight("eager").losses("straight")


def test_a_sample_is_a_function_of_weights_seed_and_step(config: RunConfig) -> None:
    data, session = RunData.open(config), TorchSession(config)
    first = sample(session, data, 3)
    assert first == sample(TorchSession(config), data, 3)
    assert first != sample(session, data, 4)
    empty = replace(data, config=config.model_copy(update={"log": LogConfig(sample_prompt="", sample_tokens=3)}))
    assert isinstance(sample(session, empty, 1), str)
