"""Validation, samples and checkpoints leave the state alone: a run whose backend changes it there ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lockstep.core.backend import Backend
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.reference.self_check import sound_reference
from lockstep.core.train.unchanged_state import StateChanged, UnchangedState, unchanged
from lockstep.core.train.validation import Validation
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults import looking
from lockstep.parity_tests.loop.runs import Folder, one_line
from lockstep.parity_tests.ranks import test_loop as ranks
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.checksums import checksums

PLACE = "lockstep.parity_tests.faults.looking"
WEIGHT = "params/blocks.1.mlp.up_proj.weight"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(6, 8), (6, 7), (5,), (2, 3, 4)])
def test_a_bit_and_a_place_change_a_checksum(dtype, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(50).to(dtype)
    same = checksums([("x", x)])
    assert checksums([("x", x.clone())]) == same
    bent = x.clone()
    bent.view(torch.uint8).flatten()[-1] ^= 1
    others = [bent, *(torch.roll(x, 1, axis) for axis in range(x.dim()))]
    others += [x.index_select(axis, torch.tensor([1, 0, *range(2, x.shape[axis])])) for axis in range(x.dim())]
    assert all(checksums([("x", other)]) != same for other in others)


@pytest.mark.parametrize("shape", [(6, 8), (5,), (64, 2)])
def test_every_bit_counts(shape):
    """A sign too, the highest bit of the words that are summed."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    same = checksums([("x", x)])
    for element in range(x.numel()):
        for bit in range(32):
            bent = x.clone()
            bent.view(torch.int32).flatten()[element] ^= 1 << bit if bit < 31 else -(1 << 31)
            assert checksums([("x", bent)]) != same, (element, bit)


def test_what_a_rank_holds_nothing_of_has_a_checksum():
    assert checksums([("x", torch.zeros(0, 4)), ("y", torch.ones(2))]).keys() == {"x", "y"}


@pytest.mark.parametrize("backend", [TorchBackend(), JaxBackend()], ids=["torch", "jax"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_step_changes_the_state_and_nothing_else_does(backend: Backend, optimizer: str):
    config = tiny_config()
    config = config.model_copy(update={"optim": config.optim.model_copy(update={"name": optimizer})})
    session = backend.open(config)
    state = UnchangedState(session)
    session.step(text_batch(config))
    changed = set(state.changed())
    assert {"step", WEIGHT, "exp_avg/embed.weight", "exp_avg_sq/final_norm.weight"} <= changed
    session.gradients(text_batch(config))
    session.observe(text_batch(config).rows(np.arange(2)), ["logits"])
    session.evaluate(text_batch(config))
    session.next_token_logits(np.arange(5, dtype=np.int32))
    assert not state.changed()
    session.load(session.state())
    assert not state.changed()


def test_what_is_changed_is_named():
    session = TorchBackend().open(tiny_config())
    said = pytest.raises(StateChanged, match=rf"^validation changed the session's state, .*: {WEIGHT}; its later")
    with said, unchanged(session, "validation"), torch.no_grad():
        session.parameters["blocks.1.mlp.up_proj.weight"][0, 0].add_(1.0)


def test_a_session_without_checksums_is_let_be():
    class Foreign:
        pass

    with unchanged(Foreign(), "validation"):
        pass


def test_every_rank_hears_of_one_that_changed():
    session = TorchBackend().open(tiny_config())
    session.peers = ranks.Rank0([WEIGHT])
    assert UnchangedState(session).changed() == (f"{WEIGHT} on rank 1",)


@pytest.mark.parametrize(
    ("fault", "first"),
    [(looking.EvaluationRoundsWeights, 1), (looking.AveragedWeightsStay, 2)],
)
def test_a_check_during_training_names_it(fault: type[TorchBackend], first: int):
    config = tiny_config()
    session, reference = fault().open(config), sound_reference(JaxBackend(), config)
    for step in range(1, first + 1):
        batch = text_batch(config, step)
        probe = uneven_weights(batch.cut(config.train)[0], step)
        origin = judge(gather(session, config, batch, probe), reference).origin
        assert (origin is None) == (step < first)
    assert origin is not None
    assert (origin.stage, origin.tap) == ("weights", "after gradients, taps and evaluation")


def test_validation_that_is_due_with_a_check_is_named():
    """Evaluation before the step finds rounded weights already; the step makes others."""
    config = tiny_config()

    class AfterSteps(looking.EvaluationRoundsWeights.session_class):
        def evaluate(self, batch, policy=None):
            return (
                super().evaluate(batch, policy)
                if self.steps_done
                else TorchBackend.session_class.evaluate(self, batch, policy)
            )

    session, reference = AfterSteps(config), sound_reference(JaxBackend(), config)
    batch = text_batch(config)
    validation = Validation(batch.cut(config.train))
    evidence = gather(session, config, batch, uneven_weights(batch.cut(config.train)[0], 1), validation=validation)
    origin = judge(evidence, reference).origin
    assert origin is not None and (origin.stage, origin.tap) == ("weights", "after validation")


@pytest.mark.usefixtures("in_one_process")
@pytest.mark.parametrize(
    ("fault", "settings", "said", "steps"),
    [
        ("AveragedWeightsStay", {"eval.every": 4}, "validation, a metric or a sample after step 4", 3),
        ("EvaluationRoundsWeights", {"log.fp32_loss_every": 2}, "validation, a metric or a sample after step 2", 1),
        ("SamplingFreesMoments", {"log.sample_every": 3}, "validation, a metric or a sample after step 3", 2),
        ("CheckpointRoundsWeights", {"checkpoint.every": 5}, "the checkpoint after step 5", 5),
    ],
)
def test_a_run_ends_before_another_step_is_made(
    fault: str, settings: dict[str, int], said: str, steps: int, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert folder.train("run", settings, "--backend", f"{PLACE}:{fault}") == 2
    line = one_line(capsys.readouterr().err)
    assert line.startswith(f"lockstep: {said} changed the session's state, which only steps may change: ")
    assert len(folder.records("run")) == steps


@pytest.mark.usefixtures("in_one_process")
def test_an_honest_run_is_let_be(folder: Folder) -> None:
    settings = {"eval.every": 2, "log.sample_every": 3, "log.fp32_loss_every": 2, "checkpoint.every": 2}
    assert folder.train("run", settings) == 0
