"""Run a step's forward and backward pass one operation at a time. Weights are read when they are needed.

A reference needs to support only single stages (`RunsStages`). The model's graph (core/model/graph.py) lists the inputs
of each operation and the gradients that it computes. A *segment* is the part before the blocks, a block, or the head.
Memory holds the tensors that later segments read, the tensors inside one segment, and the gradients of its parameters.
Tensors inside a segment are recomputed in the backward pass (Chen et al. 2016, arXiv 1604.06174), unless all together
are small.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.core.backend import Arrays, Batch, NotSupported
from lockstep.core.capabilities import RunsStages
from lockstep.core.components.cast_plan import LOCKSTEP
from lockstep.core.components.precision import narrowed
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.families import graph_of
from lockstep.core.model.graph import OUTPUT, Operation
from lockstep.core.model.names import GRADIENT, in_fp8, probe_shapes
from lockstep.core.parity.evidence.observations import PARAMETER, PROBE_NLL
from lockstep.core.parity.reference.operations import LOOK_UP, aligned, run_operation, with_amaxes
from lockstep.core.train.fp8_amax import PREFIX, largest

# Up to this many bytes, all inner tensors are kept, and none is recomputed.
KEPT_BYTES = 256 << 20
# The head runs by chunks of positions. Their logits take at most these bytes, or as many as its weights.
HEAD_BYTES = 128 << 20
# Kinds of operations that compute each position separately, and sum a weight's gradient in the stream dtype.
BY_POSITION = frozenset({"norm", "centered_norm", "layer_norm", "sum", "logits", "cap", "nll"})

Named = Iterator[tuple[str, np.ndarray]]


@dataclass(frozen=True)
class Segment:
    """Consecutive operations that are computed together.

    leaves: its taps that later segments read.
    completes: the parameters that it is the first to read. Their gradients are complete after its backward pass.
    """

    operations: tuple[Operation, ...]
    leaves: frozenset[str]
    completes: tuple[str, ...]


def segments(operations: Sequence[Operation]) -> tuple[Segment, ...]:
    """Cut a chain of operations at the beginnings and ends of blocks."""
    groups = [tuple(group) for _, group in itertools.groupby(operations, key=lambda one: one.layer)]
    found: list[Segment] = []
    seen: set[str] = set()
    for number, group in enumerate(groups):
        later = {tap for one in itertools.chain(*groups[number + 1 :]) for tap in one.reads.values()}
        names = dict.fromkeys(name for one in group for name in one.params.values())
        leaves = frozenset(one.tap for one in group if one.tap in later)
        found.append(Segment(group, leaves, tuple(name for name in names if name not in seen)))
        seen |= names.keys()
    return tuple(found)


@dataclass
class _Part:
    """A micro-batch, or some of its positions, during the passes.

    taps: the tensors that are still needed.
    grads: tap → sum of the gradients from its readers so far.
    """

    batch: Batch
    taps: dict[str, np.ndarray] = field(default_factory=dict)
    grads: dict[str, np.ndarray] = field(default_factory=dict)

    def positions(self, which: slice) -> _Part:
        """Return the positions `which` of every sequence."""
        batch = Batch.of({name: array[:, which] for name, array in self.batch.arrays.items()})
        return _Part(batch, {name: tap[:, which] for name, tap in self.taps.items()})


class Chain:
    """The passes of one side of a reference at one state, as an iterator over the requested results.

    session: runs stages in the precision of this side.
    stream: dtype of this side's tensors.
    parameters: canonical name → weight. The weights of a segment are read at its beginning.
    fp8: linear layers that the run computes in FP8 are in FP8 here.
    casts: the run's plan of casts is in force. Tensors that it keeps in a narrow format have gradients in this format.
    scale: the loss scale, by which gradients are divided at the end.
    ranks: number of ranks over which gradients are summed. Each rank's sum is rounded to the run's
    `parallel.gradient_dtype`.
    amaxes: amaxes of FP8's delayed scaling, by layer.
    """

    def __init__(
        self,
        session: RunsStages,
        config: RunConfig,
        parameters: Arrays,
        stream: type[np.floating],
        *,
        fp8: bool = False,
        casts: bool = False,
        scale: float = 1.0,
        ranks: int = 1,
        amaxes: Arrays | None = None,
    ) -> None:
        self._session, self._config, self._parameters, self._stream = session, config, parameters, stream
        self._fp8, self._scale, self._ranks = fp8, scale, ranks
        self._amaxes = amaxes or {}
        graph = graph_of(config.model, config.attention, config.loss)
        self._segments = segments(graph.operations)
        self._plan = config.precision.plan if casts else LOCKSTEP
        # Taps whose gradient sum over readers is kept in the operand format, not in the stream's.
        self._narrow = {tap for tap, one in graph.by_tap.items() if self._plan.option(one.kind, OUTPUT)}

    def run(self, batch: Batch, names: Collection[str], weight: float | None = None) -> Named:
        """Yield each requested array once, those of the last segment first, in the stream dtype.

        names: any of
        - `nll/probe`: NLL of each token (B, S), before the gradients of parameters.
        - `gradient/PARAMETER`: summed over micro-batches.
        - `amax/LAYER`: (3,) float32, the largest magnitudes of the tensors that a linear layer with FP8's delayed
          scaling casts (core/train/fp8_amax.py), over micro-batches.
        - TAP and `grad/TAP`: for a batch of one micro-batch.
        weight: divisor of the loss Σ weight·nll; by default Σ weight.

        Raises NotSupported if the session does not run a stage or gives no gradient of it, and ValueError if taps are
        requested of several micro-batches.
        """
        micros = [_Part(one) for one in batch.cut(self._config.train)]
        asked = {name for name in names if not name.startswith((PARAMETER, PREFIX)) and name != PROBE_NLL}
        self._seen: dict[str, np.ndarray] = {}
        if asked and len(micros) > 1:
            raise ValueError(f"taps are those of one micro-batch, and the batch has {len(micros)}")
        back = any(name.startswith((GRADIENT, PARAMETER)) for name in names)
        ranks = self._ranks if len(micros) % self._ranks == 0 else 1
        sums: dict[str, list[np.ndarray]] = {}
        total = (float(batch.weights.sum(dtype=np.float64)) if weight is None else weight) / self._scale
        self._forward(micros)
        for segment in reversed(self._segments):
            weights = self._weights(segment)
            nll = []
            for number, micro in enumerate(micros):
                pieces = self._pieces(micro, asked) if segment is self._segments[-1] else [micro]
                for piece in pieces:
                    piece.taps |= self._taps(segment, piece, weights)
                    if segment is self._segments[-1]:
                        self._begin_backward(piece, total)
                        nll.append(piece.taps[segment.operations[-1].tap])
                    for name, value in self._back(segment, piece, weights, sums, number * ranks // len(micros), back):
                        if name in asked:
                            yield name, value
                _join(micro, pieces)
            del weights
            if segment is self._segments[-1] and PROBE_NLL in names:
                yield PROBE_NLL, self._nll_of(micros, nll)
            for name in segment.completes:
                if name in sums:
                    whole = self._over_ranks(sums.pop(name))
                    if PARAMETER + name in names:
                        yield PARAMETER + name, self._unscaled(whole)
            for one in segment.operations:
                if PREFIX + (one.module or "") in names:
                    yield f"{PREFIX}{one.module}", self._seen[one.module or ""]

    def _forward(self, micros: list[_Part]) -> None:
        """Run the forward pass of every segment but the last, whose forward pass precedes its backward pass."""
        rows, length = micros[0].batch.tokens.shape
        sizes = probe_shapes(self._config.model, rows, length).values()
        kept = np.dtype(self._stream).itemsize * len(micros) * sum(map(math.prod, sizes)) <= KEPT_BYTES
        for segment in self._segments[:-1]:
            weights = self._weights(segment)
            for micro in micros:
                taps = self._taps(segment, micro, weights)
                micro.taps |= taps if kept else {name: taps[name] for name in segment.leaves}

    def _weights(self, segment: Segment) -> dict[str, np.ndarray]:
        found = {}
        for one in segment.operations:
            for name in one.params.values():
                weight = self._parameters[name]
                found[name] = weight if one.kind == LOOK_UP else aligned(weight, self._stream)
        return found

    def _taps(self, segment: Segment, part: _Part, weights: Arrays) -> dict[str, np.ndarray]:
        """Compute the outputs of the segment's operations. Empty if all of them are still in memory."""
        if all(one.tap in part.taps for one in segment.operations):
            return {}
        found: dict[str, np.ndarray] = {}
        for one in segment.operations:
            found[one.tap] = self._run(one, _inputs(one, {**part.taps, **found}, weights, part.batch))["out"]
        return found

    def _back(
        self,
        segment: Segment,
        part: _Part,
        weights: Arrays,
        sums: dict[str, list[np.ndarray]],
        rank: int,
        with_gradients: bool,
    ) -> Named:
        """Yield each of the segment's taps and its gradient, the last one first. Each is then removed from memory."""
        for one in reversed(segment.operations):
            grad = part.grads.pop(one.tap, None)
            yield one.tap, part.taps[one.tap]
            if grad is not None and with_gradients:
                yield GRADIENT + one.tap, self._unscaled(grad)
                if one.module in self._amaxes:
                    self._see(one, part.taps[one.reads["x"]], weights[one.params["weight"]], grad)
                found = self._run(one, {**_inputs(one, part.taps, weights, part.batch), "grad": grad})
                if any(f"grad/{role}" not in found for role in (*one.reads, *one.params)):
                    raise NotSupported(f"the reference gives no gradients of {one.id}")
                for role, tap in one.reads.items():
                    sent = found[f"grad/{role}"]
                    part.grads[tap] = self._kept(tap, part.grads[tap] + sent if tap in part.grads else sent)
                for role, name in one.params.items():
                    by_rank, sent = sums.setdefault(name, []), found[f"grad/{role}"]
                    if rank < len(by_rank):
                        by_rank[rank] += sent
                    else:
                        # A writable copy, to which the next gradient can be added.
                        by_rank.append(np.array(sent))
                    del sent
                del found
            del part.taps[one.tap]

    def _see(self, one: Operation, *cast: np.ndarray) -> None:
        """Record the largest magnitudes of a layer's input, weight and output gradient, as they are cast to FP8."""
        found = np.array([largest(x) for x in cast], dtype=np.float32)
        if self._fp8:
            # Rounding does not change which magnitude is the largest. Weights are not rounded before the cast.
            found[[0, 2]] = narrowed(found[[0, 2]], self._config.precision.operand)
        layer = one.module or ""
        self._seen[layer] = np.maximum(self._seen[layer], found) if layer in self._seen else found

    def _kept(self, tap: str, grad: np.ndarray) -> np.ndarray:
        """Return a tap's gradient in the format in which the plan of casts keeps the tap."""
        return narrowed(grad, self._config.precision.operand) if tap in self._narrow else grad

    def _run(self, one: Operation, inputs: Arrays) -> Arrays:
        if not (self._fp8 and in_fp8(self._config, one)):
            return run_operation(self._session, one.id, one, inputs)
        return run_operation(self._session, f"{one.id}/fp8", one, with_amaxes(one, inputs, self._amaxes))

    def _pieces(self, micro: _Part, asked: Collection[str]) -> list[_Part]:
        """Cut the micro-batch by positions if the head's logits would be large and need not be whole."""
        rows, length = micro.batch.tokens.shape
        head = self._segments[-1].operations
        each = rows * np.dtype(self._stream).itemsize * max(math.prod(one.width) for one in head)
        parameters = {parameter.name: parameter.size for one in head for parameter in one.parameters.values()}
        allowed = max(HEAD_BYTES, np.dtype(self._stream).itemsize * sum(parameters.values()))
        at_once = max(1, allowed // each)
        # A head that rounds its weight's gradient must sum all of it first.
        whole = self._plan.rounds("logits") or not {one.kind for one in head} <= BY_POSITION
        if at_once >= length or asked or whole:
            return [micro]
        return [micro.positions(slice(start, start + at_once)) for start in range(0, length, at_once)]

    def _begin_backward(self, part: _Part, total: float) -> None:
        """Set the gradient of each token's NLL to its share of the weight."""
        last = self._segments[-1].operations[-1].tap
        part.grads[last] = (part.batch.weights.astype(np.float64) / total).astype(self._stream)

    def _nll_of(self, micros: list[_Part], pieces: list[np.ndarray]) -> np.ndarray:
        each = len(pieces) // len(micros)
        rows = [np.concatenate(pieces[i : i + each], axis=1) for i in range(0, len(pieces), each)]
        return np.concatenate(rows)

    def _unscaled(self, grad: np.ndarray) -> np.ndarray:
        return grad if self._scale == 1 else grad / grad.dtype.type(self._scale)

    def _over_ranks(self, by_rank: list[np.ndarray]) -> np.ndarray:
        """Add the ranks' sums as their collective does: each sum is rounded, and each addition is rounded."""
        if len(by_rank) == 1:
            return by_rank[0]
        total, *others = (narrowed(one, self._config.parallel.gradient_dtype) for one in by_rank)
        for one in others:
            total = narrowed(total + one, self._config.parallel.gradient_dtype)
        return total


def _inputs(one: Operation, taps: Arrays, weights: Arrays, batch: Batch) -> dict[str, np.ndarray]:
    inputs = {role: taps[tap] for role, tap in one.reads.items()}
    inputs |= {role: weights[name] for role, name in one.params.items()}
    return inputs | {role: batch.arrays[role] for role in one.batch}


def _join(micro: _Part, pieces: list[_Part]) -> None:
    """Concatenate the gradients of a micro-batch's pieces."""
    if pieces != [micro]:
        for tap in pieces[0].grads:
            micro.grads[tap] = np.concatenate([piece.grads[tap] for piece in pieces], axis=1)
