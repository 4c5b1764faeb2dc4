"""Initial weights as a pure function of (seed, canonical name, shape): both backends start from the same bits."""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from lockstep.core.config.schema import ModelConfig
from lockstep.core.model.names import Shape, group_of, parameter_shapes


def init_std(model: ModelConfig, name: str, shape: Shape) -> float:
    """Standard deviation: 1/√fan_in; 0.02 for embeddings; hidden^-½ / √(2·layers) for what writes the residual.

    The last is GPT-2's scaling of residual projections (Radford et al. 2019, section 2.3).
    """
    if group_of(name) == "embedding":
        return 0.02
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return model.hidden**-0.5 / math.sqrt(2 * model.layers)
    return shape[-1] ** -0.5


def init_parameter(model: ModelConfig, seed: int, name: str, shape: Shape) -> np.ndarray:
    """One parameter, float32: gains 1, biases 0, everything else normal from a Philox stream keyed by (seed, name)."""
    if group_of(name) == "gains":
        return np.ones(shape, np.float32)
    if group_of(name) == "biases":
        return np.zeros(shape, np.float32)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    normal = np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, dtype=np.float32)
    return np.multiply(normal, np.float32(init_std(model, name, shape)), out=normal)


def init_parameters(model: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """All parameters by canonical name, float32."""
    shapes = parameter_shapes(model)
    # numpy draws without Python's lock, and each parameter has a stream of its own: the bits do not know of threads.
    with ThreadPoolExecutor() as pool:
        made = pool.map(lambda name: init_parameter(model, seed, name, shapes[name]), shapes)
        return dict(zip(shapes, made, strict=True))
