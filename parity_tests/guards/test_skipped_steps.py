"""`train.on_not_finite = "skip"`: nothing moves, the count is right and kept, and a run that only skips ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.core.backend import Session, State
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.judge.update import flat
from lockstep.core.parity.reference.self_check import sound_reference
from lockstep.core.train.finite import NotFinite, is_finite, require_progress
from lockstep.core.train.loss_scale import SKIPPED
from lockstep.core.train.skipped_steps import IN_A_ROW
from lockstep.jax_backend.backend import JaxBackend
from lockstep.jax_backend.session import JaxSession
from lockstep.parity_tests.guards import candidates
from lockstep.parity_tests.guards.candidates import AT_STEP, GRADIENT_OF
from lockstep.parity_tests.guards.test_not_finite import config_of, steps_until
from lockstep.parity_tests.loop.runs import Folder, one_line
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.scripts import cli
from lockstep.scripts.shared import backends
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

SKIP = {"train.on_not_finite": "skip", "device": "cpu"}


pytestmark = pytest.mark.usefixtures("in_one_process")


def skipping(ranks: int = 1, policy: str = "fp32", **optim: Any) -> RunConfig:
    config = config_of(ranks, **optim)
    precision = config.precision.model_copy(update={"policy": policy})
    train = config.train.model_copy(update={"on_not_finite": "skip"})
    return config.model_copy(update={"train": train, "precision": precision})


def batch_of(step: int):
    return text_batch(tiny_config(train={"batch_size": 4, "sequence_length": 32}), step)


class _BrokenJax(JaxSession):
    """The JAX twin of candidates.NanLoss."""

    def accumulate(self, batch):
        loss, nll, grads = super().accumulate(batch)
        factor = np.nan if self.steps_done + 1 == AT_STEP else 1.0
        return loss * factor, nll, {name: g * factor for name, g in grads.items()}


def moved(before: State, after: State) -> set[str]:
    one, other = flat(before), flat(after)
    return {name for name in one if not np.array_equal(one[name], other[name])}


@pytest.mark.parametrize("optim", [{}, {"name": "muon"}, {"name": "adamw8bit", "eight_bit": "torchao"}])
@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_step_that_is_nan_moves_nothing_but_its_number(name: str, optim: dict) -> None:
    config = skipping(**optim)
    session = candidates.NanLoss().open(config) if name == "torch" else _BrokenJax(config)
    steps_until(session)
    before = session.state()
    record = session.step(batch_of(AT_STEP), norms=True)
    after = session.state()
    assert record.left_out == "first in the loss (nan)" and np.isnan(record.loss)
    assert (record.metrics[SKIPPED], record.metrics[IN_A_ROW]) == (1, 1)
    assert moved(before, after) == {"step", f"scalars/{SKIPPED}", f"scalars/{IN_A_ROW}"}
    assert (after.step, after.updates) == (AT_STEP, AT_STEP - 1)
    record = session.step(batch_of(AT_STEP + 1))
    assert record.left_out is None and (record.metrics[SKIPPED], record.metrics[IN_A_ROW]) == (1, 0)


def test_both_backends_go_on_alike() -> None:
    """AdamW's bias correction counts updates: off by one, the step after a skip would differ by a third."""
    config = skipping(policy="fp64")
    ours, theirs = candidates.NanLoss().open(config), _BrokenJax(config)
    for step in range(AT_STEP + 2):
        one, other = ours.step(batch_of(step)), theirs.step(batch_of(step))
        assert one.metrics == other.metrics and one.left_out == other.left_out
    first = TorchBackend().open(config).state()
    for name, p in ours.state().params.items():
        distance = np.linalg.norm(p - theirs.state().params[name])
        assert distance < 1e-9 * np.linalg.norm(p - first.params[name])


def test_a_resumed_state_keeps_the_count_and_the_bits() -> None:
    config = skipping()
    whole, part = candidates.NanLoss().open(config), TorchBackend().open(config)
    for step in range(AT_STEP):
        whole.step(batch_of(step))
    part.load(whole.state())
    for step in range(AT_STEP, AT_STEP + 2):
        assert whole.step(batch_of(step)).metrics == part.step(batch_of(step)).metrics
    assert not moved(whole.state(), part.state())
    # Taken over by a run that stops, updates are still counted.
    stops = TorchBackend().open(config_of())
    stops.load(whole.state())
    assert stops.state().updates == whole.state().updates


def check_of(session: Session, config: RunConfig):
    steps_until(session)
    if isinstance(session, _NanWeight):
        session.poison()
    evidence = gather(session, config, uneven_weights(batch_of(AT_STEP), 1))
    return judge(evidence, sound_reference(JaxBackend(), config))


class _NanWeight(TorchSession):
    """A weight that is NaN makes the step NaN in the reference as well."""

    def poison(self) -> None:
        with torch.no_grad():
            self.parameters["final_norm.weight"][0] = float("nan")


def test_a_check_agrees_when_both_are_not_finite() -> None:
    config = skipping()
    check = check_of(_NanWeight(config), config)
    assert check.verdict == "agreed", check.origin
    assert any("that are not finite, as in the twin" in line for line in check.not_covered)
    assert {"moments", "update", "loss_scale"} <= {f.stage for f in check.findings}


class _Moves(_NanWeight):
    """NaN reaches the moments, though the step calls itself left out."""

    def step(self, batch, *, norms=False):
        record = super().step(batch, norms=norms)
        if record.left_out is not None:
            self.optimizer.step()
        return record


class _Counts(_NanWeight):
    """Leaves the step out, and does not count it."""

    def scalars_after(self, finite):
        return super().scalars_after(True)


@pytest.mark.parametrize(("fault", "stage"), [(_Moves, "moments"), (_Counts, "loss_scale")])
def test_a_planted_fault_is_named(fault: type[_NanWeight], stage: str) -> None:
    config = skipping()
    check = check_of(fault(config), config)
    assert check.origin is not None and check.origin.stage == stage


class _Invents(TorchSession):
    """Skips a step of which everything is finite."""

    def scalars_after(self, finite):
        return super().scalars_after(self.steps_done + 1 != AT_STEP)


def test_a_step_that_is_skipped_for_nothing_is_named() -> None:
    check = check_of(_Invents(skipping()), skipping())
    assert check.origin is not None and check.origin.stage == "loss_scale"


def test_among_ranks_all_leave_it_out_and_each_says_where() -> None:
    session = candidates.InfGradient().open(skipping(2))
    steps_until(session)
    before = session.state()
    record = session.step(batch_of(AT_STEP))
    assert record.left_out == f"on rank 1 first in the gradient of {GRADIENT_OF}"
    assert moved(before, session.state()) == {"step", f"scalars/{SKIPPED}", f"scalars/{IN_A_ROW}"}
    mine, other = session.rank_reports()  # type: ignore[attr-defined]
    assert mine.state == other.state
    session.close()


# Through the command line


@pytest.fixture
def nan_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.BY_NAME, "torch", f"{candidates.__name__}:NanLoss")


def test_the_run_goes_on_and_says_so(folder: Folder, nan_loss: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert folder.train("skips", SKIP) == 0
    out = capsys.readouterr().out
    assert f"step {AT_STEP}: left out, not finite: first in the loss (nan); 1 so far" in out
    records = folder.records("skips")
    assert [r["step"] for r in records if r["left_out"]] == [AT_STEP]
    assert [r["metrics"][SKIPPED] for r in records] == [float(r["step"] >= AT_STEP) for r in records]
    assert (folder.path / "skips" / "spikes" / f"step_{AT_STEP:06d}" / "batch.npz").is_file()


def test_a_run_that_stopped_goes_on_beyond_the_step(
    folder: Folder, nan_loss: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert folder.train("stops", {"checkpoint.every": 1, "device": "cpu"}) == 2
    capsys.readouterr()
    assert folder.resume("stops", "--train.on-not-finite", "skip") == 0
    assert folder.train("skips", SKIP) == 0
    assert folder.weights("stops") == folder.weights("skips")


class _AlwaysNan(TorchSession):
    def micro_loss(self, *inputs):
        loss, nll = super().micro_loss(*inputs)
        return (loss * float("nan"), nll) if self.steps_done >= 2 else (loss, nll)


class AlwaysNan(TorchBackend):
    """Every step from the third on is not finite."""

    session_class = _AlwaysNan


def test_too_many_in_a_row_end_the_run(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(backends.BY_NAME, "torch", f"{__name__}:AlwaysNan")
    assert folder.train("nan", {**SKIP, "train.skips_in_a_row": 3}) == 2
    said = one_line(capsys.readouterr().err)
    assert said.startswith("lockstep: step 5: loss nan, gradient norm nan: not finite; first in the loss (nan); ")
    assert "3 left out in a row (train.skips_in_a_row = 3)" in said
    assert [r["step"] for r in folder.records("nan")] == [1, 2, 3, 4]


def test_not_finite_without_a_word_is_still_an_error() -> None:
    record = replace(TorchBackend().open(skipping()).step(batch_of(1)), loss=float("nan"))
    assert not is_finite(record) and is_finite(replace(record, left_out="somewhere"))
    with pytest.raises(NotFinite, match="2 left out in a row"):
        require_progress(replace(record, metrics={IN_A_ROW: 2.0}), 2)
    require_progress(replace(record, metrics={IN_A_ROW: 1.0}), 2)


def test_a_step_that_was_left_out_is_replayed_from_its_sketches(folder: Folder, capsys: Any) -> None:
    """Values outside FP16 are outside the twin's FP16 too: no disagreement, and reported as not covered."""
    settings = {"precision.policy": "fp16", "precision.loss_scale": 2.0**60, "parity.record_every": 1, "train.steps": 4}
    assert folder.train("run", settings) == 0
    assert folder.records("run")[0]["metrics"][SKIPPED] == 1
    assert cli.run(["replay", str(folder.path / "run"), "--step", "1"]) == 0
    assert "from its sketches" in (said := capsys.readouterr().out) and "as in the twin" in said
