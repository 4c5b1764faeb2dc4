"""`lockstep bench parity`: the bytes of observing a step, by formula, and the page of the measurements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from lockstep.core.config.schema import RunConfig
from lockstep.core.model.budget import parameter_count
from lockstep.core.model.names import parameter_shapes, probe_shapes, tap_names
from lockstep.core.parity.evidence.observations import Observation
from lockstep.core.parity.evidence.sketch import K

SCHEMA, SUITE = 1, "parity"
# Modes of observation, in the order of `modes`.
OFF, GRADIENTS, TAPS = "taps off", "gradients every step", "taps every step"
CHECK, SHADOW = "full check every N", "shadow every N"
_PARTS = (
    "One micro-batch a step, in its training steps. Each part of end to end and local is by itself, end to end on "
    "every sequence of the micro-batch; a judgement during training repeats those with weight, end to end beside local."
)


def observation_names(config: RunConfig) -> list[str]:
    """Return the names in a step's observations: taps, their gradients, parameter gradients, the probe's NLL."""
    model = config.model
    names = [n for tap in tap_names(model) for n in (tap, f"grad/{tap}")]
    return [*names, *(f"gradient/{name}" for name in parameter_shapes(model)), "nll/probe"]


def sketch_bytes(config: RunConfig) -> int:
    """Return bytes of a step's sketches alone: 1021 FP32 numbers each, whatever the size of the tensor."""
    return len(observation_names(config)) * 4 * K


def observation_bytes(config: RunConfig) -> int:
    """Return bytes of a step's observations: a sketch, six numbers and a name each."""
    return _observed_bytes(observation_names(config))


def gradient_bytes(config: RunConfig) -> int:
    """Return bytes of the observations of a step's own gradients and NLL alone."""
    return _observed_bytes(observation_names(config)[-len(parameter_shapes(config.model)) - 1 :])


def _observed_bytes(names: list[str]) -> int:
    statistics_of_each = len(Observation.__dataclass_fields__) - 1
    return len(names) * (4 * K + 8 * statistics_of_each + max(map(len, names)))


def array_bytes(found: Any) -> int:
    """Count the bytes of all arrays inside dataclasses, mappings and sequences, each array once."""
    return sum({id(array): array.nbytes for array in _arrays(found)}.values())


def _arrays(found: Any) -> Iterator[np.ndarray]:
    if isinstance(found, np.ndarray):
        yield found
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from _arrays(value)
    elif isinstance(found, tuple | list):
        for value in found:
            yield from _arrays(value)
    elif is_dataclass(found):
        for field in fields(found):
            yield from _arrays(getattr(found, field.name))


def evidence_bytes(config: RunConfig, sequences: int = 2) -> int:
    """Return bytes of the evidence of a check during training, in FP32, without the batches and per-token losses.

    Weights and two moments before and after the step; gradients of the step, of the probe as they were accumulated and
    as its program gave them, and through the tapped program; every tap of the probed `sequences`, and the gradient of
    every tap and edge; a sketch of each gradient of each micro-batch.
    """
    state = (3 + 3 + 1 + 2 + 1) * parameter_count(config.model)
    shapes = probe_shapes(config.model, sequences, config.train.sequence_length)
    taps = sum(math.prod(shapes[name]) for name in tap_names(config.model))
    gradients = sum(math.prod(shape) for shape in shapes.values())
    micros = config.train.accumulation * config.train.ranks
    sketches = micros * len(parameter_shapes(config.model)) * K if micros > 1 else 0
    return 4 * (state + taps + gradients + sketches)


def page(found: Mapping[str, Any]) -> str:
    """Return docs/results/bench_parity.md."""
    machine, versions = found["machine"], found["versions"]
    lines = [
        "# What a check costs",
        "",
        "Made from [bench_parity.json](bench_parity.json) by `lockstep bench parity --page "
        "docs/results/bench_parity.md`; "
        f"measured by `lockstep bench parity`: torch {versions['torch'].split('+')[0]}, jax {versions['jax']}, "
        f"{machine['processor']} CPU, {machine['cores']} cores, {machine['threads']} threads; medians of interleaved "
        "repetitions, compilation aside.",
        "",
        f"{OFF.capitalize()}: the training step alone. {GRADIENTS.capitalize()}: `parity.record_every = 1`, "
        f"observations written. {TAPS.capitalize()}: `parity.record_taps_every = 1`. "
        f"{CHECK.capitalize()}: evidence gathered and judged while the trainer waits. {SHADOW.capitalize()}: "
        "`parity.every`, the reference in a process of its own on the same cores.",
        "",
    ]
    for one in found["models"]:
        lines += _model(one, found["every"])
    steps, seconds = found["steps"], found["medians"]
    lines += [f"## Parts of a check, {found['config']}", "", _PARTS, ""]
    lines += ["| what | seconds | in training steps |", "|---|---|---|"]
    lines += [f"| {name} | {value:.3f} | {steps[name]:.3g} |" for name, value in seconds.items()]
    return "\n".join([*lines, ""])


def _model(one: Mapping[str, Any], every: int) -> list[str]:
    lines = [f"## {one['name']}", "", *([one["scaled"], ""] if one["scaled"] else [])]
    lines += [f"| mode, N = {every} | seconds a step | more than with taps off | bytes a step | the whole model's |"]
    lines += ["|---|---|---|---|---|"]
    for mode, row in one["modes"].items():
        known = row["seconds"] is not None
        time = f"{row['seconds']:.4g} | {100 * row['more']:+.1f} %" if known else "not measured |"
        lines.append(f"| {mode} | {time} | {_bytes(row['bytes'])} | {_bytes(row['bytes_whole'])} |")
    return [*lines, "", *(f"- {line}" for line in one["remarks"]), ""]


def _bytes(size: float | None) -> str:
    return "not known" if size is None else f"{size:,.0f}"
