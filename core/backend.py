"""The seam: what a training backend must offer so that the loop can drive it and the parity engine can judge it.

A `Backend` opens a `Session` on a `RunConfig`. A `Session` holds weights and optimizer state, takes and gives them
as numpy arrays by canonical name, and runs optimizer steps. Everything in `core/parity` is written against these two
protocols, so any pair of sessions can be compared: torch against JAX, compiled against eager, your trainer against
ours.

Axes: B batch (sequences), S sequence, D hidden, H heads, K key-value heads, E head dimension, F feed-forward,
V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lockstep.core.config.schema import AttentionConfig, RunConfig, TrainConfig
from lockstep.core.errors import UserError
from lockstep.core.train.loss_scale import SKIPPED

Arrays = Mapping[str, np.ndarray]


class NotSupported(Exception):
    """A session cannot do what was asked. The engine lists the reason under `not_covered` and goes on."""


def in_words(error: Exception) -> str:
    """Return the first line of an error, with its kind before it where it is no refusal."""
    said = next(iter(str(error).splitlines()), "")
    return said if isinstance(error, (NotSupported, UserError)) else f"{type(error).__name__}: {said}"


@dataclass(frozen=True)
class Batch:
    """The data of one optimizer step, before it is cut into micro-batches.

    tokens:  int32 (B, S), the inputs.
    targets: int32 (B, S), the token that follows each input.
    weights: float32 (B, S), the loss weight of each target; the step's loss is Σ weight·nll / Σ weight.
    documents: int32 (B, S), which of its sequence's documents each input belongs to, counted from 0 and never falling
             along a sequence; None where the run does not ask.
    end_of_text: id of the token that ends a document, None where it is not known; no array, and in no digest.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    documents: np.ndarray | None = None
    end_of_text: int | None = None

    def __post_init__(self) -> None:
        if not (self.tokens.shape == self.targets.shape == self.weights.shape and self.tokens.ndim == 2):
            raise ValueError(
                f"tokens, targets and weights must share one shape (B, S): "
                f"{self.tokens.shape}, {self.targets.shape}, {self.weights.shape}"
            )
        if self.tokens.dtype != np.int32 or self.targets.dtype != np.int32 or self.weights.dtype != np.float32:
            raise ValueError(
                f"tokens and targets are int32, weights float32: "
                f"{self.tokens.dtype}, {self.targets.dtype}, {self.weights.dtype}"
            )
        if self.documents is not None:
            if self.documents.shape != self.tokens.shape or self.documents.dtype != np.int32:
                raise ValueError(
                    f"documents are int32 of the tokens' shape {self.tokens.shape}: "
                    f"{self.documents.dtype} {self.documents.shape}"
                )
            if (np.diff(self.documents, axis=1) < 0).any():
                raise ValueError("documents must not fall along a sequence: each is one stretch of tokens")
        if self.end_of_text is not None and type(self.end_of_text) is not int:
            raise ValueError(f"end_of_text is the id of a token or None: {self.end_of_text!r}")

    @staticmethod
    def of(arrays: Mapping[str, np.ndarray], end_of_text: int | None = None) -> Batch:
        """Build the batch of these arrays, by name as in `arrays`. Raises TypeError if one is unknown or missing."""
        given: dict[str, Any] = {**arrays}
        return Batch(**given, end_of_text=end_of_text)

    def require_tokens_below(self, vocab_size: int) -> None:
        """Raise ValueError unless all of its ids are in [0, vocab_size): kernels look them up."""
        for name, ids in (("tokens", self.tokens), ("targets", self.targets)):
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
                raise ValueError(f"{name} lie in [{ids.min()}, {ids.max()}], outside the vocabulary of {vocab_size}")
        if self.end_of_text is not None and not 0 <= self.end_of_text < vocab_size:
            raise ValueError(f"the end of text is {self.end_of_text}, outside the vocabulary of {vocab_size}")

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name, in the order of the digest; `documents` only where there are any."""
        found = {"tokens": self.tokens, "targets": self.targets, "weights": self.weights}
        return found if self.documents is None else {**found, "documents": self.documents}

    def rows(self, which: slice | np.ndarray) -> Batch:
        """Select some of its sequences, as numpy indexes the first axis. Raises IndexError beyond its end."""
        return Batch.of({name: array[which] for name, array in self.arrays.items()}, self.end_of_text)

    def documents_for(self, attention: AttentionConfig) -> np.ndarray | None:
        """Return its documents (B, S) int32, None if attention uses none. Raises ValueError if they are missing."""
        if not attention.needs_documents:
            return None
        if self.documents is None:
            raise ValueError("attention needs documents (document_mask or reset_positions), and the batch has none")
        return self.documents

    def micro_batches(self, size: int) -> list[Batch]:
        """Cut into consecutive micro-batches of `size` sequences. Raises ValueError if `size` does not divide B."""
        count, rest = divmod(len(self.tokens), size)
        if rest or not count:
            raise ValueError(f"a batch of {len(self.tokens)} sequences is not cut evenly by {size}")
        return [self.rows(slice(i, i + size)) for i in range(0, count * size, size)]

    def cut(self, train: TrainConfig) -> list[Batch]:
        """Cut into the run's micro-batches, which have fewer sequences where these are longer; a smaller batch is one.

        Raises ValueError as `micro_batches` does.
        """
        return self.micro_batches(min(train.micro_batch_of(self.tokens.shape[1]), len(self.tokens)))

    def digest(self) -> str:
        """Return the SHA-256, in hex, of all its arrays: sides that consumed the same data agree on it, bit for bit."""
        h = hashlib.sha256()
        for array in self.arrays.values():
            h.update(np.ascontiguousarray(array).tobytes())
        return h.hexdigest()


@dataclass(frozen=True)
class State:
    """The state of a session: all that a step depends on besides its batch.

    step:      optimizer steps done so far.
    params:    master weights by canonical name (float32; float64 under the fp64 policy).
    optimizer: moments by kind, then by canonical name, each of its parameter's shape; AdamW has `exp_avg` and
               `exp_avg_sq` (Kingma & Ba 2015: m, v), a matrix under Muon `momentum_buffer` alone
               (core/model/groups.py). 8-bit moments are what their codes and scales stand for, in float32.
    scalars:   under fp16, the loss scale and its counts (core/train/loss_scale.py); counts of steps left out
               (core/train/skipped_steps.py).
    """

    step: int
    params: Arrays
    optimizer: Mapping[str, Arrays]
    scalars: Mapping[str, float] = field(default_factory=dict)

    @property
    def updates(self) -> int:
        """Updates done so far: steps without those that were left out (core/train/skipped_steps.py)."""
        return self.step - int(self.scalars.get(SKIPPED, 0))


@dataclass(frozen=True)
class StepRecord:
    """The record of one optimizer step: a line of `records.jsonl`.

    step:             number of this step, from 1.
    loss:             Σ weight·nll / Σ weight over the step's batch, in nats, before the update.
    loss_weight:      Σ weight.
    lr:               the schedule's learning rate in this step, before a group's factor (core/model/groups.py).
    grad_norm:        global L2 norm of the accumulated gradients, before clipping.
    clip_coefficient: what the gradients were multiplied by, in (0, 1].
    digest:           `Batch.digest()` of what the session consumed.
    tokens:           targets in the batch.
    seconds, tokens_per_second, mfu: filled in by the loop; mfu by FLOP convention (core/model/budget.py), empty if
    the peak is unknown.
    metrics:          values that are due at an interval of their own (validation, norms by group, …), by name.
    host:             what depends on the machine: seconds since the last record by part (`seconds/compute`, …), and
                      bytes of memory when due (`memory/peak`, …).
    sample:           text written from a prompt, when due.
    left_out:         where the step was first not finite, in words, if it was left out (`train.on_not_finite`).
    norm_in_fp64:     the session declares that it accumulates `grad_norm` in FP64; a check holds it to that.
    adam_in_fp32:     the session declares that AdamW's kernel takes β, λ and the rate in FP32, as torch's fused one
                      does on CUDA; a check holds moments and update to that.
    """

    step: int
    loss: float
    loss_weight: float
    lr: float
    grad_norm: float
    clip_coefficient: float
    digest: str
    tokens: int
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    mfu: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    host: Mapping[str, float] = field(default_factory=dict)
    sample: str | None = None
    left_out: str | None = None
    norm_in_fp64: bool = False
    adam_in_fp32: bool = False


@dataclass(frozen=True)
class Gradients:
    """Loss and gradients of one batch at the session's weights, accumulated over micro-batches, before clipping.

    nll:    (B, S) per-token negative log-likelihood in nats, unweighted.
    loss:   the scalar that the session calls its loss.
    grads:  d loss / d parameter by canonical name, in the master weights' dtype and shape.
    program: of a single micro-batch, where the session shows them: its gradients as its forward-backward program gave
            them, before anything else touched them. Empty otherwise.
    """

    nll: np.ndarray
    loss: float
    grads: Arrays
    program: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class RankReport:
    """A data-parallel rank's report on its last step.

    record: its own record of the step. state: SHA-256 of each array of its state after the step, by
    `params/NAME` and `KIND/NAME`. taps: the same of what it computed at the taps of the micro-batch that every rank
    computes, as far as ranks must be equal there. processor: what it computes on; ranks on others round otherwise.
    gradients: SHA-256 of the step's gradients by parameter, as reduced and before clipping; empty where a rank has its
    rows alone.
    """

    record: StepRecord
    state: Mapping[str, str]
    taps: Mapping[str, str] = field(default_factory=dict)
    processor: str = ""
    gradients: Mapping[str, str] = field(default_factory=dict)


@runtime_checkable
class Session(Protocol):
    """Weights, optimizer and compiled step of one run. An operation that it lacks raises `NotSupported`."""

    def state(self) -> State:
        """Return a copy of the canonical state."""
        ...

    def load(self, state: State) -> None:
        """Take over a canonical state. Raises ValueError if names or shapes differ from the session's own."""
        ...

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        """Make one optimizer step on `batch`; `norms` adds norms by group to the record (a check needs none).

        A step whose loss or gradients are not finite changes nothing: raises lockstep.core.train.finite.NotFinite,
        or leaves it out and counts it (core/train/skipped_steps.py).
        """
        ...

    def gradients(self, batch: Batch) -> Gradients:
        """Compute loss and gradients of `batch` as `step` does; the state is left as it was."""
        ...

    def observe(self, batch: Batch, taps: Sequence[str]) -> Arrays:
        """Return named taps (core/model/names.py) and gradients (`grad/NAME`) of a micro-batch.

        Arrays are float32 (float64 under fp64), in the shapes of core/model/graph.py's widths: (B, S, …). Raises
        NotSupported for a name that the session cannot show.
        """
        ...

    def run_stage(self, stage: str, inputs: Arrays) -> Arrays:
        """Execute one stage on the given inputs; core/parity/reference/stages.py lists its inputs and outputs."""
        ...

    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        """Return per-token `nll` (B, S) in nats and `top1` bool (B, S), whether the likeliest token is the target.

        `policy` names another precision policy than the run's. The state is left as it was.
        """
        ...

    def next_token_logits(self, tokens: np.ndarray) -> np.ndarray:
        """Return logits (V,) of the token that follows `tokens`, int32 (n,), n at most the run's longest sequence."""
        ...

    def close(self) -> None:
        """Release what the session holds."""
        ...


class Writing(Protocol):
    """A state on its way into a folder.

    step, scalars: of that state (`State`). format: `safetensors`, or that of a framework, which its session reads.
    """

    step: int
    scalars: Mapping[str, float]
    format: str

    def not_finite(self) -> Sequence[str]:
        """Name arrays with a number that is not finite. Called before `wait`, which is left out if there are any."""
        ...

    def wait(self) -> None:
        """Wait until every file is written. Raises OSError if the disk refuses."""
        ...


class Backend(Protocol):
    """A factory of sessions. `--candidate FILE.py:NAME` names a callable without arguments that returns one."""

    name: str

    def open(self, config: RunConfig) -> Session:
        """Open a session at the initial weights of `config` (core/model/init.py), step 0.

        Raises UserError for settings that the backend cannot run on this machine.
        """
        ...

    def describe(self, config: RunConfig) -> Mapping[str, Any]:
        """Return versions, device and settings in force, for `run.json` and the table at start."""
        ...
