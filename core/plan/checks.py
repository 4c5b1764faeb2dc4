"""The cost of a run's checks, from its configuration: bytes on the disk and in memory, and seconds on a CPU.

A check gathers *evidence* (core/parity/evidence/gather.py) into a folder, and judges it a tensor, and the reference's
passes a segment of the model, at a time. Its memory and disk are bounded by `parity.disk_gb` and `parity.memory_gb`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from lockstep.core.components.precision import FORMATS
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.model.budget import flops_per_token
from lockstep.core.model.families import graph_of
from lockstep.core.model.groups import moment_names
from lockstep.core.model.names import probe_shapes, tap_names
from lockstep.core.model.windows import device_bytes
from lockstep.core.parity.evidence.cached_logits import LOGITS_MADE
from lockstep.core.parity.evidence.evaluation import policies_of
from lockstep.core.parity.evidence.sketch import K
from lockstep.core.run.ranks import is_sharded

GB = 1e9
# A part of the evidence.
TAPS = "taps, their and weights' gradients"
SCORES = "scores of evaluation, logits of sampling"
VALIDATION = "validation"
# Sequences with weight in the micro-batch whose stages are judged, unless all are examined.
LOOKED_AT = 2
# Bytes of an observation: a sketch in FP32, and its statistics.
OBSERVATION_BYTES = 4 * K + 48
# Bytes of queued tensors while training continues; gathering waits for more room.
BEHIND_BYTES = 512 << 20
# Host memory of a process in which JAX has compiled the programs of a check; measured (docs/results/scale.md).
PROCESS_BYTES = 1.0e9
# The reference computes in FP32 and, for the truth, in FP64.
TWIN, TRUTH = 4, 8
# A check's seconds on two cores of a server's CPU, fitted to docs/results/scale.jsonl: to open the reference and to
# compile, a GB of evidence, and 10¹² FLOPs of the reference.
OPENING_SECONDS, SECONDS_A_GB, SECONDS_A_TERAFLOP = 19.0, 6.0, 30.0


@dataclass(frozen=True)
class CheckCost:
    """Upper bounds of what one check takes.

    evidence: bytes on the disk by what they are. transient: bytes on the disk that are gone when evidence is gathered.
    gathering, judging: bytes of host memory beside the candidate's own. teraflops: 10¹² FLOPs of the reference.
    device: bytes of the candidate's device for what its program shows, beside what a step takes. least: the same by the
    smallest windows (core/model/windows.py). reference: bytes of that device for a reference which computes there.
    """

    evidence: dict[str, float]
    transient: float
    gathering: float
    judging: float
    teraflops: float
    device: float
    least: float
    reference: float

    @property
    def seconds(self) -> float:
        """Time to judge on two cores of a server's CPU."""
        return OPENING_SECONDS + SECONDS_A_GB * self.kept / GB + SECONDS_A_TERAFLOP * self.teraflops

    @property
    def kept(self) -> float:
        """Bytes of the evidence."""
        return sum(self.evidence.values())

    @property
    def disk(self) -> float:
        """The most bytes on the disk at a time."""
        return self.kept + self.transient


def cost_of_check(config: RunConfig, *, thorough: bool) -> CheckCost:
    """Estimate the cost of one check.

    thorough: as `lockstep parity` makes them; otherwise one during training (`parity.every`), which leaves the state
    alone.
    """
    number = FORMATS[config.precision.stream].bytes
    parameters = graph_of(config.model).parameters
    weights = number * sum(one.size for one in parameters.values())
    moments = number * sum(parameters[name].size for names in moment_names(config).values() for name in names)
    rows = rows_looked_at(config)
    tapped = taps_bytes(config, rows)
    micros = config.train.accumulation * config.train.ranks
    accumulates = thorough and config.train.accumulation > 1
    reduced = (2 * config.train.ranks + 1) * weights if thorough and config.train.ranks > 1 else 0
    evidence = {
        "state before and after": 2 * (weights + moments),
        "gradients of step and micro-batch": 2 * weights,
        TAPS: tapped + weights,
        "gradients apart and together": (2 * weights if accumulates else 0) + reduced,
        SCORES: _scored(config, rows, thorough),
        VALIDATION: 0 if thorough or not config.eval.every else _validated(config),
        "sketches of each micro-batch's gradients": OBSERVATION_BYTES * len(parameters) * micros if micros > 1 else 0,
    }
    largest = number * max(one.size for one in parameters.values())
    length = config.train.sequence_length
    own = (config.train.batch_size if thorough else config.train.micro_batch_size) * length
    # Validation is one forward pass; both passes, with the second forward pass, are worth four.
    validated = 0 if thorough else rows * length / 4
    computing = _segments(config) + _crossing(config, own)
    on_device = config.parity.reference_device != "cpu"
    return CheckCost(
        evidence={what: float(size) for what, size in evidence.items() if size},
        # The checkpoint of the round trip, in FP32 whatever the moments are kept in.
        transient=float(weights + moments) if thorough else 0.0,
        gathering=float(min(BEHIND_BYTES, sum(evidence.values())) + largest),
        # On a GPU, one tensor of the evidence at a time is in host memory.
        judging=PROCESS_BYTES + (TRUTH * largest / number if on_device else computing),
        teraflops=_flops(config, own + rows * length + validated, rows * length) / 1e12,
        device=_shown(config, rows, taps_budget(config)),
        least=_shown(config, rows, 1.0),
        reference=computing if on_device else 0.0,
    )


def taps_bytes(config: RunConfig, rows: int) -> float:
    """Return the bytes of all taps, and of the gradients at taps and edges, of so many sequences."""
    return FORMATS[config.precision.stream].bytes * _tapped(config, rows)


def taps_budget(config: RunConfig) -> float:
    """Return bytes of the candidate's device that taps may take, by `parity.device_gb`; 0 without one.

    A reference on that device has a half of it: `reference_share` is what taps leave.
    """
    budget = config.parity.device_gb * GB
    return budget if config.parity.reference_device == "cpu" else budget / 2


def reference_share(config: RunConfig) -> float:
    """Return bytes of its devices that a reference there may take: what is left of `parity.device_gb` beside taps."""
    rows = rows_looked_at(config)
    return config.parity.device_gb * GB - _shown(config, rows, taps_budget(config))


def rows_looked_at(config: RunConfig) -> int:
    """Return how many sequences of a micro-batch hold the weight of the one that is examined stage by stage."""
    micro = config.train.micro_batch_size
    return micro if config.precision.couples_sequences else min(LOOKED_AT, micro)


def checks_waiting(config: RunConfig) -> int:
    """Return how many checks may wait for the reference: `parity.queue`, or fewer if the disk's budget ends there."""
    if not config.parity.disk_gb:
        return config.parity.queue
    each = cost_of_check(config, thorough=False).disk
    return min(config.parity.queue, int(config.parity.disk_gb * GB / each))


def over_budget(config: RunConfig, *, thorough: bool) -> list[str]:
    """List, one line each, the budgets that a single check exceeds, and what would fit; nothing if it fits."""
    cost, found = cost_of_check(config, thorough=thorough), []
    host, on_device = max(cost.gathering, cost.judging), cost.device + cost.reference
    # Half of a larger budget goes to taps, whose windows become as large as it allows.
    halves = 2 * max(cost.least, cost.reference) if cost.reference else on_device
    for setting, needed, most, what in (
        ("disk_gb", cost.disk, cost.disk, "on the disk"),
        ("memory_gb", host, host, "of host memory"),
        ("device_gb", on_device, halves, "of the device"),
    ):
        budget = getattr(config.parity, setting)
        if budget and needed > budget * GB:
            # Rounded up, so that a small amount is not shown as zero.
            takes, enough = (math.ceil(amount / GB * 10) / 10 for amount in (needed, most))
            found.append(
                f"a check of {config.name} takes up to {takes:,.1f} GB {what}, "
                f"and parity.{setting} is {budget:g}: {enough:g} would do"
            )
    return found


def require_budget(config: RunConfig, *, thorough: bool) -> None:
    """Raise UserError if a single check does not keep the run's budgets."""
    if found := over_budget(config, thorough=thorough):
        raise UserError("; ".join(found))


def _shown(config: RunConfig, rows: int, budget: float) -> float:
    """Return bytes that taps take on the device: eager shows one at a time, a compiled program a window.

    Without a budget it shows every sequence of the micro-batch, and all blocks at once.
    """
    if config.compile.enabled and not is_sharded(config):
        return device_bytes(config, rows if budget else config.train.micro_batch_size, budget)
    number = FORMATS[config.precision.stream].bytes
    shapes = probe_shapes(config.model, config.train.micro_batch_size, config.train.sequence_length)
    weights = (one.size for one in graph_of(config.model).parameters.values())
    return float(number * (max(map(math.prod, shapes.values())) + max(weights)))


def _tapped(config: RunConfig, rows: int) -> int:
    """Return numbers of all taps, and of the gradients at taps and edges."""
    shapes = probe_shapes(config.model, rows, config.train.sequence_length)
    taps = set(tap_names(config.model))
    return sum(math.prod(shape) * (2 if name in taps else 1) for name, shape in shapes.items())


def _scored(config: RunConfig, rows: int, thorough: bool) -> int:
    """Return bytes of targets (int32); by policy, of NLL and of whether the target is likeliest (int32); of logits.

    The reference makes no pass for them: it has the logits of the looked-at sequences for the taps.
    """
    number = FORMATS[config.precision.stream].bytes
    scores = sum(4 + (FORMATS[policy].bytes if policy else number) for policy in policies_of(config, thorough))
    cached = LOGITS_MADE * (number * config.model.vocab_size + 4) + 8 * config.model.layers if thorough else 0
    return rows * config.train.sequence_length * (4 + scores) + cached


def _validated(config: RunConfig) -> int:
    """Return bytes of a held-out micro-batch, its NLL, an int32 for each target that is likeliest, and those of all."""
    tokens = config.train.micro_batch_size * config.train.sequence_length
    of_batch = 12 + (4 if config.attention.needs_documents else 0)
    return tokens * (of_batch + (1 + config.eval.batches) * (FORMATS[config.precision.stream].bytes + 4))


def _segments(config: RunConfig) -> float:
    """Return bytes of the dearest segment: its weights, the sums of their gradients, and one operation's new gradients.

    The sum of a matrix that an earlier segment reads too (a tied head's) waits for that one.
    """
    operations = graph_of(config.model, config.attention, config.loss).operations
    sizes = [
        {parameter.name: parameter.size for one in group for parameter in one.parameters.values()}
        for _, group in itertools.groupby(operations, key=lambda one: one.layer)
    ]
    first = {name: number for number in reversed(range(len(sizes))) for name in sizes[number]}
    waiting: dict[str, int] = {}
    most = 0
    for number in reversed(range(len(sizes))):
        own = sizes[number]
        waiting |= own
        most = max(most, sum(own.values()) + sum(waiting.values()) + max(own.values(), default=0))
        waiting = {name: size for name, size in waiting.items() if first[name] < number}
    return float((TWIN + TRUTH) * most)


def _crossing(config: RunConfig, tokens: int) -> float:
    """Return bytes of what crosses from block to block in both precisions, and of the logits of one chunk of tokens."""
    model = config.model
    logits = min(tokens * model.vocab_size, max(model.vocab_size * model.hidden, (128 << 20) // TRUTH))
    return float((TWIN + TRUTH) * (tokens * model.hidden * (model.layers + 2) + 2 * logits))


def _flops(config: RunConfig, tokens: float, looked_at: int) -> float:
    """Return FLOPs of twin and truth: the pass with its second forward pass, and every stage by itself.

    flops_per_token counts a forward and a backward pass, three forward passes' worth.
    """
    of_a_token = flops_per_token(config.model, config.train.sequence_length)["full"]
    return 2 * of_a_token * (tokens * 4 / 3 + looked_at)
