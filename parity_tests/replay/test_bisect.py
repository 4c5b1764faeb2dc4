"""The first bad step of a run, exactly, with few checks; and the messages if the assumptions do not hold."""

from __future__ import annotations

import shutil

import pytest

from lockstep.core.errors import UserError
from lockstep.core.files.jsonl import sealed_line
from lockstep.core.parity.modes.bisect import bisect_run
from lockstep.core.run.directory import RunDir
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults.state import BlocksExchangedOnLoad
from lockstep.parity_tests.reference.at_once import AtOnce
from lockstep.parity_tests.replay.made import (
    CONFIG,
    STEPS,
    BadAt7,
    Gelu,
    GeluFrom7,
    backend,
    fake_check,
    make_run,
    run_batch,
)
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function that makes runs by session, each once; tests that change one work on a copy."""
    folder, runs = tmp_path_factory.mktemp("runs"), {}

    def run(session, checkpoints=(10,)):
        key = session.__name__, checkpoints
        if key not in runs:
            runs[key] = make_run(folder / f"{len(runs)}", session, checkpoints=checkpoints)
        return runs[key]

    return run


def bisected(run, session, said=None, **more):
    lines = [] if said is None else said
    return bisect_run(run, lambda step: run_batch(CONFIG, step), backend(session), JaxBackend(), lines.append, **more)


def test_a_fault_that_begins_at_step_7(made):
    said = []
    found = bisected(made(GeluFrom7), GeluFrom7, said)
    assert (found.verdict, found.first_bad_step) == ("disagreed", 7)
    assert (found.origin.stage, found.origin.phase, found.origin.layer) == ("act", "forward", 0)
    assert found.cause.words == "present in every variation tried: with one micro-batch, in FP32"
    assert len(found.checks) <= 5  # the last one, and log₂ 12 more
    assert found.checks[6].verdict == "agreed" and found.differs_at is None and found.notes == ()
    assert "step 7: disagreed, origin act (forward) at blocks.0.mlp.act" in said


def test_a_fault_from_the_first_step_on(made):
    found = bisected(made(Gelu), Gelu, with_cause=False)
    assert found.first_bad_step == 1 and found.cause is None


def test_an_honest_run(made):
    found = bisected(made(TorchSession), TorchSession)
    assert (found.verdict, found.first_bad_step, found.origin, found.cause) == ("agreed", None, None, None)
    assert list(found.checks) == [STEPS] and found.steps_run == STEPS - 10  # from that checkpoint
    assert "a fault that came and went before it is not excluded" in found.notes[0]


def copy_of(run, tmp_path) -> RunDir:
    shutil.copytree(run.path, tmp_path / "copy")
    return RunDir.open(tmp_path / "copy")


def test_checks_of_the_run_narrow_it_for_nothing(made, tmp_path):
    run = copy_of(made(GeluFrom7), tmp_path)
    for step, verdict in ((1, "agreed"), (6, "agreed"), (8, "disagreed"), (12, "disagreed")):
        fake_check(run.path, step, verdict)
    found = bisected(run, GeluFrom7, with_cause=False)
    assert found.first_bad_step == 7
    assert sorted(found.checks) == [6, 7, 8]


def test_a_recorded_agreement_is_checked_thoroughly_before_it_is_believed(made, tmp_path):
    run = copy_of(made(GeluFrom7), tmp_path)
    for step, verdict in ((9, "agreed"), (10, "disagreed")):
        fake_check(run.path, step, verdict)
    found = bisected(run, GeluFrom7, with_cause=False)
    assert found.first_bad_step == 7
    assert "step 9: a check of the run agreed; a thorough one does not" in found.notes


def test_a_fault_that_comes_and_goes_is_said_to(made, tmp_path):
    run = copy_of(made(BadAt7), tmp_path)
    fake_check(run.path, 7, "disagreed")
    path = run.path / "parity.jsonl"
    stage = {"stage": "act", "phase": "forward", "layer": 0, "scope": "local"}
    line = {"schema": 2, "step": 9, "verdict": "agreed", "stages": [stage]}
    path.write_bytes(path.read_bytes() + sealed_line(line))
    found = bisected(run, BadAt7, with_cause=False)
    assert found.first_bad_step == 7
    assert any(n.startswith("not persistent: step 9 is clean again; every step from 1 to 7") for n in found.notes)
    assert sorted(found.checks) == [1, 2, 3, 4, 5, 6, 7]


class Corrupted(TorchSession):
    """One weight is hit after step 4 of the run, and not when the run is made again."""

    armed = True

    def step(self, batch, *, norms=False):
        record = super().step(batch, norms=norms)
        if type(self).armed and self.steps_done == 4:
            self.parameters["final_norm.weight"].data[3] += 1.0
        return record


def test_a_step_that_does_not_repeat_is_named(made):
    Corrupted.armed = True
    run = made(Corrupted, ())
    Corrupted.armed = False
    found = bisected(run, Corrupted)
    assert found.differs_at == 5
    note = next(n for n in found.notes if n.startswith("step 5"))
    assert "loss" in note and "then" in note and "does not repeat: hardware, a race, another machine" in note
    assert "or something outside the state that the session shows, which loading resets" in note


def test_a_recorded_disagreement_that_does_not_repeat(made, tmp_path):
    run = copy_of(made(TorchSession), tmp_path)
    fake_check(run.path, 11, "disagreed")
    found = bisected(run, TorchSession)
    assert (found.verdict, found.first_bad_step, found.check) == ("disagreed", 11, None)
    assert any("run again, it agrees" in n for n in found.notes)


def test_a_bias_over_steps_is_no_single_bad_step(made, tmp_path):
    run = copy_of(made(TorchSession), tmp_path)
    stage = {"stage": "q", "phase": "forward", "layer": 0, "scope": "over_steps", "ok": False}
    line = {"schema": 2, "step": 12, "verdict": "disagreed", "stages": [stage]}
    (run.path / "parity.jsonl").write_bytes(sealed_line(line))
    found = bisected(run, TorchSession)
    assert found.first_bad_step is None
    assert "a bias over steps" in found.notes[0]


def test_a_loader_that_lost_its_place(made, tmp_path):
    run = copy_of(made(TorchSession), tmp_path)
    lines = run.records()
    for line in lines[8:]:
        line["digest"] = run_batch(CONFIG, 1).digest()
    (run.path / "records.jsonl").write_bytes(b"".join(map(sealed_line, lines)))
    found = bisected(run, TorchSession)
    assert found.first_bad_step == 9
    assert (found.origin.stage, found.origin.phase) == ("tokens", "data")
    assert found.checks[8].verdict == "agreed"


def test_nothing_recorded_is_one_line(tmp_path):
    run = RunDir.create(tmp_path / "run", CONFIG, {})
    run.close()
    with pytest.raises(UserError, match="has no recorded step"):
        bisected(run, TorchSession)


def test_a_reference_with_other_names_is_one_line(made):
    class Other(AtOnce):
        def open(self, config):
            return super().open(config.model_copy(update={"model": config.model.model_copy(update={"tied": False})}))

    run = made(TorchSession)
    with pytest.raises(UserError, match=r"the reference does not take this state: .*lm_head"):
        bisect_run(run, lambda step: run_batch(CONFIG, step), TorchBackend(), Other(), lambda line: None)


def test_a_candidate_that_does_not_take_the_runs_state_is_refused(made):
    run = made(TorchSession)
    with pytest.raises(UserError, match=r"did not take its state back: .* differ from the run's state after step"):
        bisect_run(run, lambda step: run_batch(CONFIG, step), BlocksExchangedOnLoad(), JaxBackend(), lambda line: None)
