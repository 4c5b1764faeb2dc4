"""Compare tensors and build findings: exactly, by distances of full arrays, or by distances of their sketches."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import EllipsisType
from typing import Any, Protocol

import numpy as np

from lockstep.core.backend import Arrays, Backend, NotSupported, Session
from lockstep.core.capabilities import ServesThreads, ask
from lockstep.core.config.schema import CompileConfig, PrecisionConfig, RecomputeConfig, RunConfig
from lockstep.core.model.names import layer_of
from lockstep.core.parity.evidence.observations import Observation, sketch_distances
from lockstep.core.parity.evidence.sketch import K, sketch
from lockstep.core.parity.judge.over_steps import OverSteps
from lockstep.core.parity.measures import calibrated_bounds
from lockstep.core.parity.measures.accumulators import NO_SUMS, OfSums
from lockstep.core.parity.measures.decode import Direction, direction, explain
from lockstep.core.parity.measures.distances import Distances, Sums
from lockstep.core.parity.measures.peaks import Norms, table_of
from lockstep.core.parity.measures.scatter import scatter
from lockstep.core.parity.measures.stretches import Space, stretches, wide
from lockstep.core.parity.measures.verdict import Finding, Measure, Scope
from lockstep.core.parity.reference.stages import chain
from lockstep.core.run.ranks import ONE, Ranks

# Largest difference in ulp between two orders of a few FP32 additions.
FEW_ULPS = 16.0


@dataclass(frozen=True)
class Reference:
    """The two sessions of a reference: the twin at the candidate's declared precision, the truth in FP64.

    bound: function (recipe, kind, distances, count of numbers) → measures with their bounds. Calibration replaces it by
    a recorder.
    open_plain: opens the reference with the stream dtype throughout, so that nothing is rounded to a narrower one. None
    if the twin already computes so.
    over_steps: sums of local comparisons over the checks of a run; None if they have no bounds.
    known: numbers of the judged step, for the decoder (core/parity/measures/decode.py).
    not_asked: checks of the reference itself that were not possible (core/parity/reference/self_check.py).
    ranks: ranks that receive the verdicts. Rank 0 has the sessions; on the others twin and truth are `NoSession`.
    threads: two threads may call the sessions at once.
    """

    config: RunConfig
    twin: Session
    truth: Session
    bound: Callable[[str, str, Distances, int], tuple[Measure, ...]] = calibrated_bounds.measures
    open_plain: Callable[[], Session] | None = None
    over_steps: OverSteps | None = None
    known: Mapping[str, float] = field(default_factory=dict)
    not_asked: tuple[str, ...] = ()
    ranks: Ranks = ONE
    threads: bool = False

    @classmethod
    def open(cls, backend: Backend, config: RunConfig) -> Reference:
        """Open both sessions of `backend`, uncompiled and on one rank. Under fp64 the truth is also the twin.

        If ranks sum their gradients in a narrow format, the twin rounds as they do. With several ranks
        (`JudgeOfRanks`), rank 0 opens the sessions.
        """
        if not isinstance(backend, JudgeOfRanks):
            return cls._opened(backend, config)
        hollow: Any = NoSession()
        opened = [cls(config, hollow, hollow)]

        def open_both() -> None:
            opened[0] = cls._opened(backend, config)

        backend.ranks.of_first(open_both)
        return replace(opened[0], ranks=backend.ranks)

    @classmethod
    def _opened(cls, backend: Backend, config: RunConfig) -> Reference:
        plain, twin = _plain(config), _twin(backend, config)
        # With a memory budget, tasks run one at a time.
        threads = _serves_threads(backend) and not config.parity.memory_gb
        if config.precision.exact:
            return cls(config, twin, twin, threads=threads)
        truth = backend.open(plain.model_copy(update={"precision": PrecisionConfig(policy="fp64")}))
        if config.precision.chosen.in_fp32:
            return cls(config, twin, truth, threads=threads)
        in_stream = plain.model_copy(update={"precision": PrecisionConfig(policy="fp32")})
        return cls(config, twin, truth, open_plain=cache(lambda: backend.open(in_stream)), threads=threads)

    def with_twin_of(self, backend: Backend, config: RunConfig) -> Reference:
        """Open the twin of a configuration with other casts and keep the truth. The caller closes the new twin."""
        return replace(self, config=config, twin=_twin(backend, config))

    def over_a_run(self) -> Reference:
        """Return the same sessions with new sums over steps, for the checks of one run in their order."""
        return self if self.truth is self.twin else replace(self, over_steps=OverSteps(self.recipe))

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Twin and truth, or the one session that is both."""
        return (self.twin,) if self.truth is self.twin else (self.twin, self.truth)

    @property
    def recipe(self) -> str:
        """The recipe whose clean runs set the bounds."""
        return calibrated_bounds.recipe_of(self.config)

    def measures(self, kind: str, d: Distances, size: int, sums: OfSums = NO_SUMS) -> tuple[Measure, ...]:
        """Return the measures of a comparison of `size` numbers, with the bounds of this recipe and plan of casts.

        sums: error of the matrix unit's sums, by which bounds are widened.
        """
        found = self.bound(self.recipe, calibrated_bounds.under_plan(self.config, kind), d, size)
        return sums.make_room(found, d)

    @property
    def stream(self) -> type[np.floating]:
        """The dtype of all tensors but matrix operands. Its ulp is the lower limit of every denominator."""
        return np.float64 if self.config.precision.exact else np.float32

    def close(self) -> None:
        """Close both sessions."""
        for session in self.sessions:
            session.close()


def _serves_threads(backend: Backend) -> bool:
    try:
        return ask(backend, ServesThreads).threads
    except NotSupported:
        return False


class NoSession:
    """An empty session in place of the reference's, on ranks that only receive its verdict."""

    def close(self) -> None:
        """Do nothing."""


class JudgeOfRanks:
    """A reference that judges on rank 0 for all ranks. `backend` is None on the other ranks, which may lack it."""

    def __init__(self, backend: Backend | None, ranks: Ranks) -> None:
        self.ranks, self._backend = ranks, backend
        self.name = backend.name if backend else ""

    def open(self, config: RunConfig) -> Session:
        """Open the backend's session. Called on rank 0 only."""
        assert self._backend is not None
        return self._backend.open(config)

    def describe(self, config: RunConfig) -> Mapping[str, Any]:
        """Describe the backend. Called on rank 0 only."""
        assert self._backend is not None
        return self._backend.describe(config)


def _twin(backend: Backend, config: RunConfig) -> Session:
    plain = _plain(config)
    rounded = config.parallel.gradient_dtype != "fp32"
    return backend.open(plain.model_copy(update={"train": config.train}) if rounded else plain)


def _plain(config: RunConfig) -> RunConfig:
    """Return the configuration without ranks, compilation and recomputation.

    These settings do not change the result in exact arithmetic.
    """
    changed = {"compile": CompileConfig(enabled=False), "recompute": RecomputeConfig()}
    return config.model_copy(update=changed | {"train": config.train.model_copy(update={"ranks": 1})})


def finding(
    stage: str,
    tap: str,
    scope: Scope,
    measures: tuple[Measure, ...],
    size: int,
    unequal: float | None = None,
    note: str = "",
    phase: str | None = None,
) -> Finding:
    """Build a finding. Its layer is the tap's, and its phase is the stage's first one unless `phase` is given."""
    return Finding(stage, tap, phase or chain().phases[stage], layer_of(tap), scope, measures, size, unequal, note)


def exact(
    stage: str, tap: str, mismatches: int, size: int, basis: str, note: str = "", phase: str | None = None
) -> Finding:
    """Build the finding of a comparison in which nothing may differ. mismatches: how many of `size` items differ."""
    found = Measure("mismatches", float(mismatches), None, 0.0, basis)
    return finding(stage, tap, "local", (found,), size, note=note, phase=phase)


class Comparison:
    """A comparison of whole tensors, whose parts are added in order.

    stage, kind, tap, scope, phase, note: those of the finding.
    shape: shape of the whole tensor.
    layer: layer of the finding; by default the tap's.
    sums: error of the matrix unit's sums, if the tensor is a product.
    """

    def __init__(
        self,
        reference: Reference,
        stage: str,
        kind: str,
        tap: str,
        scope: Scope,
        shape: tuple[int, ...],
        phase: str | None = None,
        note: str = "",
        layer: int | EllipsisType | None = ...,
        sums: OfSums = NO_SUMS,
    ) -> None:
        self._reference, self._kind, self._shape, self._of_sums = reference, kind, shape, sums
        self._size = calibrated_bounds.independent(shape)
        self._empty = finding(stage, tap, scope, (), math.prod(shape), None, note, phase)
        if layer is not ...:  # a gradient belongs to the stage that computes it, not to the stage that wrote the tap
            self._empty = replace(self._empty, layer=layer)
        self._sums = Sums(shape)
        over_a_run = reference.over_steps is not None and scope == "local"
        self._sketches = [np.zeros(K), np.zeros(K), np.zeros(K)] if over_a_run else None

    def add(self, c: np.ndarray, w: np.ndarray, t: np.ndarray) -> None:
        """Add the next elements of candidate, twin and truth, in row-major order. The arrays have one shape."""
        c, w, t = c.reshape(-1), w.reshape(-1), t.reshape(-1)
        for where in stretches(c.size):
            at, sides = self._sums.size, (c[where], w[where], t[where])
            self._sums.add(*sides)
            if self._sketches is not None:
                candidate, twin, truth = sides
                apart, honest, of_truth = self._sketches
                honest += sketch(twin - truth, at)
                of_truth += sketch(truth, at)
                if not np.array_equal(candidate, twin):  # otherwise the sketch is zero
                    apart += sketch(candidate - twin, at)

    def finding(self, noise: Callable[[], Norms] | None = None) -> Finding:
        """Compare the added elements with the bounds.

        noise: returns the norms of the error that arithmetic in the stream dtype alone causes in this result. `noise`
        is called before an alarm. If a result is the remainder of a cancellation, the error of one twin does not
        predict that of another. The number of errors that dominate the twin's norm is then computed too. A fault
        affects neither.
        """
        reference, size, stream = self._reference, self._size, self._reference.stream
        d = self._sums.distances(stream)
        found = replace(self._empty, measures=reference.measures(self._kind, d, size, self._of_sums), unequal=d.unequal)
        at_first = found.ok
        if not found.ok and noise is not None:
            d = self._sums.distances(stream, noise())
            size = min(size, self._sums.effective())
            found = replace(found, measures=reference.measures(self._kind, d, size, self._of_sums))
        if not found.ok:
            words = explain(Direction.of(*self._sums.along_the_truth()), reference.known, d.twin_relative_error)
            return replace(found, note="; ".join([n for n in (found.note, *words[:2]) if n]))
        if at_first and reference.over_steps is not None and self._sketches is not None:
            apart, honest, truth = self._sketches
            systematic = self._of_sums.in_units(d)
            sketches = apart, honest, truth
            reference.over_steps.add(found, self._kind, size, sketches, stream, d.gain_difference, systematic)
        return found


class NoiseOf(Protocol):
    """A function that returns norms of the rounding noise in a result."""

    def __call__(self, *, tokens: np.ndarray | None = None) -> Norms:
        """Return norms for the whole result, or for some tokens, which are numbered over its first two axes."""


def compare(
    reference: Reference,
    stage: str,
    kind: str,
    tap: str,
    scope: Scope,
    c: np.ndarray,
    w: np.ndarray,
    t: np.ndarray,
    phase: str | None = None,
    note: str = "",
    noise: NoiseOf | None = None,
    layer: int | EllipsisType | None = ...,
    sums: OfSums = NO_SUMS,
) -> Finding:
    """Compare candidate, twin and truth, full arrays of one shape. Arguments as in `Comparison`.

    noise: as in `Comparison.finding`. Before an alarm the comparison is repeated with each distinct token once. A text
    of one repeated letter gives all its tokens the same numbers, so one element at a tie is a single error, however
    often the letter occurs.
    """
    if c.shape != t.shape:
        return exact(stage, tap, 1, t.size, "shapes must be equal", f"candidate {c.shape}, reference {t.shape}", phase)

    def compared(sides: Sequence[np.ndarray], of_noise: Callable[[], Norms] | None) -> Finding:
        found = Comparison(reference, stage, kind, tap, scope, sides[-1].shape, phase, note, layer, sums)
        found.add(*sides)
        return found.finding(of_noise)

    found = compared((c, w, t), noise)
    if found.ok or (first := tokens_once(c, w)) is None:
        return found
    of_first = partial(noise, tokens=first) if noise is not None else None
    held = compared([_of_tokens(x, first)[None] for x in (c, w, t)], of_first)
    return held if held.ok else found


def tokens_once(c: np.ndarray, w: np.ndarray) -> np.ndarray | None:
    """Return the numbers of the tokens that do not repeat an earlier one; None if none repeats.

    c, w: arrays of one shape. Their first two axes are sequences and positions, and tokens are numbered over both.
    A token repeats another if its row has the same bits in c, and in w. An array of two axes has no tokens: None.
    """
    if c.ndim < 3:
        return None
    first: dict[bytes, int] = {}
    tables = [np.ascontiguousarray(x.reshape(table_of(x.shape))) for x in (c, w)]
    for token, rows in enumerate(zip(*tables, strict=True)):
        digest = hashlib.blake2b(digest_size=16)
        for row in rows:
            digest.update(row)
        first.setdefault(digest.digest(), token)
    return np.fromiter(first.values(), np.int64) if len(first) < len(tables[0]) else None


def _of_tokens(x: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return x.reshape(-1, *x.shape[2:])[tokens]


def compare_observed(
    reference: Reference,
    stage: str,
    kind: str,
    tap: str,
    c: Observation,
    w: Observation,
    t: Observation,
    phase: str | None = None,
    most: int = K,
) -> Finding:
    """Compare one tensor end to end, from sketches of 1,021 numbers.

    most: upper limit on the number of independent errors in the tensor.
    """
    if c.size != t.size:
        return exact(stage, tap, 1, t.size, "sizes must be equal", f"candidate {c.size}, reference {t.size}", phase)
    d = sketch_distances(c, w, t, reference.stream)
    measures = reference.measures(kind, d, min(t.independent, most, K))
    found = finding(stage, tap, "end_to_end", measures, t.size, None, phase=phase)
    if found.ok:
        return found
    words = explain(direction(c.sketch, t.sketch, sketched=True), reference.known, d.twin_relative_error)
    return replace(found, note="; ".join(words[:2]))


def compare_cancelled(
    reference: Reference,
    stage: str,
    name: str,
    scope: Scope,
    errors: tuple[float, float],
    scale: float,
    size: int,
    layer: int | EllipsisType | None = ...,
) -> Finding:
    """Compare a bias's gradient that is 0 in exact arithmetic (`cancelled` of core/model/names.py).

    Its values are rounding errors, which differ between any two implementations, so only their size is bounded.
    errors: norms of the candidate's and of the twin's error against the truth.
    scale: norm of the terms that cancel. An error below FP64_LIMIT or FP32_LIMIT times it is never reported.
    size: count of numbers in the gradient.
    """
    limit = calibrated_bounds.FP64_LIMIT if reference.config.precision.exact else calibrated_bounds.FP32_LIMIT
    candidate, twin = (max(error, limit * scale) for error in errors)
    excess = candidate / twin if twin else math.inf
    high = calibrated_bounds.LEAST_OF_SUMS ** scatter(size)
    basis = "0 in exact arithmetic, as softmax does not see it: its size alone is held"
    measure = Measure("excess", excess if math.isfinite(excess) else math.inf, None, high, basis)
    found = finding(stage, name, scope, (measure,), size, phase="backward")
    return found if layer is ... else replace(found, layer=layer)


def same_but_for_rounding(
    reference: Reference,
    stage: str,
    tap: str,
    ours: np.ndarray,
    theirs: np.ndarray,
    phase: str | None = None,
    cancelled: float = 1.0,
) -> Finding:
    """Compare two arrays of the candidate, of one shape, that may differ only by the order of a few additions.

    cancelled: ratio of the sum's terms to the sum. Roundings of the terms weigh more by this factor.
    """
    if ours.shape != theirs.shape:
        return exact(stage, tap, 1, theirs.size, "shapes must be equal", f"{ours.shape}, {theirs.shape}", phase)
    apart = relative_difference(ours, theirs) / float(np.finfo(reference.stream).eps) / max(cancelled, 1.0)
    basis = f"one number twice, at most a few additions in another order: {FEW_ULPS:g} ulp of the norm"
    unequal = np.count_nonzero(ours != theirs) / ours.size if ours.size else 0.0
    return finding(
        stage, tap, "local", (Measure("ulp", apart, None, FEW_ULPS, basis),), theirs.size, unequal, phase=phase
    )


def relative_difference(a: np.ndarray, b: np.ndarray) -> float:
    """Compute ‖a − b‖ / ‖b‖ in FP64, for arrays of one size. Infinite if a number is not finite, or only b is zero."""
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    apart, scale, space = 0.0, 0.0, Space(2)
    for where in stretches(flat_b.size):
        of_a, of_b = space.of(where.stop - where.start)
        b64 = wide(flat_b[where], of_b)
        scale += float(b64 @ b64)
        off = np.subtract(wide(flat_a[where], of_a), b64, out=of_a)
        apart += float(off @ off)
    if not (np.isfinite(apart) and np.isfinite(scale)):
        return float("inf")
    return math.sqrt(apart / scale) if scale else (0.0 if apart == 0 else float("inf"))


class Noise:
    """Rounding noise of arithmetic in the stream dtype, by output.

    The noise is the larger of two responses: that of the twin to inputs changed by one rounding of the stream dtype,
    and the error of the reference without roundings to a narrower format. In a well-conditioned stage both are far
    below the twin's error and have no effect.
    spare: tokens without noise, as in `zeroed`.
    """

    def __init__(
        self, reference: Reference, stage: str, inputs: Arrays, w: Arrays, t: Arrays, spare: np.ndarray | None = None
    ) -> None:
        self._reference, self._stage, self._inputs, self._w, self._t = reference, stage, inputs, w, t
        self._spare = spare
        self._responses: list[tuple[Arrays, Arrays]] | None = None

    def of(self, name: str, terms: int = 1, tokens: np.ndarray | None = None) -> Norms:
        """Return norms of the noise in one output, or in some of its tokens.

        terms: how many numbers each element sums in sequence.
        tokens: numbers of the tokens over the first two axes; None for all.
        """
        if self._responses is None:
            moved = self._reference.twin.run_stage(self._stage, perturbed(self._inputs, self._reference.stream))
            self._responses = [(moved, self._w)]
            if self._reference.open_plain is not None:
                plain = self._reference.open_plain().run_stage(self._stage.partition("/")[0], self._inputs)
                self._responses.append((plain, self._t))
        found = Norms()
        for a, b in self._responses:
            apart = zeroed(a[name].astype(np.float64) - b[name], self._spare)
            of_these = apart if tokens is None else _of_tokens(apart, tokens)[None]
            found = found.at_least(Norms.of(of_these), calibrated_bounds.noise_margin(terms))
        return found


def zeroed(values: np.ndarray, spare: np.ndarray | None) -> np.ndarray:
    """Return values of tokens, (B, S, …), with zeros at the tokens `spare`, bool (B, S). Other arrays are unchanged.

    A comparison of results that are all zeroed leaves these tokens out.
    """
    if spare is None or values.shape[:2] != spare.shape:
        return values
    return np.where(spare.reshape(spare.shape + (1,) * (values.ndim - 2)), values.dtype.type(0), values)


def perturbed(inputs: Arrays, stream: type[np.floating]) -> dict[str, np.ndarray]:
    """Return the inputs with each floating-point number changed at random by up to an ulp of the stream dtype.

    Shapes and dtypes do not change, nor do integers.
    """
    rng = np.random.Generator(np.random.Philox(key=0))
    ulp = float(np.finfo(stream).eps)

    def moved(x: np.ndarray) -> np.ndarray:
        if not np.issubdtype(x.dtype, np.floating):
            return x
        return (x.astype(np.float64) * (1.0 + rng.uniform(-ulp, ulp, x.shape))).astype(x.dtype)

    return {name: moved(np.asarray(x)) for name, x in inputs.items()}
