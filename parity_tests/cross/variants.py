"""Model variants, and states without gains of 1 and biases of 0, which would hide mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.core.backend import State
from lockstep.core.config.schema import ModelConfig
from lockstep.core.model.init import init_parameters

ALL_BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied-biased": {"tied": False, **ALL_BIASES},
    "mha": {"kv_heads": 4},
    "mqa-untied": {"kv_heads": 1, "tied": False, "rope_theta": 1e4, "norm_eps": 1e-3},
}


def fresh_state(params: dict[str, np.ndarray]) -> State:
    """Return a state at step 0 with these weights."""
    zeros = {name: np.zeros_like(p) for name, p in params.items()}
    return State(0, params, {"exp_avg": zeros, "exp_avg_sq": zeros})


def shaken_state(model: ModelConfig, seed: int = 0) -> State:
    """Return initial weights, gains and biases plus noise, in FP64 (values that FP32 cannot represent)."""
    random = np.random.default_rng(seed)
    return fresh_state(
        {
            name: p + random.standard_normal(p.shape) * (0.1 if name.endswith(("bias", "norm.weight")) else 0.01)
            for name, p in init_parameters(model, seed).items()
        }
    )


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """Return ‖a − b‖ / ‖b‖ in FP64. Fails if b is zero."""
    size = float(np.linalg.norm(b.astype(np.float64)))
    assert size > 0 and a.shape == b.shape
    return float(np.linalg.norm(a.astype(np.float64) - b.astype(np.float64))) / size


def same_bits(a: State, b: State) -> bool:
    """Return whether two states are equal in step, names, dtypes, shapes and every bit."""
    trees = [(a.params, b.params)]
    if a.step != b.step or set(a.optimizer) != set(b.optimizer):
        return False
    trees += [(a.optimizer[kind], b.optimizer[kind]) for kind in a.optimizer]
    return all(
        set(x) == set(y)
        and all(x[n].dtype == y[n].dtype and x[n].shape == y[n].shape and x[n].tobytes() == y[n].tobytes() for n in x)
        for x, y in trees
    )
