"""Optional capabilities of sessions and backends, beside core/backend.py, and the one way to ask for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from lockstep.core.backend import Arrays, Batch, Gradients, NotSupported, RankReport, State, StepRecord, Writing
from lockstep.core.config.schema import RunConfig
from lockstep.core.run.ranks import ONE, Ranks

Capability = TypeVar("Capability")
Method = TypeVar("Method", bound=Callable[..., Any])
# Takes one tensor: its kind, its name, and the array, which is the taker's own.
Take = Callable[[str, str, np.ndarray], None]


def ask(of: object, capability: type[Capability]) -> Capability:
    """Return a session or backend as one that has a capability, which is a protocol of this file.

    A method that is missing and one that cannot do what is asked are one outcome. Raises NotSupported, with the names
    of what is missing.
    """
    if isinstance(of, capability):
        return of
    names = [name for name in vars(capability) if not name.startswith("_")]
    lacking = [name for name in names if getattr(of, name, None) is None]
    raise NotSupported(f"the session has no {', '.join(lacking or names)}")


def collects(method: Method) -> Method:
    """Mark a method that only collects what the session's streaming method of the same meaning hands over."""
    method.collects = method  # type: ignore[attr-defined]
    return method


def ask_stream(of: object, capability: type[Capability], method: str) -> Capability:
    """Return a session as one that streams what `method` gives at once.

    Raises NotSupported as `ask`, and where `method` is not marked by `collects`: a subclass that overrides it shows
    other values there, which the streaming method of its base class does not use.
    """
    plain = getattr(getattr(of, method, None), "__func__", None)
    # A function that wraps a marked method may copy its attributes, and is another function.
    if plain is None or getattr(plain, "collects", None) is not plain:
        raise NotSupported(f"the session gives what {method} gives at once")
    return ask(of, capability)


@runtime_checkable
class Candidate(Protocol):
    """The methods that a check needs of a candidate's session; each as in `Session`."""

    def state(self) -> State:
        """Return a copy of the canonical state."""
        ...

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        """Make one optimizer step on `batch`, as in `Session`."""
        ...

    def gradients(self, batch: Batch) -> Gradients:
        """Compute loss and gradients of `batch`, as in `Session`."""
        ...

    def observe(self, batch: Batch, taps: Sequence[str]) -> Arrays:
        """Return taps and gradients of a micro-batch, as in `Session`."""
        ...

    def close(self) -> None:
        """Release what the session holds."""
        ...


@runtime_checkable
class ShowsState(Protocol):
    """A session that shows what it holds."""

    def state(self) -> State:
        """Implement `Session.state`."""
        ...


@runtime_checkable
class ShowsChecksums(Protocol):
    """A session that shows whether its state has changed, for far less than a copy of it."""

    def state_checksums(self) -> Mapping[str, float]:
        """Return a number for each array of the state (`params/NAME`, `KIND/NAME`), for its step and each scalar.

        Equal bits give equal numbers, and others almost surely do not. Each of several ranks gives those of its part.
        """
        ...


@runtime_checkable
class CountsUpdates(Protocol):
    """A session whose optimizer counts its updates by itself, for bias corrections, beside the number of the step."""

    def update_counts(self) -> Mapping[str, int]:
        """Return the optimizer's count of updates by parameter name; parameters without a count are left out."""
        ...


@runtime_checkable
class Loads(Protocol):
    """A session that takes a state over."""

    def load(self, state: State) -> None:
        """Implement `Session.load`."""
        ...


@runtime_checkable
class RunsStages(Protocol):
    """A session that executes single stages."""

    def run_stage(self, stage: str, inputs: Arrays) -> Arrays:
        """Implement `Session.run_stage`."""
        ...


@runtime_checkable
class PreparesStages(Protocol):
    """A session that compiles programs of single stages before they are asked for."""

    def prepare_stage(self, stage: str, inputs: Arrays) -> None:
        """Compile what `run_stage` runs for inputs of these shapes, whose values are not read.

        It is called from another thread than the session's other methods, but never beside them.
        """
        ...


@runtime_checkable
class ReadsBack(Protocol):
    """A session that shows what the program of a step or of gradients was given, as it lay on the device."""

    def keep_inputs(self) -> None:
        """Keep the inputs of the programs of the next step, or of the next gradients."""
        ...

    def inputs_kept(self) -> Arrays:
        """Return the inputs by the names of `Batch.arrays`, of the whole batch in its order, and release them."""
        ...


@runtime_checkable
class ShowsAmaxes(Protocol):
    """A session that returns the amaxes of a pass under FP8's delayed scaling (core/train/fp8_amax.py)."""

    def amaxes_of_pass(self) -> Arrays:
        """Return the last gradient pass's largest magnitudes by layer: float32 (3,), in the order of CASTS."""
        ...


@runtime_checkable
class ShowsAmaxesOfTaps(Protocol):
    """A session whose tapped program returns its amaxes under FP8's delayed scaling as well."""

    def amaxes_of_taps(self) -> Arrays:
        """Return amaxes as `amaxes_of_pass`, of the last pass that showed gradients of taps."""
        ...


@runtime_checkable
class ShowsAmaxesOfParts(Protocol):
    """A session whose step returns the amaxes of each of its micro-batches under FP8's delayed scaling as well."""

    def amaxes_of_parts(self) -> Sequence[Arrays]:
        """Return amaxes of each micro-batch of the step that `keep_parts` was for; called before `parts_kept`."""
        ...


@runtime_checkable
class ShowsParts(Protocol):
    """A session whose step sketches what each of its micro-batches adds to its gradients, without another pass."""

    def keep_parts(self) -> None:
        """Sketch what each micro-batch of the next step adds."""
        ...

    def parts_kept(self) -> Sequence[Mapping[str, Any]]:
        """Return the parts in the batch's order, `Observation` by `gradient/NAME`, before clipping; release them."""
        ...


@runtime_checkable
class KeepsKeys(Protocol):
    """A session that samples with a cache of keys and values."""

    def cached_logits(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return logits (n, V) of the token after the first `lengths` tokens, each from the cache of the one before.

        tokens: int32 (S,), one document. lengths: int32 (n,), each one more than the one before. Under the precision
        policy of the run; raises NotSupported where sampling has another.
        """
        ...


@runtime_checkable
class Decodes(Protocol):
    """A session whose cache of keys and values serves one prompt after another, as `lockstep sample` uses it."""

    def decoder(self) -> Callable[[np.ndarray], np.ndarray]:
        """Return a function to logits (V,) of the token that follows `tokens`, int32 (n,), at the present weights.

        The cache lasts from call to call; `tokens` may begin anew. Raises NotSupported as `cached_logits`.
        """
        ...


@runtime_checkable
class Samples(Protocol):
    """A session that samples without a cache."""

    def next_token_logits(self, tokens: np.ndarray) -> np.ndarray:
        """Implement `Session.next_token_logits`."""
        ...


@runtime_checkable
class Evaluates(Protocol):
    """A session that scores held-out batches."""

    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        """Implement `Session.evaluate`."""
        ...


@runtime_checkable
class ShowsStepGradients(Protocol):
    """A session whose step shows its gradients, which a check then does not compute a second time."""

    def step_and_gradients(self, batch: Batch, *, norms: bool = False) -> tuple[StepRecord, Gradients | None]:
        """Make a step; return its record, and its gradients before clipping; None if it did not show them."""
        ...


@runtime_checkable
class SketchesStep(Protocol):
    """A session whose step sketches its gradients on the device, without another pass."""

    def step_and_sketches(self, batch: Batch, *, norms: bool = False) -> tuple[StepRecord, Mapping[str, Any] | None]:
        """Make a step; return its record, and `Observation`s of NLL and gradients before clipping, or None."""
        ...


@runtime_checkable
class SketchesGradients(Protocol):
    """A session that sketches on the device what `gradients` gives."""

    def sketch_gradients(self, batch: Batch) -> Mapping[str, Any]:
        """Sketch each parameter's gradient on `batch`, by `gradient/NAME`; the state is left as it was."""
        ...


@runtime_checkable
class StreamsState(Protocol):
    """A session that hands over its state a tensor at a time."""

    def stream_state(self, take: Take) -> State:
        """Hand each tensor of `state` to `take`, by kind (`params`, or a moment's) and name; return it without them.

        Its `optimizer` has the kinds of moments, each empty.
        """
        ...


@runtime_checkable
class StreamsGradients(Protocol):
    """A session that hands over gradients a tensor at a time, and keeps none that it has handed over."""

    def stream_gradients(self, batch: Batch, take: Take) -> Gradients:
        """Hand each tensor of `gradients` to `take`, of kind `grads` or `program`; return NLL and loss without them."""
        ...


@runtime_checkable
class StreamsStepGradients(Protocol):
    """A session whose step hands over its gradients a tensor at a time."""

    def stream_step(self, batch: Batch, take: Take, *, norms: bool = False) -> tuple[StepRecord, Gradients | None]:
        """Make a step as `step_and_gradients`; its gradients go to `take`, of kind `grads`, instead of the result."""
        ...


@runtime_checkable
class StreamsTaps(Protocol):
    """A session that hands over taps and their gradients as its passes come to them."""

    def stream_taps(self, batch: Batch, taps: Sequence[str], take: Take) -> None:
        """Hand each tensor of `observe` to `take`, of kind `taps`, in any order.

        A tap and its gradient may lack sequences without weight.
        """
        ...


@runtime_checkable
class Sketches(Protocol):
    """A session that sketches what it computes on the device (core/parity/evidence/sketch.py)."""

    def sketch(self, batch: Batch) -> Mapping[str, Any]:
        """Sketch taps, their gradients and parameter gradients of one micro-batch; `Observation` by name."""
        ...


@runtime_checkable
class ShowsRankGradients(Protocol):
    """A session of several ranks that shows what each computes by itself."""

    def rank_gradients(self, batch: Batch) -> Sequence[Arrays]:
        """Return gradients of each micro-batch by itself, made by the rank whose share it is and not reduced."""
        ...


@runtime_checkable
class StreamsRankGradients(Protocol):
    """A session of several ranks, each of which hands over what it computes by itself."""

    def stream_rank_gradients(self, batch: Batch, take: Callable[[int, str, np.ndarray], None]) -> None:
        """Hand each gradient of `rank_gradients` to `take`, with its micro-batch's number, on the rank that made it."""
        ...


@runtime_checkable
class GivesEachItsOwn(Protocol):
    """A session of several ranks that can hand each rank the part that it holds, and no more."""

    def each_its_own(self) -> AbstractContextManager[None]:
        """Make streams give rank 0 what all ranks have, and each rank its rows of what is cut over them."""
        ...


@runtime_checkable
class ReportsRanks(Protocol):
    """A session of several ranks that compares what they hold."""

    def rank_reports(self) -> Sequence[RankReport]:
        """Return the report of each rank on the last step, rank 0 first."""
        ...


@runtime_checkable
class Describes(Protocol):
    """A backend that describes what is in force."""

    def describe(self, config: RunConfig) -> Mapping[str, Any]:
        """Implement `Backend.describe`."""
        ...


@runtime_checkable
class ResolvesKernel(Protocol):
    """A backend that itself runs the kernel for which `attention.kernel = "auto"` stands (core/config/auto.py).

    resolves_kernel: whether it does. Other trainers call torch's attention, whatever the setting's value.
    """

    resolves_kernel: bool


@runtime_checkable
class OpensRanks(Protocol):
    """A backend that may open sessions of several ranks. ranked: whether it does."""

    ranked: bool


@runtime_checkable
class ServesThreads(Protocol):
    """A backend whose sessions several threads may open and ask at once. threads: whether they may."""

    threads: bool


@runtime_checkable
class TapsKeepBits(Protocol):
    """A session whose tapped program gives the gradients of the one that trains, bit for bit, where neither is wrong.

    Other programs may add in another order. taps_keep_bits: whether it promises so much; without it, nobody does.
    """

    taps_keep_bits: bool


@runtime_checkable
class HidesTaps(Protocol):
    """A session that cannot show some taps: nothing names the place in its program where they pass."""

    def hidden_taps(self) -> Mapping[str, str]:
        """Return the forward taps that `observe` never gives, each with the reason. Their stages are not covered."""
        ...


@runtime_checkable
class OfRanks(Protocol):
    """A session that several ranks share. peers: those ranks; each holds its own, and makes the same calls on it."""

    peers: Ranks


def ranks_of(session: object) -> Ranks:
    """Return the ranks that share a session."""
    try:
        return ask(session, OfRanks).peers
    except NotSupported:
        return ONE


@runtime_checkable
class Writes(Protocol):
    """A session that writes its state itself, while training goes on."""

    def write(self, folder: Path) -> Writing:
        """Start to write a copy of the state into `folder`, which is empty; the session may go on at once.

        `wait` may be called in another thread. Raises OSError if the disk refuses.
        """
        ...


@runtime_checkable
class HasRandomState(Protocol):
    """A session with random number generators of its own."""

    def random_state(self) -> dict[str, np.ndarray]:
        """Return the generators' states, by name."""
        ...

    def set_random_state(self, states: Arrays) -> None:
        """Take over what `random_state` gave; what is not there stays as it is."""
        ...


@runtime_checkable
class Timed(Protocol):
    """A session that measures the parts of its last step's time."""

    def seconds_of_step(self) -> Mapping[str, float]:
        """Return seconds of the last step's `compute`, `communication`, `optimizer` (core/train/time_accounting.py)."""
        ...


@runtime_checkable
class TimesCompilation(Protocol):
    """A session that measures the time of compiling programs."""

    def seconds_compiling(self) -> float:
        """Return the seconds that compilation has taken so far. `seconds_of_step` does not contain them."""
        ...


@runtime_checkable
class UsesMemory(Protocol):
    """A session that measures its memory."""

    def memory(self) -> Mapping[str, float]:
        """Return bytes `allocated`, `reserved`, `resident`, as far as known, and `peak` since the last call."""
        ...


@runtime_checkable
class ShowsAttention(Protocol):
    """A session that shows how large its attention logits are."""

    def attention_logits(self, batch: Batch) -> np.ndarray:
        """Return (layers,) float64: each layer's largest q·kᵀ/√E over what each token of `batch` may see."""
        ...


@runtime_checkable
class MeasuresDeterminism(Protocol):
    """A session that can leave out what makes it deterministic, to see what that costs."""

    def costs_of_determinism(self, batch: Batch) -> Sequence[float]:
        """Measure the time of forward and backward pass of `batch` / time without it, several times; keep the state.

        batch: a micro-batch a rank. Raises NotSupported with the reason why it cannot be measured.
        """
        ...


@runtime_checkable
class Reads(Protocol):
    """A session whose checkpoints are of a format of its own."""

    def read(self, folder: Path) -> State:
        """Read the state in a checkpoint's folder, without step and scalars. Raises ValueError if it is not there."""
        ...


@runtime_checkable
class Restores(Protocol):
    """A session that reads a checkpoint's tensors itself, only the parts that it needs."""

    def restore(self, folder: Path, step: int, scalars: Mapping[str, float]) -> None:
        """Take over the state in a checkpoint's folder (core/checkpoint/reader.py). Raises ValueError as `load`."""
        ...


@runtime_checkable
class SpansNodes(Protocol):
    """A session whose ranks may be on several machines."""

    def require_shared(self, folder: Path) -> None:
        """Raise UserError unless all ranks see this folder and run the same code."""
        ...
