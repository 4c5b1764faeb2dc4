"""Compile a reference's programs for a check's stages while the candidate runs and leaves cores idle.

A stage runs forward only, and with gradients, on a micro-batch of the step and on its sequences with weight. A stage
that is not prepared is compiled at its first use.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.core.backend import Arrays, Batch, NotSupported
from lockstep.core.capabilities import PreparesStages, ask
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.families import graph_of
from lockstep.core.model.graph import Graph, Operation
from lockstep.core.model.names import in_fp8
from lockstep.core.parity.evidence.probe import micro_to_probe, probe_of
from lockstep.core.parity.measures.compare import Reference
from lockstep.core.parity.reference.operations import LOOK_UP, with_amaxes
from lockstep.core.train.fp8_amax import layers

# The largest magnitudes of an input, a weight and an output gradient.
AMAXES = 3


def prepare(reference: Reference, batch: Batch) -> None:
    """Compile each stage in both sessions for a batch of this shape, if they support it. No stage is run."""
    try:
        sides = [ask(session, PreparesStages) for session in reference.sessions]
    except NotSupported:
        return
    micro = micro_to_probe(batch, reference.config)
    weighted = micro.rows(np.flatnonzero(probe_of(micro, reference.config).weights.any(axis=1)))
    for stage, plain, inputs in _stages(reference.config, micro, weighted):
        # FP64 has no FP8, so the truth runs the plain stage.
        for side, name in zip(sides, (stage, plain), strict=False):
            side.prepare_stage(name, inputs)


def _stages(config: RunConfig, micro: Batch, weighted: Batch) -> Iterator[tuple[str, str, Arrays]]:
    """Yield each stage's name in the twin, its plain name, and inputs of the shapes that it will get."""
    graph = graph_of(config.model, config.attention, config.loss)
    amaxes = {layer: np.zeros(AMAXES, np.float32) for layer in layers(config)}
    seen: set[str] = set()
    for one in graph.operations:
        stage = f"{one.id}/fp8" if in_fp8(config, one) else one.id
        if stage in seen:
            continue
        seen.add(stage)
        for batch in (micro, weighted) if len(weighted.tokens) < len(micro.tokens) else (micro,):
            inputs = with_amaxes(one, _inputs(one, graph, batch), amaxes)
            yield stage, one.id, inputs
            yield stage, one.id, {**inputs, "grad": _zeros(*batch.tokens.shape, *one.width)}


def _inputs(one: Operation, graph: Graph, batch: Batch) -> dict[str, np.ndarray]:
    """Return zeros of the shapes of a stage's inputs, which take no memory, and its inputs from the batch."""
    found = {role: _zeros(*batch.tokens.shape, *graph.by_tap[tap].width) for role, tap in one.reads.items()}
    found |= {role: _zeros(*parameter.shape) for role, parameter in one.parameters.items()}
    if one.kind == LOOK_UP:  # `run_operation` passes it a row for each token
        found["weight"] = _zeros(batch.tokens.size, *found["weight"].shape[1:])
    return found | {role: batch.arrays[role] for role in one.batch}


def _zeros(*shape: int) -> np.ndarray:
    return np.broadcast_to(np.zeros((), np.float32), shape)
