"""AdamW8bit of bitsandbytes: its codes in the twin, its state in and out bit for bit, and what a check finds."""

from __future__ import annotations

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lockstep.core.components.eight_bit_codes import quantisation_map
from lockstep.core.components.optimizers import BLOCK
from lockstep.core.config.schema import OptimConfig
from lockstep.core.errors import UserError
from lockstep.core.model.groups import update_rules
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.measures.compare import Reference
from lockstep.jax_backend.backend import JaxBackend
from lockstep.jax_backend.kernels.bitsandbytes_adamw import in_codes
from lockstep.parity_tests.cross.test_optimizers import moments_at_random, run_of, shaken, steps, update_inputs
from lockstep.parity_tests.cross.variants import relative, same_bits
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.kernels import bitsandbytes_adamw
from lockstep.torch_backend.optim import build_optimizer
from lockstep.torch_backend.session import TorchSession

installed = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
MATRIX = "blocks.1.attn.q_proj.weight"
# Blocks of 256 do not divide a projection of (65, 64); the key's, of (32, 64), is too small for 8 bits.
ODD = {"ffn_hidden": 65}


def with_library(policy="fp32", **optim):
    config = run_of("adamw8bit", policy, eight_bit="bitsandbytes", **optim)
    return config.model_copy(update={"model": config.model.model_copy(update=ODD)})


def of_check(compiled=False):
    config = tiny_config("bf16", compiled=compiled, ffn_hidden=65)
    optim = OptimConfig(**{**config.optim.model_dump(), "name": "adamw8bit", "eight_bit": "bitsandbytes"})
    return config.model_copy(update={"optim": optim})


def by_hand(x: np.ndarray, signed: bool) -> np.ndarray:
    """Compute in_codes one number at a time: the nearest level to the nearest of 65,536 places."""
    levels, one = quantisation_map(signed), np.float32(1)
    found = []
    for start in range(0, x.size, BLOCK):
        block = x.reshape(-1)[start : start + BLOCK]
        scale = np.abs(block).max()
        for number in block:
            scaled = number * (one / scale) if scale else np.float32(0)
            part = int((scaled + one) * np.float32(0.5) * np.float32(65535) + np.float32(0.5))
            place = np.float32(2) * np.float32(part) / np.float32(65535) - one
            found.append(levels[np.abs(levels - place).argmin()] * scale)
    return np.asarray(found, np.float32).reshape(x.shape)


def moments_with_a_rest(signed: bool) -> np.ndarray:
    """(171, 191): the last block has 149 numbers; the first is of zeros."""
    return moments_at_random(signed).reshape(-1)[: 171 * 191].reshape(171, 191)


@pytest.mark.parametrize("signed", [True, False])
def test_the_twin_s_codes_are_those_by_hand(signed):
    x = moments_with_a_rest(signed)
    found = np.asarray(jax.jit(in_codes, static_argnums=1)(jnp.asarray(x), signed))
    assert np.array_equal(found, by_hand(x, signed))
    assert not found.reshape(-1)[:BLOCK].any()
    # A number beside others never comes back as nothing.
    assert found.reshape(-1)[1024 : 1024 + BLOCK].all() and not x.reshape(-1)[1024:1027].any()
    assert relative(found, x) < 0.02


def test_without_the_library_one_line_says_so(monkeypatch):
    monkeypatch.setattr(bitsandbytes_adamw, "find_spec", lambda name: None)
    said = r"^optim.eight_bit = 'bitsandbytes' needs bitsandbytes: pip install 'lockstep\[bitsandbytes\]'$"
    for call in (TorchBackend().open, TorchBackend().describe):
        with pytest.raises(UserError, match=said):
            call(with_library())
    TorchBackend().describe(run_of("adamw8bit"))
    TorchBackend().describe(run_of("muon", eight_bit="bitsandbytes"))


@installed
@pytest.mark.parametrize("signed", [True, False])
def test_maps_and_codes_are_the_library_s(signed):
    from bitsandbytes.functional import create_dynamic_map, dequantize_blockwise, quantize_blockwise

    levels = create_dynamic_map(signed)
    assert np.array_equal(levels.numpy(), quantisation_map(signed))
    x = moments_with_a_rest(signed)
    codes, state = quantize_blockwise(torch.tensor(x), code=levels, blocksize=BLOCK)
    due = dequantize_blockwise(codes, state)
    assert np.array_equal(np.asarray(jax.jit(in_codes, static_argnums=1)(jnp.asarray(x), signed)), due.numpy())
    back, scale = bitsandbytes_adamw.in_codes(due, levels)
    assert torch.equal(back, codes)
    assert torch.equal(scale, state.absmax)
    # Quantised once more, blocks whose largest is negative would not come back.
    again, _ = quantize_blockwise(due, code=levels, blocksize=BLOCK)
    assert torch.equal(again, codes) is not signed


@installed
def test_what_no_codes_stood_for_is_quantised_as_the_library_does():
    from bitsandbytes.functional import create_dynamic_map, quantize_blockwise

    levels, x = create_dynamic_map(True), torch.tensor(moments_with_a_rest(True))
    random, zeros = x[6:], torch.tensor([1.0, 0.0, -0.0])
    codes, scale = bitsandbytes_adamw.in_codes(random, levels)
    due, state = quantize_blockwise(random, code=levels, blocksize=BLOCK)
    assert torch.equal(codes, due)
    assert torch.equal(scale, state.absmax)
    # Zeros beside a number are codes of torchao or CUDA: the CPU's quantiser gives none, and keeps none.
    codes, scale = bitsandbytes_adamw.in_codes(zeros, levels)
    assert torch.equal(levels[codes.int()] * scale, zeros)
    assert not torch.equal(codes, quantize_blockwise(zeros, code=levels, blocksize=BLOCK)[0])


@installed
@pytest.mark.parametrize("done", [0, 2, 7])
def test_moments_are_the_twin_s_bits_and_weights_an_ulp_of_the_root_off(done):
    """From the trainer's own state; MKL's √ is an ulp off for some numbers."""
    config = with_library()
    inputs = update_inputs(config, done)
    ours, twin = (backend.open(config).run_stage("update", inputs) for backend in (TorchBackend(), JaxBackend()))
    narrow = [n for n in ours if n.startswith("exp_avg/") and update_rules(config)[n.partition("/")[2]].rounded]
    assert any(ours[n].size % BLOCK for n in narrow)
    for key, value in ours.items():
        if key.startswith("exp_avg"):
            assert value.tobytes() == twin[key].tobytes(), key
        else:
            rounding = 2.0**-24 * np.abs(inputs[key]).max()
            limit = 4 * 2.0**-24 * np.abs(value - inputs[key]) + 2 * rounding
            assert (np.abs(value.astype(np.float64) - twin[key]) <= limit).all(), key


@installed
def test_three_steps_are_the_twin_s():
    """From one state, each step from its own gradients: what differs are these, by roundings of FP32 sums."""
    config = with_library()
    sessions = [backend.open(config) for backend in (TorchBackend(), JaxBackend())]
    for session in sessions:
        session.load(shaken(config))
        steps(session, range(3))
    ours, twin = (session.state() for session in sessions)
    for name, start in shaken(config).params.items():
        assert relative(ours.params[name] - start, twin.params[name] - start) < 1e-2, name
        for kind in ("exp_avg", "exp_avg_sq"):
            assert relative(ours.optimizer[kind][name], twin.optimizer[kind][name]) < 1e-2, (kind, name)


@installed
def test_a_state_goes_in_and_out_and_training_goes_on_bit_for_bit():
    config = with_library()
    whole, first, second = (TorchBackend().open(config) for _ in range(3))
    records = steps(whole, range(5))
    steps(first, range(2))
    state = first.state()
    second.load(state)
    assert same_bits(second.state(), state)
    for mine, other in zip(first.parameters.values(), second.parameters.values(), strict=True):
        ours, theirs = (s.optimizer.state[p] for s, p in ((first, mine), (second, other)))
        assert ours.keys() == theirs.keys() and ours["step"] == theirs["step"] == 2
        assert all(torch.equal(ours[key], theirs[key]) for key in ours.keys() - {"step"})
    assert steps(second, range(2, 5)) == records[2:]
    assert same_bits(second.state(), whole.state())


@installed
@pytest.mark.parametrize("done", [0, 1])
def test_moments_of_zeros_come_back_as_zeros_of_the_same_sign(done):
    """Two steps in a row compare the bits of a state with those when it has been loaded.

    After a step, blocks of the embedding whose tokens have not come yet are still zero.
    """
    config = with_library()
    model = config.model.model_copy(update={"vocab_size": 1000, "tied": False})
    session = TorchBackend().open(config.model_copy(update={"model": model}))
    steps(session, range(done))
    before = session.state_checksums()
    assert (session.state().optimizer["exp_avg"]["embed.weight"] == 0).sum() >= 1000
    session.load(session.state())
    assert session.state_checksums() == before


@installed
def test_every_setting_reaches_the_library():
    config = with_library(eps=1e-6, beta1=0.8, beta2=0.9)
    session = TorchBackend().open(config)
    steps(session, range(1))
    for group in session.optimizer.param_groups:
        assert group["betas"] == (0.8, 0.9) and group["eps"] == 1e-6
    assert type(session.optimizer).__module__ == "bitsandbytes.optim.adamw"
    said = TorchBackend().describe(config)["in_force"]["optimizer"]
    assert said.startswith("AdamW 8-bit (bitsandbytes 0.")
    assert "fp64 rounds no moments" in TorchBackend().describe(with_library("fp64"))["in_force"]["optimizer"]
    exact = build_optimizer(with_library("fp64"), {"embed.weight": torch.nn.Parameter(torch.zeros(2).double())})
    assert type(exact) is torch.optim.AdamW


@installed
@pytest.mark.parametrize("compiled", [False, True])
def test_a_check_agrees(compiled):
    config = of_check(compiled)
    session = TorchBackend().open(config)
    reference = Reference.open(JaxBackend(), config)
    for n in range(2):
        check = judge(gather(session, config, uneven_weights(text_batch(config, n), n)), reference)
        assert check.verdict == "agreed", check.origin
    judged = {f.stage for f in check.findings if f.tap.endswith(MATRIX)}
    assert {"moments", "update"} <= judged


class ScaleStale(TorchSession):
    """One block gets its new codes and keeps the scale of the step before."""

    def step(self, batch, *, norms=False):
        entry = self.optimizer.state[self.parameters[MATRIX]]
        before = entry["absmax1"][0].clone() if entry else torch.zeros(())
        record = super().step(batch, norms=norms)
        entry["absmax1"][0] = before
        return record


class CodesRoundedDown(TorchSession):
    """A number gets the code below its own."""

    def step(self, batch, *, norms=False):
        record = super().step(batch, norms=norms)
        codes = self.optimizer.state[self.parameters[MATRIX]]["state2"]
        codes.sub_((codes > 0).to(codes.dtype))
        return record


class RestIsForgotten(TorchSession):
    """The rest after whole blocks keeps no first moment."""

    def step(self, batch, *, norms=False):
        record = super().step(batch, norms=norms)
        self.optimizer.state[self.parameters["blocks.1.mlp.up_proj.weight"]]["absmax1"][-1] = 0
        return record


@installed
@pytest.mark.parametrize(
    "session_class, tap",
    [
        (ScaleStale, f"exp_avg/{MATRIX}"),
        (CodesRoundedDown, f"exp_avg_sq/{MATRIX}"),
        (RestIsForgotten, "exp_avg/blocks.1.mlp.up_proj.weight"),
    ],
)
def test_a_fault_is_found(session_class, tap):
    config = of_check()
    session = session_class(config)
    session.step(text_batch(config, 1))
    evidence = gather(session, config, uneven_weights(text_batch(config), 0))
    origin = judge(evidence, Reference.open(JaxBackend(), config)).origin
    assert origin is not None
    assert (origin.stage, origin.tap) == ("moments", tap)
