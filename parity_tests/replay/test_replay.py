"""Replay of a run: as it was made where sketches and state are there, run again where there is a state alone."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial

import pytest

from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.observations import load, save
from lockstep.core.parity.modes.replay import replay_run
from lockstep.core.run.directory import RunDir
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.reference.at_once import AtOnce
from lockstep.parity_tests.replay import made
from lockstep.parity_tests.replay.made import CONFIG, Gelu, GeluFrom7, SharedJax, backend, make_run, run_batch
from lockstep.torch_backend.session import TorchSession

# Sketches and state at step 4; sketches alone at 6; a state alone before step 8.
KEPT = {"steps": 9, "checkpoints": (3, 7), "sketches": (4, 6)}


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("honest") / "run", TorchSession, **KEPT)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("faulty") / "run", Gelu, **KEPT)


def replayed(run, candidate=TorchSession, step=None, **more):
    found = replay_run(
        run, lambda n: run_batch(CONFIG, n), lambda: backend(candidate), more.get("reference", JaxBackend()), step
    )
    return {one.step: one for one in found}


def test_it_says_of_each_step_what_it_could_do(honest):
    found = replayed(honest)
    assert {step: one.how for step, one in found.items()} == {
        1: "run again",
        4: "sketches",
        6: "not covered",
        8: "run again",
    }
    assert {one.check.verdict for one in found.values() if one.check} == {"agreed"}
    assert "local checks: they need tensors" in found[4].check.not_covered[0]
    assert found[6].notes == ("sketches, but no checkpoint of step 5: --step 6 runs the candidate up to it",)
    assert found[8].notes == ("its sketches: none were recorded",)


def test_sketches_are_of_sequences_with_an_end_of_text_or_of_an_earlier_lockstep(honest, tmp_path, monkeypatch):
    """Today's batches know which token ends a document; the probes of an earlier Lockstep held none."""

    def knowing(config, step):
        return replace(run_batch(config, step), end_of_text=0)

    def how(run):
        (found,) = replay_run(run, partial(knowing, CONFIG), lambda: backend(TorchSession), JaxBackend(), 4)
        return found.how, found.check and found.check.verdict

    assert how(honest) == ("sketches", "agreed")
    monkeypatch.setattr(made, "run_batch", knowing)
    assert how(make_run(tmp_path / "run", TorchSession, **KEPT)) == ("sketches", "agreed")


def test_sketches_show_what_the_run_did_whoever_replays_it(faulty):
    found = replayed(faulty, TorchSession)
    assert found[4].how == "sketches" and found[4].check.verdict == "disagreed"
    assert (found[4].check.origin.stage, found[4].check.origin.layer) == ("act", 0)
    # The candidate of today is honest: run again, it agrees, and did not do what the run recorded.
    assert found[8].check.verdict == "agreed"
    assert "step 8 differs from its record (loss" in found[8].notes[1]


def test_on_another_device_the_twin_goes_along(honest):
    asked = []

    class Asked(SharedJax):
        def open(self, config):
            if config.model == CONFIG.model:
                asked.append(config.device)
            return super().open(config)

    elsewhere = CONFIG.model_copy(update={"device": "cpu"})
    found = list(
        replay_run(honest, lambda n: run_batch(CONFIG, n), lambda: backend(TorchSession), Asked(), 8, elsewhere)
    )
    assert found[0].check.verdict == "agreed"
    assert asked == ["cpu", "cpu"]


def test_no_candidate_is_opened_for_sketches(honest):
    def never():
        raise AssertionError("opened")

    found = list(replay_run(honest, lambda n: run_batch(CONFIG, n), never, JaxBackend(), 4))
    assert [one.how for one in found] == ["sketches"]


def test_a_step_without_a_state_is_run_up_to(honest):
    found = replayed(honest, step=6)[6]
    assert (found.how, found.check.verdict, found.notes) == ("sketches", "agreed", ())
    found = replayed(honest, step=5)[5]
    assert (found.how, found.check.verdict) == ("run again", "agreed")
    assert "no checkpoint of step 4" in found.notes


def test_sketches_are_not_judged_from_a_state_that_the_run_did_not_have(honest):
    found = replayed(honest, Gelu, step=6)[6]
    assert found.how == "run again"
    assert found.check.verdict == "disagreed"
    assert any("step 4 differs from its record" in note for note in found.notes)


@pytest.mark.parametrize("step", [0, 10])
def test_a_step_that_was_not_made(honest, step):
    with pytest.raises(UserError, match=f"has no step {step}: it recorded steps 1 to 9"):
        replayed(honest, step=step)


def copy_of(run, tmp_path) -> RunDir:
    shutil.copytree(run.path, tmp_path / "copy")
    return RunDir.open(tmp_path / "copy")


def test_damage_names_the_file(honest, tmp_path):
    run = copy_of(honest, tmp_path)
    sketches = run.path / "observations/step_000004.npz"
    raw = bytearray(sketches.read_bytes())
    raw[len(raw) // 2] ^= 1
    sketches.write_bytes(raw)
    with pytest.raises(UserError, match=r"step_000004\.npz is damaged"):
        replayed(run, step=4)
    (run.path / "checkpoints/step_000007/params.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"params\.safetensors has 0 bytes"):
        replayed(run, step=8)


def test_another_batch_than_the_data_order_prescribes(honest, tmp_path):
    run = copy_of(honest, tmp_path)
    found = list(
        replay_run(run, lambda n: run_batch(CONFIG, n + 1), lambda: backend(TorchSession), JaxBackend(), step=4)
    )
    assert (found[0].check.verdict, found[0].check.origin.stage) == ("disagreed", "tokens")


def test_sketches_of_another_branch_are_left_alone(honest, tmp_path):
    run = copy_of(honest, tmp_path)
    path = run.path / "observations/step_000004.npz"
    found, about = load(path)
    save(path, found, about | {"batch": "of a step that a resume took back"})
    one = replayed(run, step=4)[4]
    assert (one.how, one.notes) == ("not covered", ("its sketches are of another branch of the run",))


def test_a_reference_with_other_names_is_one_line(honest):
    class Other(AtOnce):
        def open(self, config):
            return super().open(config.model_copy(update={"model": config.model.model_copy(update={"tied": False})}))

    with pytest.raises(UserError, match=r"the reference does not take this run's state: .*lm_head"):
        replayed(honest, step=4, reference=Other())


def test_a_fault_that_begins_later_is_not_seen_before(tmp_path):
    run = make_run(tmp_path / "run", GeluFrom7, **KEPT)
    found = replayed(run, GeluFrom7)
    assert {step: one.check.verdict for step, one in found.items() if one.check} == {
        1: "agreed",
        4: "agreed",
        8: "disagreed",
    }
