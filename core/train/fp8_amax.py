"""Delayed scaling of FP8: a step's scales come from the largest magnitudes (*amaxes*) of earlier steps.

A linear layer casts its input, its weight and the gradient of its output, each with one scale: FP8's largest number
divided by an amax. Under delayed scaling, that amax is the largest of the last `precision.fp8_history` steps
(Micikevicius et al. 2022, arXiv 2209.05433; Transformer Engine's `DelayedScaling` with `amax_compute_algo = "max"`).
So a cast need not compute its own tensor's amax first, and larger numbers saturate. A step's amax is the largest over
its micro-batches and ranks. The history is part of the state (`State.scalars`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lockstep.core.config.schema import RunConfig
from lockstep.core.model.families import graph_of
from lockstep.core.model.names import fp8_modules

# The three casts of a layer, in the order of its amaxes.
CASTS = ("input", "weight", "gradient")
PREFIX = "amax/"
# Amaxes for the first step, which has no history. FP8's range has room for an estimate: largest / smallest number is
# 448 / 2⁻⁹ ≈ 2¹⁸ for e4m3 and 57,344 / 2⁻¹⁶ ≈ 2³² for e5m2. Transformer Engine starts with the scale 1, which rounds
# small gradients to zero.
FIRST_INPUT, FIRST_WEIGHT = 16.0, 1.0

Amaxes = Mapping[str, tuple[float, ...]]


def layers(config: RunConfig) -> list[str]:
    """Return the canonical names of the linear layers with delayed scaling, in the order of the chain."""
    chosen = fp8_modules(config) if config.precision.fp8 == "delayed" else frozenset()
    return [name for name in graph_of(config.model).linears if name in chosen]


def key(layer: str, cast: str, age: int) -> str:
    """Return the name of the scalar with the amax of the step `age` steps before the last step."""
    return f"{PREFIX}{layer}/{cast}/{age}"


def largest(x: np.ndarray) -> np.floating:
    """Return the largest magnitude of an array."""
    found: np.floating = max(x.max(), -x.min())
    return found


def first_amaxes(config: RunConfig) -> dict[str, float]:
    """Return the scalars of a run's state before its first step: zeros, which mean that there is no amax yet."""
    ages = range(config.precision.fp8_history)
    return {key(layer, cast, age): 0.0 for layer in layers(config) for cast in CASTS for age in ages}


def amaxes_in_force(config: RunConfig, scalars: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Return the amaxes for the next step's scales: layer → float32 (3,), in the order of CASTS."""
    # The loss is a mean over a step's tokens, so its gradients are of this size.
    first_gradient = 1.0 / (config.train.batch_size * config.train.sequence_length)
    first = dict(zip(CASTS, (FIRST_INPUT, FIRST_WEIGHT, first_gradient), strict=True))
    ages = range(config.precision.fp8_history)

    def largest(layer: str, cast: str) -> float:
        return max(scalars.get(key(layer, cast, age), 0.0) for age in ages) or first[cast]

    return {layer: np.array([largest(layer, cast) for cast in CASTS], dtype=np.float32) for layer in layers(config)}


def amaxes_after(config: RunConfig, scalars: Mapping[str, float], seen: Amaxes) -> dict[str, float]:
    """Return the history after a step with the amaxes `seen`: all entries get one step older, the oldest is dropped."""
    found = {}
    for layer, of_layer in seen.items():
        for cast, newest in zip(CASTS, of_layer, strict=True):
            found[key(layer, cast, 0)] = float(newest)
            for age in range(1, config.precision.fp8_history):
                found[key(layer, cast, age)] = scalars[key(layer, cast, age - 1)]
    return found


def for_a_share(config: RunConfig, scalars: Mapping[str, float], share: float) -> dict[str, float]:
    """Return scalars with which a single micro-batch is cast as in a step in which it has this share of the weight.

    As a batch of its own, its gradients are larger by the factor 1 / share.
    """
    found = dict(scalars)
    for layer, amaxes in amaxes_in_force(config, scalars).items():
        alone = float(amaxes[CASTS.index("gradient")]) / share
        found |= {key(layer, "gradient", age): alone for age in range(config.precision.fp8_history)}
    return found


def without_amaxes(scalars: Mapping[str, float]) -> dict[str, float]:
    """Return the scalars for a step's record: those without the amax history, which has thousands of entries."""
    return {name: value for name, value in scalars.items() if not name.startswith(PREFIX)}
