"""A run goes on with other ranks or another micro-batch: the same samples in the same order, the same losses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import lockstep.scripts.commands.train
from lockstep.core.data.sampler import BlockSampler
from lockstep.parity_tests.loop.runs import STEPS, Folder
from lockstep.parity_tests.ranks import harness
from lockstep.parity_tests.stored import stored

# A gradient is a sum of FP64 numbers in another order: some 1e-16 of its length a step, and Adam divides it by its own.
WITHIN = {"fp64": 1e-12}


class After:
    """Interrupts after so many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def is_set(self) -> bool:
        self.left -= 1
        return self.left <= 0


pytestmark = pytest.mark.usefixtures("in_one_process")


@pytest.fixture(autouse=True)
def _processes() -> Iterator[None]:
    yield
    harness.let_go()


def three_steps(monkeypatch: pytest.MonkeyPatch, steps: int = 3) -> None:
    """Interrupt runs after `steps` steps, and let them start their ranks themselves instead of by torchrun."""

    @contextmanager
    def interrupts() -> Iterator[After]:
        yield After(steps)

    monkeypatch.setattr(lockstep.scripts.commands.train, "interrupts", interrupts)
    monkeypatch.setattr(lockstep.scripts.commands.train, "needs_start", lambda *_: False)


def test_one_two_four_one_ranks(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"precision.policy": "fp64", "train.micro_batch_size": 1, "checkpoint.keep": 9}
    assert folder.train("alone", settings) == 0
    three_steps(monkeypatch)
    assert folder.train("ranks", settings) == 130
    for ranks, code in ((2, 130), (4, 130), (1, 0)):
        harness.let_go()
        assert folder.resume("ranks", "--train.ranks", str(ranks)) == code
    alone, several = folder.records("alone"), folder.records("ranks")
    assert [r["step"] for r in several] == list(range(1, STEPS + 1))
    assert [r["digest"] for r in several] == [r["digest"] for r in alone]
    # Up to the first step of two ranks nothing differs, in bits.
    assert [r["loss"] for r in several[:3]] == [r["loss"] for r in alone[:3]]
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([r[key] for r in several], [r[key] for r in alone], rtol=WITHIN["fp64"])
    one, other = (stored(folder.path / name / "checkpoints" / f"step_{STEPS:06d}") for name in ("alone", "ranks"))
    for name, p in one.params.items():
        assert np.linalg.norm(other.params[name] - p) <= 1e-9 * np.linalg.norm(p), name
    resumes = folder.run("ranks").info["resumes"]
    assert [r.get("settings") for r in resumes] == [{"train.ranks": n} for n in ("2", "4", "1")]
    assert folder.run("ranks").config.train.ranks == 1


def test_from_whole_weights_to_parts_and_back(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "precision.policy": "fp64",
        "train.micro_batch_size": 1,
        "checkpoint.keep": 9,
        "compile.scope": "blocks",
    }
    assert folder.train("alone", settings) == 0
    three_steps(monkeypatch)
    assert folder.train("parts", settings) == 130
    for ranks, strategy, code in (("2", "fsdp", 130), ("2", "ddp", 130), ("1", "fsdp", 0)):
        assert folder.resume("parts", "--train.ranks", ranks, "--parallel.strategy", strategy) == code
    alone, parts = folder.records("alone"), folder.records("parts")
    assert [r["digest"] for r in parts] == [r["digest"] for r in alone]
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([r[key] for r in parts], [r[key] for r in alone], rtol=WITHIN["fp64"])
    one, other = (stored(folder.path / name / "checkpoints" / f"step_{STEPS:06d}") for name in ("alone", "parts"))
    for name, p in one.params.items():
        assert np.linalg.norm(other.params[name] - p) <= 1e-9 * np.linalg.norm(p), name


def test_another_micro_batch(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"precision.policy": "fp64", "train.micro_batch_size": 1, "eval.every": 3, "eval.batches": 4}
    assert folder.train("alone", settings) == 0
    three_steps(monkeypatch, 5)
    assert folder.train("other", settings) == 130
    three_steps(monkeypatch, 99)
    assert folder.resume("other", "--train.micro-batch-size", "4", "--log.norms-every", "2") == 0
    alone, other = folder.records("alone"), folder.records("other")
    assert [r["digest"] for r in other] == [r["digest"] for r in alone]
    np.testing.assert_allclose([r["loss"] for r in other], [r["loss"] for r in alone], rtol=WITHIN["fp64"])
    # Validation reads the same sequences.
    assert folder.run("other").config.eval.batches == 1
    losses = [[r["metrics"]["val/loss"] for r in records if "val/loss" in r["metrics"]] for records in (alone, other)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=WITHIN["fp64"])
    # The run file stays as it was; what was changed stands in run.json.
    assert "micro_batch_size = 1" in (folder.path / "other" / "config.toml").read_text()
    info = json.loads((folder.path / "other" / "run.json").read_text())
    changed = {"train.micro_batch_size": "4", "log.norms_every": "2", "eval.batches": "1"}
    assert info["settings"] == changed == info["resumes"][-1]["settings"]


def test_an_order_that_depends_on_ranks_is_seen(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler that begins elsewhere after a resume with other ranks: the digests must show it."""
    settings = {"train.micro_batch_size": 1}
    assert folder.train("alone", settings) == 0
    three_steps(monkeypatch)
    assert folder.train("other", settings) == 130
    three_steps(monkeypatch, 99)
    right = BlockSampler.window_starts
    later = lambda self, first, count, length: right(self, first + length, count, length)  # noqa: E731
    monkeypatch.setattr(BlockSampler, "window_starts", later)
    assert folder.resume("other", "--train.micro-batch-size", "2") == 0
    alone, other = ([r["digest"] for r in folder.records(name)] for name in ("alone", "other"))
    assert alone[:3] == other[:3] and not set(alone[3:]) & set(other[3:])
