"""AdamW against its formulas in Python's own floats, and against `optax.adamw` told everything."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lockstep.core.config.schema import OptimConfig, RunConfig
from lockstep.core.model.names import groups_of
from lockstep.jax_backend.backend import JaxBackend
from lockstep.jax_backend.optim import next_state
from lockstep.parity_tests.cross.variants import shaken_state
from lockstep.parity_tests.tiny import tiny_config

OPTIM = OptimConfig(beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.25)
RATES = (0.01, 0.02, 0.005)
CONFIG = tiny_config("fp64", layers=1, tied=False, qkv_bias=True, o_bias=True, mlp_bias=True)
MATRIX, GAIN = "blocks.0.mlp.up_proj.weight", "final_norm.weight"


@pytest.mark.parametrize("name, decay", [(MATRIX, 0.25), (GAIN, 0.0)])
def test_two_steps_by_hand(name, decay):
    """Kingma & Ba 2015, algorithm 1, with the decoupled decay of Loshchilov & Hutter 2019, algorithm 2."""
    p, m, v = 0.5, 0.0, 0.0
    config = RunConfig(optim=OPTIM)
    ours, moments = {name: jnp.array([p])}, {"exp_avg": {name: jnp.zeros(1)}, "exp_avg_sq": {name: jnp.zeros(1)}}
    for step, (lr, g) in enumerate(zip(RATES, (0.3, -0.04), strict=False), start=1):
        m = 0.8 * m + 0.2 * g
        v = 0.9 * v + 0.1 * g * g
        m_hat, v_hat = m / (1 - 0.8**step), v / (1 - 0.9**step)
        p = p - lr * (m_hat / (math.sqrt(v_hat) + 1e-3) + decay * p)
        terms, moments = next_state(config, ours, moments, {name: jnp.array([g])}, jnp.asarray(step), jnp.asarray(lr))
        ours = {name: sum(terms[name])}
        assert float(moments["exp_avg"][name][0]) == pytest.approx(m, rel=1e-15)
        assert float(moments["exp_avg_sq"][name][0]) == pytest.approx(v, rel=1e-15)
        assert float(ours[name][0]) == pytest.approx(p, rel=1e-15)


def test_the_first_step_is_the_learning_rate_long():
    """m̂/√v̂ = ±1 whatever the gradient's size: the decay and eps apart."""
    config = RunConfig(optim=OptimConfig(eps=1e-30, weight_decay=0.0))
    for g in (1e-8, -1e-3, 1e5):
        zeros = {MATRIX: jnp.zeros(1)}
        moments, grads = {"exp_avg": zeros, "exp_avg_sq": zeros}, {MATRIX: jnp.array([g])}
        terms, _ = next_state(config, zeros, moments, grads, jnp.asarray(1), jnp.asarray(0.01))
        assert float(terms[MATRIX][1][0]) == pytest.approx(-math.copysign(0.01, g), rel=1e-12)


@pytest.fixture(scope="module")
def three_updates():
    """Weights before, and after three updates of the session with random gradients and three learning rates."""
    config = CONFIG.model_copy(update={"optim": OPTIM})
    session = JaxBackend().open(config)
    session.load(shaken_state(config.model))
    random = np.random.default_rng(0)
    grads = [{n: jnp.asarray(random.standard_normal(p.shape)) for n, p in session.params.items()} for _ in RATES]
    params, moments = session.params, session.moments
    for step, (lr, g) in enumerate(zip(RATES, grads, strict=True)):
        params, moments = session.update(params, moments, g, jnp.asarray(0.5), step, lr)
    return session.params, grads, params


def by_optax(before, grads, **other):
    settings = {
        "learning_rate": lambda count: jnp.asarray(RATES)[count],
        "b1": OPTIM.beta1,
        "b2": OPTIM.beta2,
        "eps": OPTIM.eps,
        "eps_root": 0.0,
        "mu_dtype": None,
        "weight_decay": OPTIM.weight_decay,
        "mask": {name: groups_of(CONFIG.model)[name] == "matrices" for name in before},
        "nesterov": False,
    }
    adamw = optax.adamw(**(settings | other))

    # Compiled whole: JAX would compile each operation for each shape.
    @jax.jit
    def updated(g, state, params):
        move, state = adamw.update(jax.tree.map(lambda x: 0.5 * x, g), state, params)
        return optax.apply_updates(params, move), state

    params, state = before, adamw.init(before)
    for g in grads:
        params, state = updated({name: g[name] for name in before}, state, params)
    return params


def farthest(a, b):
    return max(float(np.abs(np.asarray(a[name]) - np.asarray(b[name])).max()) for name in b)


def test_the_update_is_optax_s_adamw(three_updates):
    """In FP64; weights are below 2, whose unit of rounding is 2.2e-16. The coefficient of clipping is 0.5."""
    before, grads, after = three_updates
    assert farthest(before, after) > 0.02
    assert farthest(by_optax(before, grads), after) < 1e-14


@pytest.mark.parametrize(
    "other", [{"mask": None}, {"weight_decay": 0.24}, {"eps": 2e-3}, {"b2": 0.91}, {"nesterov": True}]
)
def test_another_setting_of_optax_is_seen(three_updates, other):
    before, grads, after = three_updates
    assert farthest(after, by_optax({name: before[name] for name in (MATRIX, GAIN)}, grads, **other)) > 1e-6
