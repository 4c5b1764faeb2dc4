"""FP8's delayed scaling: its layer in both backends, its history in the state, and the check of both."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
import torch

from lockstep.core.backend import NotSupported
from lockstep.core.checkpoint.format import begin_checkpoint, load_checkpoint, writer_of
from lockstep.core.config.schema import PrecisionConfig, RunConfig
from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.reference.self_check import sound_reference
from lockstep.core.train.finite import NotFinite
from lockstep.core.train.fp8_amax import (
    CASTS,
    amaxes_after,
    amaxes_in_force,
    first_amaxes,
    for_a_share,
    key,
    layers,
    without_amaxes,
)
from lockstep.jax_backend.backend import JaxBackend
from lockstep.jax_backend.kernels.float8 import delayed_product
from lockstep.jax_backend.precision import POLICIES
from lockstep.parity_tests import faults
from lockstep.parity_tests.faults.levers import AmaxOfOneSequence, AmaxOfTheLastMicroBatch, ScalesOnlyLoaded
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.kernels.float8 import Float8, float8
from lockstep.torch_backend.session import TorchSession

Q = "blocks.0.attn.q_proj"


def delayed(train: dict | None = None, compiled: bool = False, **precision) -> RunConfig:
    config = tiny_config("fp8_delayed", compiled, train)
    chosen = PrecisionConfig(policy="fp8_delayed", **precision)
    return config.model_copy(update={"precision": chosen})


def layer_of(config: PrecisionConfig, amax: list[float]) -> Float8:
    recipe = float8(config, torch.device("cpu"))
    assert recipe is not None
    return Float8(recipe.config, recipe.products, torch.tensor(amax, requires_grad=True))


def drawn(scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(3, 16, 48, generator=generator) * scale).requires_grad_()
    weight = (torch.randn(32, 48, generator=generator) * 0.02).requires_grad_()
    return x, weight, torch.randn(3, 16, 32, generator=generator)


@pytest.mark.parametrize("share", [1.0, 0.3, 7.0])
def test_a_layer_is_its_twin(share):
    """Output, both gradients and what was seen; with scales that fit, that saturate, and that leave room."""
    x, weight, grad = drawn()
    amax = [share * float(t.detach().abs().max()) for t in (x, weight, grad)]
    layer = layer_of(PrecisionConfig(policy="fp8_delayed"), amax)
    out = layer.product(x.bfloat16(), weight).float()
    ours = (out, *torch.autograd.grad(out, [x, weight, layer.amax], grad))

    @jax.jit
    def theirs(x, weight, amax, grad):
        out, back = jax.vjp(lambda *of: delayed_product(*of, POLICIES["fp8_delayed"]), x, weight, amax)
        return out, *back(grad)

    due = theirs(x.detach().numpy(), weight.detach().numpy(), np.float32(amax), grad.numpy())
    for one, other in zip(ours, map(np.asarray, due), strict=True):
        found = one.detach().numpy()
        assert np.all(np.abs(found - other) <= np.abs(other) * 2.0**-7 + np.abs(other).max() * 1e-6)
        assert np.mean(found != other) < 0.01
    seen = [x.bfloat16(), weight, grad.bfloat16()]
    assert ours[3].tolist() == [float(t.detach().abs().max()) for t in seen]


def test_with_its_own_amax_a_layer_is_tensorwise():
    x, weight, grad = drawn()
    own = [float(t.detach().abs().max()) for t in (x.bfloat16(), weight, grad.bfloat16())]
    layers = (
        layer_of(PrecisionConfig(policy="fp8_delayed"), own),
        float8(PrecisionConfig(policy="fp8_tensorwise"), torch.device("cpu")),
    )
    found = []
    for layer in layers:
        assert layer is not None
        out = layer.product(x.bfloat16(), weight)
        found.append((out, *torch.autograd.grad(out, [x, weight], grad.bfloat16())))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_the_history_is_what_the_last_steps_saw():
    config = delayed(fp8_history=3, fp8_layers="blocks.0.attn.*_proj")
    scalars = first_amaxes(config)
    assert layers(config) == [f"blocks.0.attn.{name}_proj" for name in "qkvo"]
    assert len(scalars) == 4 * 3 * 3 and set(scalars.values()) == {0.0}
    guess = amaxes_in_force(config, scalars)[Q]
    for newest in (5.0, 4.0, 2.0, 1.0, 0.5):
        scalars |= amaxes_after(config, scalars, {name: (newest, newest / 2, newest / 4) for name in layers(config)})
    assert [scalars[key(Q, "input", age)] for age in range(3)] == [0.5, 1.0, 2.0]
    assert amaxes_in_force(config, scalars)[Q].tolist() == [2.0, 1.0, 0.5]
    assert (guess > 0).all() and not without_amaxes(scalars)


def test_a_micro_batch_alone_is_cast_as_in_its_step():
    config = delayed()
    session = TorchBackend().open(config)
    session.step(text_batch(config))
    session.step(text_batch(config, 1))
    scalars = for_a_share(config, session.scalars, 0.25)
    before, alone = (amaxes_in_force(config, one)[Q] for one in (session.scalars, scalars))
    assert alone.tolist() == [before[0], before[1], 4 * before[2]]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_remembers_the_largest_of_its_micro_batches(compiled):
    config = delayed(compiled=compiled)
    batch = text_batch(config)
    whole = TorchBackend().open(config)
    record = whole.step(batch)
    assert not record.metrics
    alone = []
    for micro in batch.cut(config.train):
        session = TorchBackend().open(config)
        session.gradients(micro)
        assert session._amaxes_seen is not None
        alone.append(session._amaxes_seen)
    inputs = torch.stack(alone).amax(0)[:, CASTS.index("input")].tolist()
    assert [whole.scalars[key(name, "input", 0)] for name in layers(config)] == inputs
    assert whole.scalars[key(Q, "weight", 0)] == float(
        np.abs(TorchBackend().open(config).state().params[f"{Q}.weight"]).max()
    )


def test_gradients_that_are_only_asked_for_are_not_remembered():
    config = delayed()
    session = TorchBackend().open(config)
    before = dict(session.scalars)
    session.gradients(text_batch(config))
    session.observe(uneven_weights(text_batch(config), 0).rows(np.arange(2)), ["logits", "grad/embed"])
    session.evaluate(text_batch(config))
    assert session.scalars == before
    # Nor do they stay where the next step's are added up.
    other = TorchBackend().open(config)
    for one in (session, other):
        one.step(text_batch(config, 1))
    assert session.scalars == other.scalars


def test_a_step_that_is_left_out_is_not_remembered():
    config = delayed(train={"on_not_finite": "skip"})
    session = TorchBackend().open(config)
    session.step(text_batch(config))
    before = {name: value for name, value in session.scalars.items() if name.startswith("amax/")}
    state = session.state()
    params = {name: np.full_like(p, np.inf) if name == "final_norm.weight" else p for name, p in state.params.items()}
    session.load(replace(state, params=params))
    session.step(text_batch(config))
    assert {name: value for name, value in session.scalars.items() if name.startswith("amax/")} == before
    assert session.scalars["skipped_steps"] == 1


def test_a_step_that_is_not_finite_ends_the_run():
    config = delayed()
    session = TorchBackend().open(config)
    state = session.state()
    params = {name: np.full_like(p, np.inf) if name == "final_norm.weight" else p for name, p in state.params.items()}
    session.load(replace(state, params=params))
    with pytest.raises(NotFinite):
        session.step(text_batch(config))


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    """The scales of the step after a resume are those of a run that was not stopped."""
    config = delayed()
    whole, first = TorchBackend().open(config), TorchBackend().open(config)
    for step in range(2):
        whole.step(text_batch(config, step))
        first.step(text_batch(config, step))
    begin_checkpoint(tmp_path / "step", 2, writer_of(first), {}).commit()
    resumed = TorchBackend().open(config)
    state, _ = load_checkpoint(tmp_path / "step")
    resumed.load(state)
    batch = text_batch(config, 2)
    record = whole.step(batch)
    assert resumed.step(batch).grad_norm == record.grad_norm
    assert resumed.scalars == whole.scalars
    forgetful = TorchBackend().open(config)
    forgetful.load(replace(state, scalars={}))
    assert forgetful.step(batch).grad_norm != record.grad_norm


def test_jax_runs_stages_and_no_step():
    config = delayed()
    session = JaxBackend().open(config)
    with pytest.raises(UserError, match="JAX judges a step with delayed scaling"):
        session.step(text_batch(config))
    with pytest.raises(NotSupported, match="delayed scaling of a whole model"):
        session.gradients(text_batch(config))


# A thorough first check makes later steps as well, in which the history is full.
EARLY = ("HistoryForgets",)
DELAYED = [fault for fault in faults.FAULTS if "fp8_delayed/eager" in fault.recipes]


@pytest.mark.parametrize("fault", [None, *DELAYED], ids=lambda fault: fault.name if fault else "honest")
@pytest.mark.parametrize("probe", [False, True], ids=["thorough", "training"])
def test_a_fault_is_named_and_an_honest_trainer_is_not(fault, probe):
    config = delayed()
    session = (fault.make() if fault else TorchBackend()).open(config)
    reference = sound_reference(JaxBackend(), config)
    for step in range(1, 4):
        batch = text_batch(config, step)
        first = uneven_weights(batch.cut(config.train)[0], step) if probe else None
        origin = judge(gather(session, config, batch, first), reference).origin
        if fault is None or step < (1 if fault.name in EARLY and not probe else fault.first_step):
            assert origin is None, origin
            continue
        assert origin is not None and (origin.stage, origin.phase, origin.layer) == fault.origin(config.model.layers)
        break


UP = "blocks.1.mlp.up_proj"


class Noted(TorchSession):
    """Note another amax of a gradient than the step's passes saw."""

    factor = 1.0

    def scalars_after(self, finite):
        after, noted = super().scalars_after(finite), key(UP, "gradient", 0)
        return after | {noted: after[noted] * self.factor}


class Averaged(TorchSession):
    """Take gradients' amaxes for means over micro-batches, as their gradients are."""

    def accumulate(self, batch):
        found = super().accumulate(batch)
        self._amaxes_seen[:, CASTS.index("gradient")] /= len(batch.cut(self.config.train))
        return found


class SaysNothing(TorchSession):
    def amaxes_of_pass(self):
        raise NotSupported("it keeps its amaxes to itself")


def findings_of(session: TorchSession, probe: bool, seed: int = 0) -> list[tuple[str, str, str]]:
    config, batch = session.config, text_batch(session.config, seed)
    first = uneven_weights(batch.cut(config.train)[0], 1) if probe else None
    judged = judge(gather(session, config, batch, first), sound_reference(JaxBackend(), config))
    return [(f.stage, f.tap, f.scope) for f in judged.findings if not f.ok]


@pytest.mark.parametrize("probe", [False, True], ids=["thorough", "training"])
@pytest.mark.parametrize("factor", [0.5, 1 + 2.0**-20])
def test_what_is_remembered_is_what_the_step_saw(probe, factor):
    """Noted after the passes, where no tensor shows it. Where errors are small, the reference sees it too."""
    session = Noted(delayed(train={"batch_size": 2, "micro_batch_size": 2}))
    session.factor = factor
    another_pass = [] if probe else [("fp8_amax", f"gradient of all micro-batches/{UP}", "local")]
    found = findings_of(session, probe)
    assert [one for one in found if one[2] == "local"] == [("fp8_amax", f"remembered/{UP}", "local"), *another_pass]
    assert {one for one in found if one[2] != "local"} <= {("fp8_amax", f"gradient/{UP}", "end_to_end")}


@pytest.mark.parametrize("probe", [False, True], ids=["thorough", "training"])
def test_a_session_that_tells_nothing_is_held_to_the_twin(probe):
    """A sixteenth. A half may be within two of the twin's errors here."""

    class Silent(SaysNothing, Noted):
        factor = 1 / 16

    session = Silent(delayed(train={"batch_size": 2, "micro_batch_size": 2}))
    assert findings_of(session, probe) == [("fp8_amax", f"gradient/{UP}", "end_to_end")]


@pytest.mark.parametrize("probe", [False, True], ids=["thorough", "training"])
@pytest.mark.parametrize(("rows", "compiled"), [(2, False), (4, False), (6, False), (4, True)])
def test_gradients_amaxes_are_those_of_all_micro_batches(rows, compiled, probe):
    """They are the largest of the micro-batches', not their mean. With a single one the two are the same."""
    config = delayed(train={"batch_size": rows, "micro_batch_size": 2}, compiled=compiled)
    assert not findings_of(TorchSession(config), probe)
    found = findings_of(Averaged(config), probe)
    if rows == 6 and not probe:
        # Three micro-batches apart are rounded otherwise than in a step: the twin's errors are all there is.
        assert all(scope == "end_to_end" for _, _, scope in found)
        return
    assert {(stage, tap.split("/")[0]) for stage, tap, scope in found if scope == "local"} == (
        {("fp8_amax", "gradient of all micro-batches")} if rows > 2 else set()
    )


def test_a_single_micro_batch_s_amaxes_are_held_to_those_of_another_pass():
    """A step that notes less than the same pass apart from it."""

    class Halved(TorchSession):
        def step(self, batch, **options):
            self.in_step = True
            try:
                return super().step(batch, **options)
            finally:
                self.in_step = False

        def accumulate(self, batch):
            found = super().accumulate(batch)
            if getattr(self, "in_step", False):
                self._amaxes_seen[:, CASTS.index("gradient")] /= 2
            return found

    found = findings_of(Halved(delayed(train={"batch_size": 2, "micro_batch_size": 2})), False)
    seen = {(stage, tap.split("/")[0], scope) for stage, tap, scope in found}
    again = ("fp8_amax", "gradient of all micro-batches", "local")
    # Where the twin's errors are small, the reference sees a half too.
    assert again in seen and seen <= {again, ("fp8_amax", "gradient", "end_to_end")}


@pytest.mark.parametrize("probe", [False, True], ids=["thorough", "training"])
def test_a_compiled_layer_is_held_to_what_it_casts(probe):
    """By the tapped program's own tensors. Between it and the program that trains lie errors of FP8's size.

    In this batch another sequence than the last has the largest number.
    """
    found = findings_of(AmaxOfOneSequence().open(delayed(compiled=True)), probe, seed=1)
    assert ("fp8_amax", "input of the tapped micro-batch/blocks.1.mlp.down_proj", "local") in found


def test_a_candidate_without_a_history_is_accused():
    """Nothing ends in an exception: its state holds no amaxes, and none can be followed."""

    class Forgetful(TorchSession):
        def stream_state(self, take):
            return replace(super().stream_state(take), scalars={})

    config = delayed()
    session, reference = Forgetful(config), sound_reference(JaxBackend(), config)
    wrong = [f for f in judge(gather(session, config, text_batch(config)), reference).findings if not f.ok]
    assert ("fp8_amax", "history") in {(f.stage, f.tap) for f in wrong}


@pytest.mark.parametrize("probe", [False, True], ids=["thorough", "training"])
def test_scales_that_no_step_sets_are_found(probe):
    """A thorough check loads states, and mends them: it reads before it does. During training they are used."""
    config = delayed()
    session, reference = ScalesOnlyLoaded().open(config), sound_reference(JaxBackend(), config)
    origins = []
    for step in (1, 2):
        batch = text_batch(config, step)
        first = uneven_weights(batch.cut(config.train)[0], step) if probe else None
        origins.append(judge(gather(session, config, batch, first), reference).origin)
    named = [origin and (origin.stage, origin.layer) for origin in origins]
    assert named == ([None, ("q", 0)] if probe else [("fp8_amax", None)] * 2)


@pytest.mark.parametrize("probe", [False, True], ids=["thorough", "training"])
def test_amaxes_of_a_part_of_the_step_are_found(probe):
    """The last micro-batch alone, where the largest number of some input is in another one."""
    found = findings_of(AmaxOfTheLastMicroBatch().open(delayed(train={"batch_size": 8, "micro_batch_size": 1})), probe)
    assert {stage for stage, _, _ in found} == {"fp8_amax"}
    assert any(tap.startswith("input of all micro-batches/") for _, tap, _ in found)
