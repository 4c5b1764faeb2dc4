"""Every optimizer: its twin, third opinions, rates in force by group, and a state that comes back bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lockstep.torch_backend.optim
from lockstep.core.backend import State
from lockstep.core.components.eight_bit_codes import quantisation_map
from lockstep.core.components.optimizers import BLOCK
from lockstep.core.config.schema import CompileConfig, OptimConfig, RunConfig
from lockstep.core.model.graph import GROUPS
from lockstep.core.model.groups import group_settings, update_rules
from lockstep.core.model.names import groups_of
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.reference.self_check import check_reference
from lockstep.core.train.schedule import learning_rate
from lockstep.jax_backend.backend import JaxBackend
from lockstep.jax_backend.kernels.codes import in_codes
from lockstep.jax_backend.optim import orthogonal as orthogonal_in_jax
from lockstep.parity_tests.cross.variants import ALL_BIASES, relative, same_bits, shaken_state
from lockstep.parity_tests.fused_on_cuda import fused_on_cuda
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.scripts.studies.clean_runs import initial_state
from lockstep.torch_backend import optim, precision
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.optim import build_optimizer, eight_bits, orthogonal, set_learning_rate
from lockstep.torch_backend.session import TorchSession

OPTIMIZERS = ("adamw", "adamw8bit", "muon")
GROUPED = {"embedding_lr_scale": 2.0, "head_lr_scale": 0.5, "gains_lr_scale": 3.0, "base_width": 16, "base_batch": 1}
MATRIX = "blocks.0.attn.q_proj.weight"


def run_of(name: str, policy: str = "fp32", **optim) -> RunConfig:
    """Build a run of an optimizer with another rate and decay for every group."""
    config = tiny_config(policy, layers=1, train={"sequence_length": 32}, tied=False, **ALL_BIASES)
    decays = {"embedding_weight_decay": 0.2, "head_weight_decay": 0.3, "gains_weight_decay": 0.4}
    changed = {**config.optim.model_dump(), "name": name, **GROUPED, **decays, **optim}
    return config.model_copy(update={"optim": OptimConfig(**changed)})


def steps(session, numbers) -> list:
    return [session.step(uneven_weights(text_batch(session.config, n), n)) for n in numbers]


def shaken(config: RunConfig) -> State:
    """Weights off their initial values, moments at zero."""
    return replace(initial_state(config, 0), params=shaken_state(config.model).params)


@pytest.mark.parametrize("optim", [{}, {"nesterov": False}, {"momentum": 0.3, "ns_steps": 2}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_backends_agree_in_fp64(name, optim):
    """Under fp64 neither quantises and Newton–Schulz is exact; distances are relative to the movement."""
    config = run_of(name, "fp64", **optim)
    states = []
    for backend in (TorchBackend(), JaxBackend()):
        session = backend.open(config)
        session.load(shaken(config))
        steps(session, range(3))
        states.append(session.state())
    ours, theirs = states
    for parameter, start in shaken(config).params.items():
        # As in test_updates_agree.py: a key's bias divides an error by almost nothing.
        limit = 1e-10 if parameter.endswith("k_proj.bias") else 1e-12
        assert relative(ours.params[parameter] - start, theirs.params[parameter] - start) < limit, parameter
    assert ours.optimizer.keys() == theirs.optimizer.keys()
    for kind, arrays in ours.optimizer.items():
        for parameter, array in arrays.items():
            assert relative(array, theirs.optimizer[kind][parameter]) < 1e-12, (kind, parameter)


def update_inputs(config: RunConfig, steps_done: int = 2) -> dict[str, np.ndarray]:
    """Draw inputs of the stage `update`: gradients at random, and the trainer's own state after some steps."""
    session = TorchBackend().open(config)
    steps(session, range(steps_done))
    state, rng = session.state(), np.random.default_rng(0)
    inputs = {f"params/{n}": p for n, p in state.params.items()}
    inputs |= {f"grads/{n}": rng.standard_normal(p.shape).astype(p.dtype) * 1e-2 for n, p in state.params.items()}
    inputs |= {f"{kind}/{n}": a for kind, tree in state.optimizer.items() for n, a in tree.items()}
    return inputs | {"step": np.asarray(steps_done), "coefficient": np.asarray(0.5), "lr": np.asarray(3e-3)}


@pytest.mark.parametrize("name, dtype", [("adamw8bit", "bf16"), ("muon", "bf16"), ("muon", "fp32")])
def test_the_twin_rounds_as_the_trainer_does(name, dtype):
    """In FP32, against the exact update: both are as far off, and less far from each other than from it.

    Muon in bf16 takes one iteration: sums in another order, as another machine makes them, put an element on the other
    side of a tie, and each further iteration amplifies that by the momentum's condition number.
    """
    config = run_of(name, ns_dtype=dtype, ns_steps=1 if dtype == "bf16" else 5)
    inputs = update_inputs(config)
    exact_config = config.model_copy(update={"precision": config.precision.model_copy(update={"policy": "fp64"})})
    c, w = (backend.open(config).run_stage("update", inputs) for backend in (TorchBackend(), JaxBackend()))
    t = JaxBackend().open(exact_config).run_stage("update", inputs)
    assert c.keys() == w.keys() == t.keys()
    rules = update_rules(config)
    for key in c:
        start = inputs[key].astype(np.float64) if key.startswith("params/") else 0.0
        ours, twin, exact = (x[key] - start for x in (c, w, t))
        error = relative(twin, exact)
        rounded = key.startswith("exp_avg") and bool(rules[key.partition("/")[2]].rounded)
        bf16 = dtype == "bf16" and key.startswith("params/") and rules[key.removeprefix("params/")].name == "muon"
        assert error < (0.05 if rounded or bf16 else 1e-3)
        assert error > (1e-3 if rounded or bf16 else 0.0)
        assert relative(ours, twin) < (0.5 * error if rounded or bf16 else max(4 * error, 1e-7)), key


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_twin_follows_the_fused_kernel_of_cuda(name, monkeypatch):
    """Moments have its bits. β₂ = 0.999 in FP64 would make v 1.3e-5 longer, and for v alone that is a wrong kernel."""
    config = run_of(name, beta2=0.999)
    inputs = update_inputs(config)
    with fused_on_cuda(monkeypatch):
        ours = TorchBackend().open(config).run_stage("update", inputs)
    in_fp64, in_fp32 = (
        JaxBackend().open(config).run_stage("update", inputs | declared)
        for declared in ({}, {"adam_in_fp32": np.asarray(True)})
    )
    by_adam = [n for n, rule in update_rules(config).items() if rule.name == "adamw"]
    for parameter in by_adam:
        for kind in ("exp_avg", "exp_avg_sq"):
            key = f"{kind}/{parameter}"
            assert np.mean(ours[key] != in_fp32[key]) < 1e-3, key
        old = inputs[f"params/{parameter}"]
        moved, due = (x[f"params/{parameter}"].astype(np.float64) - old for x in (ours, in_fp32))
        assert relative(moved, due) < 1e-6
        assert relative(ours[f"exp_avg_sq/{parameter}"], in_fp64[f"exp_avg_sq/{parameter}"]) > 1e-6


def test_eight_bit_moments_are_the_same_bits_in_jax():
    """Codes and scales of torchao, from the same numbers; among them blocks of zeros and of next to nothing."""
    from torchao.optim.subclass_8bit import OptimState8bit, get_qmap_signed, get_qmap_unsigned

    for signed, values in ((True, get_qmap_signed()), (False, get_qmap_unsigned())):
        assert np.array_equal(quantisation_map(signed), np.asarray(values, np.float32))
        x = moments_at_random(signed)
        state = OptimState8bit.zeros(x.shape, signed, BLOCK)
        state.copy_(torch.tensor(x))
        ours = np.asarray(jax.jit(in_codes, static_argnums=1)(jnp.asarray(x), signed))
        assert np.array_equal(ours, state.dequantize().numpy())
        assert not np.array_equal(ours, x)


def moments_at_random(signed: bool) -> np.ndarray:
    rng = np.random.default_rng(int(signed))
    x = (rng.standard_normal((64, 512)) * np.exp(3 * rng.standard_normal((64, 1)))).astype(np.float32)
    x[0], x[1], x[2] = 0, x[1] * 1e-13, 0
    x[2, 3] = -0.3
    return x if signed else np.square(x)


@pytest.mark.parametrize("signed", [True, False])
def test_eight_bit_moments_come_back_bit_for_bit(signed):
    """Codes and scales from what they stand for. Quantised once more, blocks whose largest is negative would shrink."""
    from torchao.optim.subclass_8bit import OptimState8bit

    state = OptimState8bit.zeros((64, 512), signed, BLOCK)
    state.copy_(torch.tensor(moments_at_random(signed)))
    back = eight_bits(state.dequantize(), signed)
    assert torch.equal(back.codes, state.codes)
    assert torch.equal(back.scale, state.scale)
    again = OptimState8bit.zeros((64, 512), signed, BLOCK)
    again.copy_(state.dequantize())
    assert torch.equal(again.scale, state.scale) is not signed


@pytest.mark.parametrize("signed", [True, False])
def test_every_code_is_found_at_any_scale(signed):
    """A code's number at a scale, over that scale, is some roundings away from where the map has it."""
    from torchao.optim.subclass_8bit import OptimState8bit

    scales = np.exp(np.random.default_rng(0).uniform(-25, 60, 512)).astype(np.float32)
    state = OptimState8bit.zeros((512, BLOCK), signed, BLOCK)
    state.codes.copy_(torch.arange(256, dtype=torch.uint8))
    if signed:  # the largest magnitude of these is negative, and less than their scale
        state.codes[::2, -1] = 0
    state.scale.copy_(torch.from_numpy(scales))
    back = eight_bits(state.dequantize(), signed)
    assert torch.equal(back.codes, state.codes) and torch.equal(back.scale, state.scale)


@pytest.mark.parametrize("signed", [True, False])
def test_a_block_has_the_same_codes_whatever_stands_beside_it(signed, monkeypatch):
    """Numbers that no codes stand for are rounded as torchao does."""
    from torchao.optim.subclass_8bit import OptimState8bit

    x = torch.tensor(moments_at_random(signed))
    x[2] = 0  # its one number has a scale that torchao does not find
    whole = eight_bits(x, signed)
    monkeypatch.setattr(optim, "BLOCKS_AT_ONCE", 7)
    cut = eight_bits(x, signed)
    assert torch.equal(cut.codes, whole.codes) and torch.equal(cut.scale, whole.scale)
    by_torchao = OptimState8bit.zeros(x.shape, signed, BLOCK)
    by_torchao.copy_(x)
    assert torch.equal(cut.codes, by_torchao.codes) and torch.equal(cut.scale, by_torchao.scale)
    assert not torch.equal(cut.dequantize(), x)


@pytest.fixture
def as_in_torch(monkeypatch):
    """torch.optim.Muon rounds the norm to bf16, and its products are torch's own. Nothing else sets it apart."""
    exact = torch.linalg.vector_norm

    def rounded(x, *arguments, dtype=None, **options):
        found = exact(x, *arguments, **options)
        return found if dtype is None else found.to(dtype)

    monkeypatch.setattr(torch.linalg, "vector_norm", rounded)
    monkeypatch.setattr(precision, "BF16_BY_ONEDNN", True)


@pytest.mark.parametrize("shape", [(64, 64), (128, 64), (64, 172)])
def test_newton_schulz_is_that_of_torch_but_for_the_norm(shape, as_in_torch):
    from torch.optim._muon import _zeropower_via_newtonschulz as in_torch

    x = torch.tensor(np.random.default_rng(0).standard_normal(shape), dtype=torch.float32)
    assert torch.equal(orthogonal(x.bfloat16(), 5), in_torch(x, (3.4445, -4.7750, 2.0315), 5, 1e-7))


def test_a_norm_at_a_tie_of_bf16_moves_nothing():
    """1 + 2⁻⁸ is the norm of 1, 2⁻⁴, 2⁻⁴ and 2⁻⁸, between two numbers of bf16: a little more is no other norm."""
    from torch.optim._muon import _zeropower_via_newtonschulz as in_torch

    x = torch.zeros(64, 64)
    x.view(-1)[[0, 65, 130, 195]] = torch.tensor([1.0, 2.0**-4, 2.0**-4, 2.0**-8])
    more = x.clone()
    more[10, 20] = 2.0**-10
    ours = [orthogonal(y.bfloat16(), 1) for y in (x, more)]
    theirs = [in_torch(y, (3.4445, -4.7750, 2.0315), 1, 1e-7) for y in (x, more)]
    off = [(one - other).diagonal().float().abs().max() for one, other in (ours, theirs)]
    assert off[0] < 1e-3 < off[1]


@pytest.mark.parametrize("shape", [(64, 64), (128, 64), (64, 172)])
def test_newton_schulz_is_that_of_jax_and_of_the_singular_values(shape):
    """In FP64: against JAX, and what it does to singular values."""
    x = torch.tensor(np.random.default_rng(0).standard_normal(shape))
    exact = orthogonal(x, 5)
    assert relative(np.asarray(orthogonal_in_jax(jnp.asarray(x.numpy()), 5, None)), exact.numpy()) < 1e-13
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    assert relative(exact.numpy(), ((left * values) @ right).numpy()) < 1e-12
    assert float(values.min()) > 0.3 and float(values.max()) < 1.3


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torch_s_muon(nesterov, as_in_torch):
    """Three steps of a tall and a wide matrix with clipped gradients, rate and decay of the group."""
    config = run_of("muon", nesterov=nesterov, weight_decay=0.25)
    names = ("blocks.0.mlp.up_proj.weight", "blocks.0.mlp.down_proj.weight")
    start = {n: torch.tensor(p, dtype=torch.float32) for n, p in shaken_state(config.model).params.items()}
    ours = {n: torch.nn.Parameter(p.clone()) for n, p in start.items()}
    mine, factor = build_optimizer(config, ours), group_settings(config, "matrices").lr_factor
    theirs = [torch.nn.Parameter(start[n].clone()) for n in names]
    optim = config.optim
    muon = torch.optim.Muon(
        theirs, momentum=optim.momentum, nesterov=nesterov, weight_decay=0.25, adjust_lr_fn="match_rms_adamw"
    )
    torch.manual_seed(0)
    for lr in (0.01, 0.02, 0.005):
        for parameter, other in zip((ours[n] for n in names), theirs, strict=True):
            parameter.grad = torch.randn_like(other)
            other.grad = parameter.grad.clone()
        set_learning_rate(mine, lr)
        mine.step()
        muon.param_groups[0]["lr"] = lr * factor
        muon.step()
    for name, other in zip(names, theirs, strict=True):
        moved = (ours[name] - start[name]).detach().numpy()
        assert np.linalg.norm(moved) > 1e-2
        assert relative(moved, (other - start[name]).detach().numpy()) < 1e-6


def test_another_polynomial_is_seen(monkeypatch):
    """The negative twin of the comparisons above."""
    config = run_of("muon", "fp64")
    inputs = update_inputs(config)
    due = JaxBackend().open(config).run_stage("update", inputs)[f"params/{MATRIX}"]
    monkeypatch.setattr(lockstep.torch_backend.optim, "A", 3.44)
    wrong = TorchBackend().open(config).run_stage("update", inputs)[f"params/{MATRIX}"]
    start = inputs[f"params/{MATRIX}"]
    assert relative(wrong - start, due - start) > 1e-4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rates_and_decay_in_force(name):
    """Each torch group has lr × its factor at the second step; the record has the schedule's own."""
    config = run_of(name)
    session = TorchBackend().open(config)
    records = steps(session, range(2))
    due = learning_rate(config.optim, 2, config.train.steps)
    assert records[-1].lr == due
    # tiny: hidden 64 with a base of 16, batch 4 with a base of 1
    factors = {"embedding": 4.0, "head": 1.0, "matrices": 0.5, "gains": 6.0, "biases": 6.0}
    decays = {"embedding": 0.2, "head": 0.3, "matrices": 0.1, "gains": 0.4, "biases": 0.0}
    seen = {g["group"]: g for g in session.optimizer.param_groups}
    assert seen.keys() == set(GROUPS)
    for group, of_group in seen.items():
        assert float(of_group["lr"]) == pytest.approx(due * factors[group], rel=1e-7)
        assert of_group["weight_decay"] == decays[group]
    names = {id(p): n for n, p in session.parameters.items()}
    members = [(g["group"], names[id(p)]) for g in session.optimizer.param_groups for p in g["params"]]
    assert sorted(n for _, n in members) == sorted(session.parameters)
    assert all(groups_of(config.model)[n] == group for group, n in members)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("backend", [TorchBackend(), JaxBackend()], ids=lambda b: b.name)
def test_a_state_goes_in_and_out_and_training_goes_on_bit_for_bit(name, backend):
    config = run_of(name)
    whole, first, second = (backend.open(config) for _ in range(3))
    records = steps(whole, range(4))
    steps(first, range(2))
    state = first.state()
    second.load(state)
    assert same_bits(second.state(), state)
    assert steps(second, range(2, 4)) == records[2:]
    assert same_bits(second.state(), whole.state())


@pytest.mark.parametrize(
    "name, kind", [("adamw8bit", "exp_avg"), ("adamw8bit", "exp_avg_sq"), ("muon", "momentum_buffer")]
)
def test_a_lost_moment_is_seen(name, kind):
    config = run_of(name)
    session = TorchBackend().open(config)
    steps(session, range(2))
    state = session.state()
    zeros = {n: np.zeros_like(a) for n, a in state.optimizer[kind].items()}
    steps(session, range(2, 3))
    other = TorchBackend().open(config)
    other.load(replace(state, optimizer={**state.optimizer, kind: zeros}))
    steps(other, range(2, 3))
    assert other.state().params[MATRIX].tobytes() != session.state().params[MATRIX].tobytes()


@pytest.mark.parametrize("backend", [TorchBackend(), JaxBackend()], ids=lambda b: b.name)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_reference_s_closed_forms_hold(name, backend):
    check = check_reference(backend, run_of(name))
    assert [f for f in check.wrong if f.stage in ("moments", "update")] == []
    assert {"moments", "update"} <= {f.stage for f in check.findings}
    assert not any("closed forms" in words for words in check.not_covered)


@pytest.mark.parametrize("change", [{"ns_steps": 4}, {"nesterov": False}, {"gains_lr_scale": 1.0}, {"momentum": 0.9}])
def test_another_muon_is_no_reference(change):
    class Other(JaxBackend):
        def open(self, config):
            optim = OptimConfig(**(config.optim.model_dump() | change))
            return super().open(config.model_copy(update={"optim": optim}))

    assert {f.stage for f in check_reference(Other(), run_of("muon")).wrong} & {"moments", "update"}


class _ShortMuon(optim.Muon):
    def length(self, rows: int, columns: int) -> float:
        return 0.2 * math.sqrt(min(rows, columns))


class _JordansMuon(optim.Muon):
    def length(self, rows: int, columns: int) -> float:
        return math.sqrt(max(1, rows / columns))


def _muon_of(rule: type[optim.Muon]) -> TorchBackend:
    class Session(TorchSession):
        def build_optimizer(self):
            built = super().build_optimizer()
            built.optimizers[0].__class__ = rule
            return built

    return type(rule.__name__, (TorchBackend,), {"session_class": Session})()


@pytest.mark.parametrize(
    ("rule", "parameter", "words"),
    [
        (_ShortMuon, "mlp.down_proj", "length off by √(the longer side / the shorter side) (÷1.41421)"),
        (
            _JordansMuon,
            "mlp.gate_proj",
            "length off by the length √max(1, rows/columns) for 0.2·√max(rows, columns) (×0.",
        ),
    ],
)
def test_a_length_of_muon_s_update_is_named_by_muon_s_own_numbers(rule, parameter, words):
    """√2 was called the bias correction 1 − β₂ᵗ of the next step, which is 1.396 at step 1: Muon has no β₂."""
    config = tiny_config()
    config = config.model_copy(update={"optim": config.optim.model_copy(update={"name": "muon"})})
    evidence = gather(_muon_of(rule).open(config), config, uneven_weights(text_batch(config), 0))
    check = judge(evidence, Reference.open(JaxBackend(), config))
    assert check.origin is not None and check.origin.stage == "update"
    named = next(f for f in check.findings if f.tap == f"blocks.0.{parameter}.weight" and f.stage == "update")
    assert not named.ok and named.note.startswith(words)
    assert not [f.note for f in check.findings if "β" in f.note]


def updated(fused: bool, before: State, grads: dict[str, np.ndarray], config: RunConfig, lr: float) -> State:
    """Return the state after one update of torch's AdamW."""
    session = TorchSession(config.model_copy(update={"optim": config.optim.model_copy(update={"fused": fused})}))
    assert {group["fused"] for group in session.optimizer.param_groups} == {fused}
    session.load(before)
    for name, p in session.parameters.items():
        p.grad = torch.tensor(grads[name])
    set_learning_rate(session.optimizer, lr)
    session.optimizer.step()
    session.steps_done += 1
    return session.state()


ODD = {"vocab_size": 257, "hidden": 36, "heads": 2, "kv_heads": 1, "ffn_hidden": 53}


@pytest.mark.parametrize("lr", [3e-3, 0.0])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("done", [0, 9999])
@pytest.mark.parametrize("policy", ["fp32", "fp64"])
def test_the_fused_adamw_rounds_as_the_other_does(policy, done, decay, lr):
    """torch/aten/src/ATen/native/cpu/FusedAdamKernel.cpp does foreach's operations in foreach's order.

    Two roundings differ. Foreach's square root is MKL's, which is not always the nearest number (one in 170 is not on
    an Intel Xeon, one in six on an AMD EPYC 9005): those weights may end an ulp of the update away. The rest of a
    tensor after whole vectors has its second moment from a loop of scalars, in which the compiler contracts the other
    product.
    """
    config = tiny_config(policy, layers=1, train={"sequence_length": 16}, **ODD)
    names = ("weight_decay", "embedding_weight_decay", "gains_weight_decay")
    optim = config.optim.model_copy(update=dict.fromkeys(names, decay))
    config = config.model_copy(update={"device": "cpu", "optim": optim})
    start, rng = initial_state(config, 0), np.random.default_rng(0)
    real = np.float64 if policy == "fp64" else np.float32

    def draw(scale: float) -> dict[str, np.ndarray]:
        return {n: (rng.standard_normal(p.shape) * scale).astype(real) for n, p in start.params.items()}

    moments = {"exp_avg": draw(1e-3 * (done > 0)), "exp_avg_sq": {n: x**2 for n, x in draw(1e-3).items()}}
    before = replace(start, step=done, params=draw(0.02), optimizer=moments if done else start.optimizer)
    grads = draw(1e-3)
    fused, foreach = (updated(choice, before, grads, config, lr) for choice in (True, False))
    assert same_bits(replace(fused, params={}, optimizer={}), replace(foreach, params={}, optimizer={}))
    lanes, ulp = 64 // np.dtype(real).itemsize, np.finfo(real).eps
    moved = inexact = 0
    for name, p in before.params.items():
        assert fused.optimizer["exp_avg"][name].tobytes() == foreach.optimizer["exp_avg"][name].tobytes()
        whole = p.size - p.size % lanes
        ours, theirs = (s.optimizer["exp_avg_sq"][name].ravel() for s in (fused, foreach))
        assert ours[:whole].tobytes() == theirs[:whole].tobytes(), name
        np.testing.assert_allclose(ours, theirs, rtol=2 * ulp, atol=0)
        (root,) = torch._foreach_sqrt([torch.from_numpy(theirs)])
        inexact += int((root.numpy() != np.sqrt(theirs)).sum()) + p.size - whole
        ours, theirs = (s.params[name].ravel() for s in (fused, foreach))
        # A root's ulp is at most four of the update, since three roundings follow, and the weight is rounded once more.
        reach = ulp * (np.abs(theirs) + 4 * np.abs(theirs - p.ravel()))
        assert (np.abs(ours - theirs) <= reach).all(), name
        moved += int((ours != theirs).sum())
    assert moved <= inexact
    assert lr or not moved


def test_what_runs_is_said():
    said = {
        (name, policy): TorchBackend().describe(run_of(name, policy))["in_force"]["optimizer"]
        for name in OPTIMIZERS
        for policy in ("fp32", "fp64")
    }
    assert said["adamw", "fp32"] == "AdamW (fused)"
    assert said["adamw8bit", "fp32"].startswith("AdamW 8-bit (torchao 0.")
    assert said["adamw8bit", "fp64"] == "AdamW (fused): fp64 rounds no moments to 8 bits"
    assert said["muon", "fp32"] == "Muon (Newton–Schulz in bf16) for matrices, AdamW (fused) for the rest"
    told = TorchBackend().describe(run_of("adamw", fused=False))["in_force"]["optimizer"]
    assert told == "AdamW (foreach)"
    assert "Newton–Schulz in fp64" in said["muon", "fp64"]
    compiled = run_of("adamw8bit").model_copy(update={"compile": CompileConfig()})
    assert "compiled" in TorchBackend().describe(compiled)["in_force"]["optimizer"]
    assert "compiled" not in said["adamw8bit", "fp32"]


def test_torchao_compiles_nothing_in_an_eager_run():
    """Its step uses torch.compile under any settings of the run: on the CPU that takes half a minute."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    steps(TorchBackend().open(run_of("adamw8bit")), range(1))
    assert not torch._dynamo.utils.counters["stats"]


PLAIN = (torch.Tensor, torch.nn.Parameter)


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest new tensor holds."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in args if type(one) in PLAIN}
        if type(found) is torch.Tensor and found.untyped_storage().data_ptr() not in given:
            self.numbers = max(self.numbers, found.numel())
        return found


def test_an_eager_step_of_eight_bit_adamw_is_torchaos_without_copies_of_whole_weights(monkeypatch):
    """Small tensors, whose moments are no codes, and one without a gradient among them."""
    from torchao.optim import AdamW8bit

    monkeypatch.setattr(optim, "BLOCKS_AT_ONCE", 2)
    config = tiny_config()
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((64, 512), (4096,), (100, 64), (7,), (3,))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    settings = {"betas": (config.optim.beta1, config.optim.beta2), "eps": config.optim.eps, "block_size": BLOCK}
    one = optim.eight_bit_adamw(config, [{"params": ours, "weight_decay": 0.1}])
    other = AdamW8bit([{"params": theirs, "weight_decay": 0.1}], lr=config.optim.peak_lr, **settings)
    for _ in range(3):
        for p, q in zip(ours[:-1], theirs[:-1], strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        one.step()
        with torch.compiler.set_stance("force_eager"):
            other.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        for kind in one.state[p]:
            assert torch.equal(optim.numbers_of(one.state[p][kind]), optim.numbers_of(other.state[q][kind]))
    assert not one.state[ours[-1]] and len(one.state[ours[0]]) == 3
    with Largest() as largest:
        one.step()
    assert largest.numbers <= 2 * BLOCK
