"""Initial weights as a pure function of (seed, canonical name, shape), so that both backends start with equal bits."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from lockstep.core.config.sections import ModelConfig
from lockstep.core.model.families import graph_of
from lockstep.core.model.graph import Constant, Parameter


def init_parameter(parameter: Parameter, seed: int) -> np.ndarray:
    """Return one parameter's initial values, float32; normal ones are from a Philox stream keyed by (seed, name)."""
    if isinstance(parameter.initial, Constant):
        return np.full(parameter.shape, parameter.initial.value, np.float32)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{parameter.name}".encode()).digest()[:16], "little")
    normal = np.random.Generator(np.random.Philox(key=key)).standard_normal(parameter.shape, dtype=np.float32)
    return np.multiply(normal, np.float32(parameter.initial.std), out=normal)


def init_parameters(model: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Return the initial values of all parameters by canonical name, float32."""
    parameters = graph_of(model).parameters
    # NumPy draws without Python's lock, and each parameter has its own stream, so threads do not change the bits.
    with ThreadPoolExecutor() as pool:
        made = pool.map(lambda parameter: init_parameter(parameter, seed), parameters.values())
        return dict(zip(parameters, made, strict=True))
