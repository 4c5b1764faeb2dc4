"""Delayed scaling of FP8: a step's scales come from the largest magnitudes (*amax*) that the steps before it saw.

A linear layer casts its input, its weight and the gradient of its output, each with one scale: FP8's largest number
over an amax. Under delayed scaling (Micikevicius et al. 2022, arXiv 2209.05433; Transformer Engine's `DelayedScaling`
with `amax_compute_algo = "max"`) that is the largest of the last `precision.fp8_history` steps: a cast does not wait
for its own tensor's amax, and numbers beyond it saturate. A step's own amax is the largest over its micro-batches and
ranks. The history is part of the state (`State.scalars`).
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
# Before the first step no amax is known, and FP8's range of 2²⁵ (e4m3) and more has room for a guess. Transformer
# Engine starts with the scale 1, which flushes small gradients to zero.
FIRST_INPUT, FIRST_WEIGHT = 16.0, 1.0

Amaxes = Mapping[str, tuple[float, ...]]


def layers(config: RunConfig) -> list[str]:
    """Return the canonical names of the linear layers with delayed scaling, in the order of the chain."""
    chosen = fp8_modules(config) if config.precision.fp8 == "delayed" else frozenset()
    return [name for name in graph_of(config.model).linears if name in chosen]


def key(layer: str, cast: str, age: int) -> str:
    """Return the name of the scalar with the amax that was seen `age` steps before the last step."""
    return f"{PREFIX}{layer}/{cast}/{age}"


def largest(x: np.ndarray) -> np.floating:
    """Return the largest magnitude of an array."""
    found: np.floating = max(x.max(), -x.min())
    return found


def first_amaxes(config: RunConfig) -> dict[str, float]:
    """Return the scalars of a run's state before its first step: zeros, which are no amaxes yet."""
    ages = range(config.precision.fp8_history)
    return {key(layer, cast, age): 0.0 for layer in layers(config) for cast in CASTS for age in ages}


def amaxes_in_force(config: RunConfig, scalars: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Return, by layer, float32 (3,): the amaxes from which the next step's scales are made, in the order of CASTS."""
    # A gradient of the mean over a step's tokens.
    first_gradient = 1.0 / (config.train.batch_size * config.train.sequence_length)
    first = dict(zip(CASTS, (FIRST_INPUT, FIRST_WEIGHT, first_gradient), strict=True))
    ages = range(config.precision.fp8_history)

    def largest(layer: str, cast: str) -> float:
        return max(scalars.get(key(layer, cast, age), 0.0) for age in ages) or first[cast]

    return {layer: np.array([largest(layer, cast) for cast in CASTS], dtype=np.float32) for layer in layers(config)}


def amaxes_after(config: RunConfig, scalars: Mapping[str, float], seen: Amaxes) -> dict[str, float]:
    """Return the history after a step that saw these amaxes: each one a step older, and the oldest dropped."""
    found = {}
    for layer, of_layer in seen.items():
        for cast, newest in zip(CASTS, of_layer, strict=True):
            found[key(layer, cast, 0)] = float(newest)
            for age in range(1, config.precision.fp8_history):
                found[key(layer, cast, age)] = scalars[key(layer, cast, age - 1)]
    return found


def for_a_share(config: RunConfig, scalars: Mapping[str, float], share: float) -> dict[str, float]:
    """Return the scalars that cast a micro-batch alone as in a step where it has this share of the loss weight.

    Alone, its gradients are 1 / share as large.
    """
    found = dict(scalars)
    for layer, amaxes in amaxes_in_force(config, scalars).items():
        alone = float(amaxes[CASTS.index("gradient")]) / share
        found |= {key(layer, "gradient", age): alone for age in range(config.precision.fp8_history)}
    return found


def without_amaxes(scalars: Mapping[str, float]) -> dict[str, float]:
    """Return the scalars that are printed for each step: without the amax history, which has thousands."""
    return {name: value for name, value in scalars.items() if not name.startswith(PREFIX)}
