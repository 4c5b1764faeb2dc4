"""A loss or gradient that is not finite: the step is left out, the run ends, and the line names the first place."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.core.backend import Session
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.judge.update import flat
from lockstep.core.run.directory import RunDir
from lockstep.core.train.finite import NotFinite
from lockstep.jax_backend.session import JaxSession
from lockstep.parity_tests.guards import candidates
from lockstep.parity_tests.guards.candidates import AT_STEP, GRADIENT_OF
from lockstep.parity_tests.loop.runs import Folder, one_line
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.scripts import cli
from lockstep.scripts.shared import backends
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

pytestmark = pytest.mark.usefixtures("in_one_process")


def config_of(ranks: int = 1, dtype: str = "fp32", **optim) -> RunConfig:
    """Two micro-batches a rank; on one rank the shape that other tests compile for the reference."""
    config = tiny_config("fp32", train={"micro_batch_size": 2 // ranks, "ranks": ranks})
    changed = {
        "parallel": config.parallel.model_copy(update={"gradient_dtype": dtype}),
        "optim": config.optim.model_copy(update=optim),
    }
    return config.model_copy(update=changed)


def steps_until(session: Session) -> None:
    for _ in range(AT_STEP - 1):
        session.step(text_batch(tiny_config(train={"batch_size": 4, "sequence_length": 32})))


def left_out(session: Session, norms: bool = False) -> NotFinite:
    """Return the error of the step that raises, after checking that it changed nothing."""
    steps_until(session)
    before = flat(session.state())
    with pytest.raises(NotFinite) as caught:
        session.step(text_batch(tiny_config(train={"batch_size": 4, "sequence_length": 32})), norms=norms)
    after = flat(session.state())
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    return caught.value


@pytest.mark.parametrize("optim", [{}, {"name": "muon"}, {"name": "adamw8bit", "eight_bit": "torchao"}])
def test_a_loss_that_is_nan_moves_nothing(optim: dict) -> None:
    found = left_out(candidates.NanLoss().open(config_of(**optim)), norms=True)
    assert str(found) == (
        f"step {AT_STEP}: loss nan, gradient norm nan: not finite; first in the loss (nan); the step was left out"
    )


def test_a_gradient_that_is_infinite_moves_nothing_and_is_named() -> None:
    found = left_out(candidates.InfGradient().open(config_of()))
    assert np.isfinite(found.record.loss) and not np.isfinite(found.record.grad_norm)
    assert found.where == f"first in the gradient of {GRADIENT_OF}"


def test_the_reference_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    session = JaxSession(config_of())
    accumulate = JaxSession.accumulate

    def broken(self, batch):
        loss, nll, grads = accumulate(self, batch)
        grads = {n: g / 0 if n == GRADIENT_OF and self.steps_done + 1 == AT_STEP else g for n, g in grads.items()}
        return loss, nll, grads

    monkeypatch.setattr(JaxSession, "accumulate", broken)
    assert left_out(session).where == f"first in the gradient of {GRADIENT_OF}"


@pytest.mark.parametrize(
    ("backend", "where"),
    [
        (candidates.NanLoss, "on rank 1 first in the loss (nan)"),
        (candidates.InfGradient, f"on rank 1 first in the gradient of {GRADIENT_OF}"),
    ],
)
def test_among_ranks_the_one_that_had_it_is_named_and_none_moves(backend: type[TorchBackend], where: str) -> None:
    session = backend().open(config_of(2))
    assert left_out(session).where == where
    mine, other = session.rank_reports()  # type: ignore[attr-defined]
    assert mine.state == other.state
    assert mine.record.step == other.record.step == AT_STEP
    session.close()


def test_what_only_the_sum_cannot_hold_is_on_no_rank() -> None:
    session = candidates.Overflows().open(config_of(2, "fp16"))
    assert left_out(session).where == "on no single rank: it occurs in the sum over ranks"
    session.close()


def test_fp16_leaves_the_step_out_and_goes_on() -> None:
    config = tiny_config("fp16", train={"batch_size": 4, "micro_batch_size": 1, "sequence_length": 32})
    session = candidates.NanLoss().open(config)
    steps_until(session)
    before = session.state()
    session.step(text_batch(config))
    after = session.state()
    assert all(np.array_equal(before.params[name], p) for name, p in after.params.items())
    assert (after.step, after.updates) == (AT_STEP, AT_STEP - 1)


# Through the command line


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_the_run_ends_with_one_line_and_its_last_good_checkpoint(
    name: str, folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "torch":
        monkeypatch.setitem(backends.BY_NAME, "torch", f"{candidates.__name__}:NanLoss")
    else:
        accumulate = JaxSession.accumulate

        def broken(self, batch):
            loss, nll, grads = accumulate(self, batch)
            return loss * (np.nan if self.steps_done + 1 == AT_STEP else 1), nll, grads

        monkeypatch.setattr(JaxSession, "accumulate", broken)
    assert folder.train("nan", {"checkpoint.every": 1, "device": "cpu"}, "--backend", name) == 2
    said = one_line(capsys.readouterr().err)
    assert said.startswith(f"lockstep: step {AT_STEP}: loss nan, gradient norm ") and "first in the loss (nan)" in said
    assert f"continue with: lockstep train --resume {folder.path / 'nan'}" in said
    assert [step for step, _ in folder.losses("nan")] == [1, 2]
    run = RunDir.open(folder.path / "nan")
    assert [path.name for path in run.checkpoints()] == ["step_000001", "step_000002"]
    assert not run.info["finished"]
    monkeypatch.undo()
    assert folder.resume("nan") == 0
    assert folder.train("straight", {}, "--backend", name) == 0
    assert folder.losses("nan") == folder.losses("straight")
    assert folder.weights("nan") == folder.weights("straight")


def test_a_checked_step_is_judged_and_packed(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(backends.BY_NAME, "torch", f"{candidates.__name__}:NanLoss")
    assert folder.train("nan", {"parity.every": AT_STEP}) == 2
    assert f"step {AT_STEP}: loss nan" in one_line(capsys.readouterr().err)
    first, second = RunDir.open(folder.path / "nan").checks()
    assert (first["step"], first["verdict"]) == (1, "agreed")
    assert (second["step"], second["verdict"]) == (AT_STEP, "disagreed")
    assert second["origin"]["stage"] in ("loss", "nll", "gradients")
    assert (folder.path / "nan" / "capsules" / f"step_{AT_STEP:06d}" / "repro.py").is_file()


class _LetsItPass(TorchSession):
    def step(self, batch, *, norms=False):
        from dataclasses import replace

        record = super().step(batch, norms=norms)
        return replace(record, loss=float("nan")) if record.step == AT_STEP else record


class LetsItPass(TorchBackend):
    """A candidate that makes the step all the same."""

    session_class = _LetsItPass


def test_a_candidate_that_lets_it_pass_is_stopped_before_a_checkpoint(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(backends.BY_NAME, "torch", f"{__name__}:LetsItPass")
    assert folder.train("nan", {"checkpoint.every": 1}) == 2
    assert "the session does not report where, and its weights may be affected" in one_line(capsys.readouterr().err)
    assert [path.name for path in RunDir.open(folder.path / "nan").checkpoints()] == ["step_000001", "step_000002"]


def test_side_by_side_it_is_a_disagreement_with_an_origin(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    words = folder.arguments("run", {})
    words = [
        "parity",
        words[1],
        *words[4:],
        "--steps",
        str(AT_STEP),
        "--candidate",
        f"{candidates.__name__}:InfGradient",
    ]
    assert cli.run(words) == 1
    out, error = capsys.readouterr()
    assert error == ""
    assert f"step {AT_STEP}: parity disagreed" in out and f"step {AT_STEP - 1}: parity agreed" in out
