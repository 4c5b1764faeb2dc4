"""A model of a supported transformers family under `watch`, compared with an independent model of the same family.

Loss and gradients of a step are compared end to end with the reference's. Hooks on the live module record the forward
pass of a step's first micro-batch and its gradients, and each stage is judged separately, from the module's own inputs
to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.core.backend import Arrays, Backend, Batch, State, StepRecord
from lockstep.core.config.rules import broken_rules
from lockstep.core.config.schema import AttentionConfig, CompileConfig, PrecisionConfig, RunConfig, TrainConfig
from lockstep.core.config.sections import ModelConfig
from lockstep.core.errors import UserError
from lockstep.core.hub.config import model_of
from lockstep.core.hub.tensors import stored_tensors
from lockstep.core.model.names import GRADIENT, parameter_shapes
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.observations import PARAMETER, PROBE_NLL
from lockstep.core.parity.judge import local
from lockstep.core.parity.measures.compare import Reference
from lockstep.core.parity.measures.verdict import Finding
from lockstep.core.parity.reference.side_by_side import passes
from lockstep.core.parity.watch.limits import Precision
from lockstep.core.parity.watch.snapshot import Answer, array_of
from lockstep.core.parity.watch.uncovered import Uncovered, reason
from lockstep.torch_backend.candidate.hugging_face import calls_there, taps_there
from lockstep.torch_backend.candidate.layout import layout_of_stored, parameters_there
from lockstep.torch_backend.candidate.taps import NLL, Taps
from lockstep.torch_backend.watch.module_copy import COMPILED, ranks_of, unwrapped
from lockstep.torch_backend.watch.own_module import dropouts

Accumulate = Literal["mean", "tokens"]
IGNORED = -100  # transformers' label for a token without weight
AUTOCAST = "autocast"
# A batch may have these besides input_ids and labels, if they have their default values.
TRIVIAL = ("attention_mask", "position_ids")
# With one of these, the forward pass depends on other inputs than tokens.
OTHER_INPUTS = ("inputs_embeds", "past_key_values", "encoder_hidden_states")


@dataclass
class Recorded:
    """The recorded pass of a step's first micro-batch.

    number: the step. tokens: (B, S). seen: taps and their gradients. grads: gradients of parameters, by the module's
    names. failed: reason why the pass cannot be judged, or "".
    """

    number: int
    tokens: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    seen: dict[str, np.ndarray] = field(default_factory=dict)
    grads: dict[str, np.ndarray] = field(default_factory=dict)
    handles: list[Any] = field(default_factory=list)
    failed: str = ""

    def take(self, name: str, x: Tensor) -> None:
        """Keep a tap or its gradient, in FP32 or wider."""
        self.seen[name] = array_of(x)

    def fail(self, error: Exception) -> None:
        """Keep the first reason why the pass cannot be judged; no error is raised inside a user's program."""
        self.failed = self.failed or reason(error)


class _Hook:
    """A hook of the live module; in a copy of the module or in a pickle, it does nothing."""

    def __init__(self, call: Callable[..., None] | None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __reduce__(self) -> Any:
        return _Hook, (None,)


class FamilyReference:
    """The reference of `watch` for a transformers model. Built by `lockstep.from_hf`."""

    own = False

    def __init__(self, model: nn.Module, backend: Backend, accumulate: Accumulate | None) -> None:
        if accumulate not in (None, "mean", "tokens"):
            raise UserError(f"accumulate={accumulate!r}: it is 'mean' or 'tokens'")
        self._given, self._module, self._backend, self._accumulate = model, unwrapped(model), backend, accumulate
        name = type(self._module).__name__
        self._config = _config_of(self._module)
        if not hasattr(self._config, "to_dict"):
            raise UserError(f"from_hf needs a model of transformers, and {name} has no transformers config")
        settings = {**self._config.to_dict(), "architectures": [name]}
        self._family, self._model, _ = model_of(settings, f"{name}.config")
        stored = stored_tensors(self._family, self._model)
        self._layout = layout_of_stored(stored, self._family.head, self._model)
        parameters_there(self._module, self._layout.placed, parameter_shapes(self._model))
        taps, calls = taps_there(self._model, self._family), calls_there(self._model, type(self._module))
        self._taps = Taps(self._model, self._module, self._layout, taps, calls)
        self._opened: dict[tuple[Precision, int], Reference] = {}
        self._recorded: Recorded | None = None

    # Comparisons end to end

    def answers(self, params: Arrays, batch: Any, precision: Precision, uncovered: Uncovered) -> tuple[Answer, Answer]:
        """Return the truth and the twin of the independent model at these parameters.

        Raises UserError for a batch with unsupported inputs, for dropout, and for weights in bf16.
        """
        if (ranks := ranks_of(self._given)) > 1 and self._accumulate is None:
            raise UserError(f"gradients are the mean of {ranks} ranks': give from_hf accumulate=, and step all batches")
        micros = [_batch_of(part, self._model) for part in self._parts(batch)]
        reference = self._reference(precision, max(one.tokens.shape[1] for one in micros), uncovered)
        if len(micros) > 1:
            uncovered.append("stages by themselves of other micro-batches than the step's first")
        state = State(0, self._ours(params), {})
        names = [PROBE_NLL, *(PARAMETER + name for name in parameter_shapes(self._model))]
        sides: list[dict[str, Any]] = [{}, {}]
        losses = [0.0, 0.0]
        for micro, total in zip(micros, _totals(micros, self._accumulate), strict=True):
            for made in passes(_of_shape(reference, micro), state, micro, names, weight=total):
                for number, found in enumerate((made.truth, made.twin)):
                    if made.name == PROBE_NLL:
                        weights = micro.weights.astype(np.float64)
                        losses[number] += float((weights * found.astype(np.float64)).sum() / total)
                    else:
                        name = made.name.removeprefix(PARAMETER)
                        sides[number][name] = sides[number][name] + found if name in sides[number] else np.array(found)
        truth, twin = (
            Answer(loss, {one.theirs: one.to_theirs(side.__getitem__) for one in self._layout.placed})
            for loss, side in zip(losses, sides, strict=True)
        )
        return truth, twin

    def _ours(self, params: Arrays) -> dict[str, np.ndarray]:
        return {name: array for one in self._layout.placed for name, array in one.to_ours(params[one.theirs])}

    def _parts(self, batch: Any) -> Sequence[Any]:
        if self._accumulate is None:
            return [batch]
        if not isinstance(batch, (list, tuple)) or not batch:
            raise UserError("accumulate= was given, so step takes the list of the step's micro-batches")
        return batch

    def _reference(self, precision: Precision, length: int, uncovered: Uncovered) -> Reference:
        """Open a reference at the candidate's precision for sequences of up to `length` tokens, or reuse one."""
        casts, why = self._casts(precision)
        if why:
            uncovered.append(why)
        found = next((one for (of, most), one in self._opened.items() if of == precision and most >= length), None)
        if found is None:
            config = RunConfig(
                model=self._model,
                train=TrainConfig(batch_size=1, micro_batch_size=1, sequence_length=length),
                precision=PrecisionConfig(policy=precision, casts=casts),
                attention=self._kernel(),
                compile=CompileConfig(enabled=False),
                device="cpu",
            )
            found = self._opened[precision, length] = Reference.open(self._backend, config)
        return found

    def _kernel(self) -> AttentionConfig:
        """Return transformers' attention: torch's scaled_dot_product_attention; with a cap, Lockstep's own."""
        return AttentionConfig() if self._model.attention_cap else AttentionConfig(kernel="flash", grouped="kernel")

    def _casts(self, precision: Precision) -> tuple[str, str]:
        """Return the twin's plan of casts, and the reason why it is not autocast's, or "".

        Raises UserError if no plan matches: for random numbers, FP64, or bf16 weights.
        """
        if drawn := dropouts(self._module):
            raise UserError(
                f"the forward draws random numbers{drawn}: turn this off, since a check repeats the forward pass"
            )
        if precision == "fp64":
            raise UserError("transformers computes norms, softmax and angles in FP32, also with weights in FP64")
        if precision != "bf16":
            return "lockstep", ""
        dtypes = {str(p.dtype).removeprefix("torch.") for p in self._module.parameters()}
        if dtypes != {"float32"}:
            raise UserError(f"weights in {', '.join(sorted(dtypes))}: from_hf supports autocast over FP32 weights")
        model = {f"model.{name}": value for name, value in self._model.model_dump().items()}
        broken = broken_rules({"precision.casts": AUTOCAST, **model})
        problem = next((said for keys, said in broken if "precision.casts" in keys), "")
        return ("lockstep", f"the twin does not round as autocast does: {problem}") if problem else (AUTOCAST, "")

    # Stages

    def attend(self, due: Callable[[], int | None]) -> None:
        """Record the first forward pass of each step to check. due: returns the number of that step, or None."""
        if any(type(one).__name__ == COMPILED for one in (self._given, *self._module.modules())):
            return
        stack = ExitStack()

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stack.close()
            number = due()
            if number is None or not torch.is_grad_enabled() or (self._recorded and self._recorded.number == number):
                return
            self._forget()
            self._recorded = recorded = Recorded(number)
            try:
                tokens = kwargs.get("input_ids", args[0] if args else None)
                given = {name: kwargs.get(name) for name in (*TRIVIAL, *OTHER_INPUTS)}
                recorded.tokens = _batch_of({**given, "input_ids": tokens, "labels": tokens}, self._model).tokens
                stack.enter_context(self._taps.showing(recorded.tokens.shape, recorded.take, recorded.fail))
                self._listen(recorded)
            except Exception as error:
                recorded.fail(error)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            stack.close()

        self._module.register_forward_pre_hook(_Hook(before), with_kwargs=True)
        self._module.register_forward_hook(_Hook(after))

    def _listen(self, recorded: Recorded) -> None:
        """Record each parameter's gradient after the recorded pass, before another micro-batch adds to it."""
        there = dict(self._module.named_parameters())
        parameters = {one.theirs: there[one.theirs] for one in self._layout.placed}
        if any(p.grad is not None and bool(p.grad.any()) for p in parameters.values()):
            return

        def listen(name: str, p: nn.Parameter) -> None:
            def take(p: Tensor) -> None:
                handle.remove()
                try:
                    recorded.grads[name] = array_of(p.grad)
                except Exception as error:
                    recorded.fail(error)

            handle = p.register_post_accumulate_grad_hook(take)
            recorded.handles.append(handle)

        for name, p in parameters.items():
            if p.requires_grad:
                listen(name, p)

    def _forget(self) -> Recorded | None:
        """Return the recorded pass, and remove it and its hooks."""
        recorded, self._recorded = self._recorded, None
        for handle in recorded.handles if recorded else ():
            handle.remove()
        return recorded

    def stages(self, number: int, params: Arrays, precision: Precision, uncovered: Uncovered) -> Sequence[Finding]:
        """Judge each stage of the recorded pass, forward and backward, from the stage's own inputs."""
        recorded = self._forget()
        if recorded is None or recorded.number != number:
            uncovered.append("stages by themselves: no forward pass was recorded (compiled, or check= came after it)")
            return ()
        if why := recorded.failed or self._casts(precision)[1] or self._attention(precision):
            uncovered.append(f"stages by themselves: {why}")
            return ()
        seen, whole = dict(recorded.seen), len(recorded.grads) == len(self._layout.placed)
        if whole:
            seen |= {GRADIENT + name: g for name, g in self._ours(recorded.grads).items()}
        else:
            why = "others were there before, or some did not come"
            uncovered.append(f"gradients of parameters, from their stages' own inputs: {why}")
        if not any(name.startswith(GRADIENT) for name in seen):
            uncovered.append("stages of the backward pass by themselves: no gradient came to the forward pass recorded")
        ones = np.ones(recorded.tokens.shape, np.float32)
        tapped = Batch(recorded.tokens, recorded.tokens, ones)
        reference = _of_shape(self._reference(precision, tapped.tokens.shape[1], uncovered), tapped)
        evidence = _evidence(State(0, self._ours(params), {}), tapped, seen, (*self._taps.hidden, NLL))
        missing: list[str] = []
        own = parameter_shapes(self._model)
        findings = [one for one in local.stages(evidence, reference, missing) if whole or one.tap not in own]
        for line in missing:
            uncovered.append(line)
        return findings

    def _attention(self, precision: Precision) -> str:
        kind = getattr(self._config, "_attn_implementation", "sdpa")
        if precision == "bf16" and kind != "sdpa":
            return f"attn_implementation = {kind!r} rounds its scores, as no plan of casts does"
        return ""


def _config_of(module: Any) -> Any:
    return getattr(module, "config", None)


def _of_shape(reference: Reference, batch: Batch) -> Reference:
    """Return the same sessions with the settings for a micro-batch of this shape."""
    rows, length = batch.tokens.shape
    train = reference.config.train.model_copy(
        update={"batch_size": rows, "micro_batch_size": rows, "sequence_length": length}
    )
    return replace(reference, config=reference.config.model_copy(update={"train": train}))


def _evidence(state: State, tapped: Batch, taps: Arrays, hidden: tuple[str, ...]) -> Evidence:
    """Build evidence that has only taps to judge."""
    nothing = StepRecord(0, math.nan, 0.0, 0.0, math.nan, 1.0, "", tapped.tokens.size)
    return Evidence(
        state, state, tapped, nothing, None, tapped, None, taps, (), 0.0, thorough=False, hidden_taps=hidden
    )


def _batch_of(part: Any, model: ModelConfig) -> Batch:
    """Build a causal batch from the inputs of a transformers model. Raises UserError for unsupported inputs."""
    if not isinstance(part, Mapping) and not hasattr(part, "items"):
        raise UserError("a batch of from_hf is a mapping with input_ids and labels, as the model takes it")
    arrays = {name: array_of(value) for name, value in part.items() if value is not None}
    for name in ("input_ids", "labels"):
        if name not in arrays:
            raise UserError(f"the batch has no {name}: from_hf reads input_ids and labels")
    ids, labels = arrays["input_ids"], arrays["labels"]
    if ids.ndim != 2 or ids.shape != labels.shape or ids.shape[1] < 2:
        raise UserError(f"input_ids {ids.shape} and labels {labels.shape} do not have the same shape (B, S)")
    for name in sorted(arrays.keys() - {"input_ids", "labels"}):
        due = {"attention_mask": np.ones(ids.shape), "position_ids": np.arange(ids.shape[1])}.get(name)
        if due is None or not np.array_equal(np.broadcast_to(arrays[name], ids.shape), np.broadcast_to(due, ids.shape)):
            unless = ", unless it holds its default" if name in TRIVIAL else ""
            raise UserError(f"from_hf does not read the batch's {name}{unless}")
    targets = np.full(ids.shape, IGNORED, np.int64)
    targets[:, :-1] = labels[:, 1:]
    counts = targets != IGNORED
    if not counts.any():
        raise UserError("all labels of the batch are masked: the loss is 0 / 0")
    batch = Batch(ids.astype(np.int32), np.where(counts, targets, 0).astype(np.int32), counts.astype(np.float32))
    try:
        batch.require_tokens_below(model.vocab_size)
    except ValueError as error:
        raise UserError(str(error)) from None
    return batch


def _totals(micros: Sequence[Batch], accumulate: Accumulate | None) -> list[float]:
    """Return the divisor of each micro-batch's Σ nll.

    For `mean`, a mean of means: its own targets · the number of micro-batches. Otherwise: the targets of all.
    """
    tokens = [float(one.weights.sum(dtype=np.float64)) for one in micros]
    return [count * len(micros) for count in tokens] if accumulate == "mean" else [math.fsum(tokens)] * len(micros)
