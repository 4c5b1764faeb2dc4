"""FP16: the loss scale is torch's, leaves nothing behind in the gradients, and lets no infinity into the weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.checkpoint.format import load_checkpoint, save_checkpoint
from lockstep.core.config.schema import PrecisionConfig
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.reference.self_check import sound_reference
from lockstep.core.train.loss_scale import FINITE, SCALE, SKIPPED, first_scale, scale_after
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests import faults
from lockstep.parity_tests.cross.variants import same_bits
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession


def fp16(layers=1, **precision):
    config = tiny_config("fp16", layers=layers)
    return config.model_copy(update={"precision": PrecisionConfig(policy="fp16", **precision)})


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
def test_the_rule_is_grad_scalers(finite, interval):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=interval)
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=0.0)
    scalars = first_scale(PrecisionConfig(policy="fp16", loss_scale=2.0**10))
    for good in finite:
        scaler.scale(p.sum() * (1.0 if good else float("inf"))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scalars = scale_after(scalars, good, interval)
        assert scalars[SCALE] == scaler.get_scale()
    assert scalars[SKIPPED] == finite.count(False)


def test_gradients_do_not_carry_the_scale():
    batch = uneven_weights(text_batch(fp16()), 1)
    one, other = (TorchBackend().open(fp16(loss_scale=scale)).gradients(batch) for scale in (2.0**8, 2.0**12))
    assert one.loss == other.loss
    for name, grad in one.grads.items():
        assert np.linalg.norm(grad - other.grads[name]) < 2e-3 * np.linalg.norm(grad)


def test_without_a_scale_small_gradients_are_lost():
    """Why it is there: at a scale of 2⁻²⁴ no gradient is left when the first block is reached."""
    batch = uneven_weights(text_batch(fp16()), 1)
    lost, kept = (TorchBackend().open(fp16(loss_scale=scale)).gradients(batch) for scale in (2.0**-24, 2.0**14))
    name = "blocks.0.attn.q_proj.weight"
    assert np.mean(lost.grads[name] == 0) > 0.9 > 0.1 > np.mean(kept.grads[name] == 0)


@pytest.mark.parametrize("backend", [TorchBackend, JaxBackend])
def test_an_overflow_moves_nothing_and_is_counted(backend):
    config = fp16(loss_scale=2.0**100)
    session = backend().open(config)
    before = session.state()
    record = session.step(text_batch(config))
    after = session.state()
    assert (record.step, after.step, after.updates) == (1, 1, 0)
    assert record.metrics == {SCALE: 2.0**99, FINITE: 0.0, SKIPPED: 1.0}
    assert all(np.array_equal(after.params[n], p) for n, p in before.params.items())
    while session.step(text_batch(config)).metrics[SKIPPED] > session.state().step - 1:
        assert session.state().step < 120
    assert session.state().updates == 1
    assert not all(np.array_equal(session.state().params[n], p) for n, p in before.params.items())


def test_both_backends_skip_alike_and_count_updates_alike():
    """After skipped steps AdamW's bias correction counts updates, not steps."""
    config = fp16(loss_scale=2.0**30, loss_scale_interval=2)
    ours, theirs = TorchBackend().open(config), JaxBackend().open(config)
    for step in range(14):
        batch = uneven_weights(text_batch(config, step), step)
        assert ours.step(batch).metrics == theirs.step(batch).metrics
    assert ours.state().scalars[SKIPPED] > 2
    assert ours.state().updates < 14
    name = "embed.weight"
    moved = np.linalg.norm(ours.state().params[name] - theirs.state().params[name])
    first = TorchBackend().open(config).state().params[name]
    assert moved < 0.05 * np.linalg.norm(ours.state().params[name] - first)


def test_resume_keeps_the_scale(tmp_path):
    config = fp16(loss_scale=2.0**30)
    whole, first, second = (TorchBackend().open(config) for _ in range(3))
    for step in range(10):
        whole.step(text_batch(config, step))
        if step < 6:
            first.step(text_batch(config, step))
    saved, _ = load_checkpoint(save_checkpoint(tmp_path, first.state(), {}))
    assert saved.scalars == first.state().scalars
    second.load(saved)
    for step in range(6, 10):
        second.step(text_batch(config, step))
    assert same_bits(second.state(), whole.state())
    assert second.state().scalars == whole.state().scalars


FAULTS = [fault for fault in faults.FAULTS if "fp16/eager" in fault.recipes and "bf16/eager" not in fault.recipes]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named(fault):
    config = fault.configured(fp16())
    evidence = gather(fault.make().open(config), config, uneven_weights(text_batch(config), 1))
    check = judge(evidence, sound_reference(JaxBackend(), config))
    assert check.origin is not None
    assert check.origin.stage == fault.stage


@pytest.mark.parametrize("scale", [2.0**10, 2.0**21, 2.0**100])
def test_a_check_agrees_overflow_or_not(scale):
    config = fp16(loss_scale=scale)
    evidence = gather(TorchBackend().open(config), config, uneven_weights(text_batch(config), 1))
    check = judge(evidence, sound_reference(JaxBackend(), config))
    assert check.verdict == "agreed", check.origin
    said = any("outside FP16's range" in line for line in check.not_covered)
    assert said == (scale > 2.0**10)


class _ZeroesInfinitiesSession(TorchSession):
    def accumulate(self, batch):
        result = super().accumulate(batch)
        for parameter in self.parameters.values():
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        return result


class ZeroesInfinities(TorchBackend):
    """Gradients that overflow are set to zero before the check for overflow, so that no step is left out."""

    session_class = _ZeroesInfinitiesSession


class _OneOverflowsSession(TorchSession):
    def build_model(self):
        model = super().build_model()
        model.get_parameter("blocks.0.attn.o_proj.weight").register_hook(lambda grad: grad * torch.inf)
        return model


class OneOverflows(TorchBackend):
    """One stage overflows where its twin does not."""

    session_class = _OneOverflowsSession


# At 2²⁰ one parameter's gradient alone overflows, at 2³⁰ gradients of activations do.
@pytest.mark.parametrize("scale", [2.0**20, 2.0**30])
def test_infinities_set_to_zero_are_no_fault_of_a_stage_that_overflows_honestly(scale):
    config = fp16(loss_scale=scale)
    evidence = gather(ZeroesInfinities().open(config), config, uneven_weights(text_batch(config), 1))
    check = judge(evidence, sound_reference(JaxBackend(), config))
    assert check.origin is not None
    assert (check.origin.stage, check.origin.phase, check.origin.scope) == ("gradients", "backward", "local")
    assert any("its twin overflows too, from the same inputs" in line for line in check.not_covered)


def test_a_stage_that_overflows_where_its_twin_does_not_is_named():
    config = fp16(loss_scale=2.0**10)
    evidence = gather(OneOverflows().open(config), config, uneven_weights(text_batch(config), 1))
    check = judge(evidence, sound_reference(JaxBackend(), config))
    assert check.origin is not None
    assert (check.origin.stage, check.origin.phase) == ("o_proj", "backward")


# In batch 10 the first micro-batch by itself stays finite, in batch 11 neither does; their step is finite.
@pytest.mark.parametrize("number, alone", [(10, [True, False]), (11, [False, False])], ids=["one", "both"])
def test_a_check_agrees_where_a_micro_batch_overflows_by_itself_alone(number, alone):
    # The model of most tests: truth and plain reference are compiled already.
    config = fp16(layers=2, loss_scale=2.0**19)
    batch = uneven_weights(text_batch(config, number), number)
    session = TorchBackend().open(config)
    grads = [session.gradients(micro).grads.values() for micro in batch.cut(config.train)]
    assert [all(np.isfinite(grad).all() for grad in of_one) for of_one in grads] == alone
    evidence = gather(TorchBackend().open(config), config, batch)
    assert evidence.stepped is not None
    assert all(np.isfinite(grad).all() for grad in evidence.stepped.grads.values())
    check = judge(evidence, sound_reference(JaxBackend(), config))
    assert check.verdict == "agreed", check.origin


def test_a_micro_batch_of_little_weight_that_overflows_by_itself_is_not_compared():
    config = fp16(loss_scale=2.0**19)
    batch = text_batch(config, 1)
    weights = batch.weights.copy()
    weights[-2:] = 0
    weights[-1, -1] = 1
    batch = replace(batch, weights=weights)
    evidence = gather(TorchBackend().open(config), config, batch)
    assert evidence.stepped is not None
    assert all(np.isfinite(grad).all() for grad in evidence.stepped.grads.values())
    check = judge(evidence, sound_reference(JaxBackend(), config))
    assert check.verdict == "agreed", check.origin
    assert any("a micro-batch by itself overflows at this loss scale" in line for line in check.not_covered)
