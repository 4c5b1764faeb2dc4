"""Sketches of a step's own gradients: they cost no pass, change no bit, and a replay judges the step that was made."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from lockstep.core.config.schema import ParityConfig
from lockstep.core.model.names import parameter_shapes
from lockstep.core.parity.evidence import recorder as recorders
from lockstep.core.parity.evidence.observations import PARAMETER, PROBE_NLL, load
from lockstep.core.parity.evidence.recorder import Recorder
from lockstep.core.parity.judge.judge import judge_observations
from lockstep.core.parity.modes.rerun import initial_state
from lockstep.parity_tests.replay.made import CONFIG, reference
from lockstep.parity_tests.tiny import text_batch
from lockstep.torch_backend.session import TorchSession

EVERY_2 = CONFIG.model_copy(update={"parity": ParityConfig(record_every=2)})
BATCH = text_batch(CONFIG)


class Counts(TorchSession):
    """Counts its forward and backward passes."""

    passes = 0

    def _forward_backward(self, micro, program, total):
        self.passes += 1
        return super()._forward_backward(micro, program, total)


class LosesTheLast(TorchSession):
    """Leaves the last micro-batch's gradients out where there are several: no single micro-batch shows it."""

    def accumulate(self, batch):
        loss, nll = super().accumulate(batch)
        micros = batch.cut(self.config.train)
        if len(micros) > 1:
            of_all = {name: p.grad.clone() for name, p in self.parameters.items()}
            shares = [micro.weights.sum() / batch.weights.sum() for micro in micros]
            super().accumulate(micros[-1])
            for name, p in self.parameters.items():
                p.grad = of_all[name] - p.grad * float(shares[-1])
        return loss, nll


class ShowsGradients:
    """A session that shows its step's gradients and sketches nothing itself."""

    def __init__(self, session):
        self.step, self.step_and_gradients = session.step, session.step_and_gradients


class ShowsNothing:
    def __init__(self, session):
        self.step = session.step


def recorded(session, folder, steps=2, config=EVERY_2):
    recorder = Recorder(config, folder, None)
    records = []
    for step in range(1, steps + 1):
        made = recorder.step if recorder.due(step) else None
        records.append(made(session, BATCH, False) if made else session.step(BATCH))
    return records, list(recorder.drain())


def judged(path):
    found, about = load(path)
    assert about["batch"] == about["probe"] == BATCH.digest()
    return judge_observations(found, about, initial_state(CONFIG), BATCH, BATCH, reference())


def test_it_costs_no_pass_and_changes_no_bit(tmp_path):
    plain, watched = Counts(CONFIG), Counts(CONFIG)
    due = [plain.step(BATCH) for _ in range(4)]
    records, lost = recorded(watched, tmp_path, steps=4)
    assert lost == [] and watched.passes == plain.passes == 4 * len(BATCH.cut(CONFIG.train))
    assert [(r.loss, r.grad_norm) for r in records] == [(r.loss, r.grad_norm) for r in due]
    assert all(np.array_equal(p, watched.state().params[n]) for n, p in plain.state().params.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_00000{n}.npz" for n in (1, 2, 4)]


def test_what_is_kept_is_the_step_s_accumulated_gradients(tmp_path):
    shown = TorchSession(CONFIG).gradients(BATCH)
    records, _ = recorded(TorchSession(CONFIG), tmp_path, steps=1)
    found, _ = load(tmp_path / "step_000001.npz")
    assert found.keys() == {PROBE_NLL, *(PARAMETER + name for name in parameter_shapes(CONFIG.model))}
    for name, grad in shown.grads.items():
        assert found[PARAMETER + name].norm == pytest.approx(float(np.linalg.norm(grad.astype(float))), rel=1e-6)
    norms = [found[PARAMETER + name].norm for name in shown.grads]
    assert float(np.linalg.norm(norms)) == pytest.approx(records[0].grad_norm, rel=1e-6)
    assert found[PROBE_NLL].size == BATCH.tokens.size


@pytest.mark.parametrize(("session", "verdict"), [(TorchSession, "agreed"), (LosesTheLast, "disagreed")])
def test_a_replay_judges_the_step_that_was_made(session, verdict, tmp_path):
    recorded(session(CONFIG), tmp_path, steps=1)
    check = judged(tmp_path / "step_000001.npz")
    assert check.verdict == verdict
    assert "taps end to end: only the step's own gradients were recorded" in check.not_covered
    if verdict == "disagreed":
        assert check.origin is not None and check.origin.stage == "gradients"


def test_a_session_that_sketches_nothing_shows_its_gradients(tmp_path):
    recorded(ShowsGradients(TorchSession(CONFIG)), tmp_path / "shown", steps=1)
    recorded(TorchSession(CONFIG), tmp_path / "sketched", steps=1)
    (ours, _), (theirs, _) = (load(tmp_path / name / "step_000001.npz") for name in ("shown", "sketched"))
    assert ours.keys() == theirs.keys()
    for name, one in theirs.items():
        np.testing.assert_allclose(ours[name].sketch, one.sketch, rtol=0, atol=1e-5 * max(one.norm, 1e-30))
    assert judged(tmp_path / "shown/step_000001.npz").verdict == "agreed"


def test_a_session_that_shows_nothing_makes_its_step_and_says_so(tmp_path):
    records, lost = recorded(ShowsNothing(TorchSession(CONFIG)), tmp_path, steps=1)
    assert records[0].step == 1 and not list(tmp_path.iterdir())
    assert lost == [(1, "its observations were not kept: the session has no step_and_gradients")]


def test_the_next_step_runs_while_the_observations_of_the_last_are_written(tmp_path, monkeypatch):
    """The test itself holds the writer up: a recorder that waited for its file would never come back."""
    go_on, save = threading.Event(), recorders.save_observations

    def slow(*of):
        assert go_on.wait(60)
        return save(*of)

    monkeypatch.setattr(recorders, "save_observations", slow)
    session, recorder = TorchSession(CONFIG), Recorder(EVERY_2, tmp_path, None)
    assert recorder.due(1)
    assert recorder.step(session, BATCH, False).step == 1
    assert session.step(BATCH).step == 2
    assert list(recorder.collect()) == [] and not list(tmp_path.iterdir())
    go_on.set()
    assert list(recorder.drain()) == []
    monkeypatch.undo()
    recorded(TorchSession(CONFIG), tmp_path / "alone", steps=1)
    (behind, _), (alone, _) = (load(folder / "step_000001.npz") for folder in (tmp_path, tmp_path / "alone"))
    assert behind.keys() == alone.keys()
    for name, one in alone.items():
        assert np.array_equal(behind[name].sketch, one.sketch) and behind[name].norm == one.norm


def test_a_run_that_ends_waits_for_its_last_file(tmp_path, monkeypatch):
    """A folder that goes while a thread writes into it comes back, or cannot go."""
    save = recorders.save_observations

    def slow(*of):
        time.sleep(1)
        return save(*of)

    monkeypatch.setattr(recorders, "save_observations", slow)
    with Recorder(EVERY_2, tmp_path, None) as recorder:
        assert recorder.due(1)
        recorder.step(TorchSession(CONFIG), BATCH, False)
    assert [file.name for file in tmp_path.iterdir()] == ["step_000001.npz"]


def test_what_the_disk_refuses_is_said_of_each_step_and_ends_nothing(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    records, lost = recorded(TorchSession(CONFIG), tmp_path / "file", steps=4)
    assert [one.step for one in records] == [1, 2, 3, 4]
    assert [step for step, _ in lost] == [1, 2, 4]
    assert all("its observations were not kept: cannot write" in said for _, said in lost)
