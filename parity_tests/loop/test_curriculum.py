"""Runs whose sequences grow on the way: resumed anywhere, checked on both sides, on two ranks, a program a length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lockstep.core.run.data import RunData
from lockstep.core.train.metrics import RECOMPILED, SEQUENCE_LENGTH
from lockstep.core.train.validation import LOSS, Validation, means
from lockstep.parity_tests.loop.runs import COMPILED, STEPS, Folder
from lockstep.parity_tests.loop.test_elastic import three_steps
from lockstep.parity_tests.ranks import harness
from lockstep.scripts import cli
from lockstep.scripts.shared.startup_banner import sequences_of
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

# In 12 steps, 8 at 32 tokens a sequence and 4 at 64; the first of the longer ones is step 9.
GROWING = {"train.curriculum": "32:0.667, 64:0.333", "checkpoint.keep": 20, "checkpoint.best": False}
SWITCH = 8
TRACED = {"enabled": True, "backend": "aot_eager"}
SHAPES = [(4, 32)] * SWITCH + [(2, 64)] * (STEPS - SWITCH)


pytestmark = pytest.mark.usefixtures("in_one_process")


@pytest.fixture(autouse=True)
def _processes() -> Iterator[None]:
    yield
    harness.let_go()


def told(folder: Folder, name: str) -> list[tuple[object, ...]]:
    keys = ("step", "loss", "grad_norm", "lr", "digest", "tokens")
    return [tuple(record[key] for key in keys) for record in folder.records(name)]


def test_lengths_tokens_and_mfu_of_each_step(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert folder.train("grown", GROWING) == 0
    records = folder.records("grown")
    assert {record["tokens"] for record in records} == {4 * 32}
    assert [record["metrics"][SEQUENCE_LENGTH] for record in records] == [shape[1] for shape in SHAPES]
    out = capsys.readouterr().out
    said = "4 sequences of 32 up to step 8, then 2 sequences of 64 up to step 12"
    assert sequences_of(folder.run("grown").config.train) == said
    assert out.count("tokens from here") == 1 and "step 9: sequences of 64 tokens from here" in out


@pytest.mark.parametrize("stop", [SWITCH - 1, SWITCH, SWITCH + 1])
def test_a_resume_before_at_and_after_the_switch_changes_no_bit(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    assert folder.train("straight", GROWING) == 0
    three_steps(monkeypatch, stop)
    assert folder.train("stopped", GROWING) == 130
    three_steps(monkeypatch, 99)
    assert folder.resume("stopped") == 0
    assert told(folder, "stopped") == told(folder, "straight")
    assert folder.weights("stopped") == folder.weights("straight")


def test_two_ranks_see_the_same_batches(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = GROWING | {"precision.policy": "fp64"}
    assert folder.train("alone", settings) == 0
    three_steps(monkeypatch, 99)
    assert folder.train("ranks", settings | {"train.ranks": 2, "train.micro_batch_size": 2}) == 0
    alone, ranks = folder.records("alone"), folder.records("ranks")
    assert [r["digest"] for r in ranks] == [r["digest"] for r in alone]
    np.testing.assert_allclose([r["loss"] for r in ranks], [r["loss"] for r in alone], rtol=1e-12)


@pytest.mark.parametrize("settings", [{}, COMPILED], ids=["eager", "compiled"])
def test_checks_during_training_agree_on_both_sides(folder: Folder, settings: dict[str, object]) -> None:
    checked = {"parity.every": 1, "parity.queue": 20, "parity.record_every": 1}
    assert folder.train("checked", GROWING | checked | settings) == 0
    checks = folder.run("checked").checks()
    assert [(c["step"], c["verdict"]) for c in checks] == [(step, "agreed") for step in range(1, STEPS + 1)]
    assert not any(RECOMPILED in record["metrics"] for record in folder.records("checked"))
    # Later, from the sketches and the state of the step before, and run again from the nearest state.
    for step in (SWITCH, SWITCH + 1):
        assert cli.run(["replay", str(folder.path / "checked"), "--step", str(step)]) == 0


def test_both_sides_agree_step_by_step_across_the_switch(folder: Folder) -> None:
    verdict = folder.path / "verdict.json"
    settings = {"train.steps": 4, "train.curriculum": "32:0.5, 64:0.5", "log.sample_every": 1}
    words = [word for word in folder.arguments("sides", settings)[1:] if word not in ("--out", str(folder.path))]
    assert cli.run(["parity", *words, "--steps", "4", "--json", str(verdict)]) == 0
    assert json.loads(verdict.read_text())["verdict"] == "agreed"
    assert folder.train("torch", settings) == folder.train("jax", settings, "--backend", "jax") == 0
    ours, theirs = folder.records("torch"), folder.records("jax")
    assert [r["digest"] for r in ours] == [r["digest"] for r in theirs]
    np.testing.assert_allclose([r["loss"] for r in ours], [r["loss"] for r in theirs], rtol=1e-2)
    assert all(r["sample"] for r in ours + theirs)


@pytest.mark.parametrize("scope, programs", [("model", 1), ("blocks", 2)])
def test_each_length_has_programs_of_its_own_and_none_is_dynamic(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, scope: str, programs: int
) -> None:
    """A program of dynamic shapes, which torch.compile tends to make for the second one, would round otherwise."""
    lengths = {"train.curriculum": "32:0.4, 16:0.3, 64:0.3", "compile.scope": scope}
    assert folder.train("run", lengths) == 0
    config = folder.run("run").config
    config = config.model_copy(update={"compile": config.compile.model_copy(update=TRACED)})
    data = RunData.open(config)
    made = ShapeEnv.create_symbol
    symbols = []

    def noted(*arguments: Any, **named: Any) -> Any:
        symbols.append(made(*arguments, **named))
        return symbols[-1]

    monkeypatch.setattr(ShapeEnv, "create_symbol", noted)
    torch._dynamo.reset()
    session = TorchBackend().open(config)
    assert isinstance(session, TorchSession)
    for number, steps in enumerate(((1, 2), (6, 7), (9, 10)), 1):
        for step in steps:
            assert RECOMPILED not in session.step(data.batch(step)).metrics
        assert session.programs == number * programs
    for step in (3, 8, 11):
        session.step(data.batch(step))
    assert session.programs == 3 * programs
    # A float, the loss weight of the batch, may be a symbol; no size is.
    assert not [s for s in symbols if str(s).startswith("s")]


def test_validation_is_of_one_length(folder: Folder) -> None:
    assert folder.train("run", GROWING | {"train.steps": 12, "eval.every": 1}) == 0
    data = RunData.open(folder.run("run").config)
    assert {batch.tokens.shape for batch in data.validation} == {(2, 32)}
    session = TorchBackend().open(data.config)
    assert means(Validation(data.validation).scores(session))[LOSS] > 0
