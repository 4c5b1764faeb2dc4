"""The user's own module as the reference of `watch`.

The truth is a copy in FP64, eager and on the CPU. The twin is a copy in the training dtypes. The two differ only in
rounding. A check therefore finds errors of kernels, the compiler, autocast, accumulation, clipping, the optimizer and
ranks. It cannot find an error in the module itself.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lockstep.core.backend import Arrays
from lockstep.core.data.memory import available_memory_bytes
from lockstep.core.errors import UserError
from lockstep.core.parity.watch.limits import Precision
from lockstep.core.parity.watch.observed import Observed
from lockstep.core.parity.watch.snapshot import Answer, array_of, parameters_of
from lockstep.core.parity.watch.together import Gathered
from lockstep.core.parity.watch.uncovered import Uncovered, reason
from lockstep.torch_backend.watch.batches import copied as copied_batch
from lockstep.torch_backend.watch.batches import on_cpu
from lockstep.torch_backend.watch.keep_wide import KeepWide, in_words, places
from lockstep.torch_backend.watch.module_copy import copied, hooked, ranks_of, unwrapped
from lockstep.torch_backend.watch.operations import Operations
from lockstep.torch_backend.watch.parts import Accumulate as Accumulate
from lockstep.torch_backend.watch.parts import Sums, parts_of
from lockstep.torch_backend.watch.segments import Sink, by_blocks, kept_narrow
from lockstep.torch_backend.watch.sharded_module import NO_CASTS, Casts, casts_of

log = logging.getLogger("lockstep.watch")

Loss = Callable[[Any, Any], Any]

OUT_OF_SIGHT = "an error in your own module's architecture is not found: the truth is computed with it"
# Bytes of memory that activations must leave free.
LEAST_FREE = 2**30
# Free memory is measured each time autograd has saved this many more bytes.
LOOK_EVERY = 2**26
# A truth whose rounding is finer than the candidate's by this factor counts as exact: it changes a ratio by 1 %.
FINER = 100.0


class OwnModule:
    """A reference by the user's own module and loss function. Built by `watch`."""

    own = True

    def __init__(self, model: nn.Module, loss: Loss, accumulate: Accumulate, operations: int = 0) -> None:
        """Make a reference from the module. operations: number of single operations that a check judges."""
        self._model, self._loss, self._accumulate = model, loss, accumulate
        self.casts, self.divisor = casts_of(unwrapped(model)), 1.0
        self._told: set[str] = set()
        self._whole = False  # True after a truth by blocks failed
        self._operations = Operations(unwrapped(model), operations) if operations else None
        self._observed = 0

    def observe(self, params: Arrays, batch: Any, precision: Precision, uncovered: Uncovered) -> Observed | None:
        """Judge single operations of the module, on one micro-batch per check, in turn; None without `operations=`.

        Raises UserError for an invalid batch or loss, and if no operation could be judged.
        """
        if self._operations is None:
            return None
        own = unwrapped(self._model)
        parts = parts_of(batch, batch, self._accumulate, 1.0).batches
        part = parts[self._observed % len(parts)]
        self._observed += 1
        # The copy protects the batch from a loss function that writes into it.
        return self._operations.observe(lambda: self._loss(own, copied_batch(part)), params, precision, uncovered)

    def answers(self, params: Arrays, batch: Any, precision: Precision, uncovered: Uncovered) -> tuple[Answer, Answer]:
        """Return the truth and the twin at these parameters; under fp64 the truth is both.

        Raises UserError if the module cannot be copied, does not fit into memory or draws random numbers.
        """
        uncovered.append(OUT_OF_SIGHT)
        if (ranks := ranks_of(self._model)) > 1 and self._accumulate is None and not isinstance(batch, Gathered):
            raise UserError(
                f"gradients are the mean of {ranks} ranks', and a batch is one rank's: ranks='gather' takes each "
                "rank's own, and with accumulate='mean', step takes the list of the batches of all"
            )
        if names := hooked(self._model):
            uncovered.append(f"hooks on the gradients of parameters: {', '.join(names[:5])}")
        truth = self._truth(params, batch, precision, uncovered)
        if precision == "fp64":
            return truth, truth
        casts = self.casts if precision == "bf16" else NO_CASTS
        with as_it_trains(precision, self._model, casts):
            model = copied(self._model, params, None, casts.weights)
            casts.put_on(model)
            twin, _ = self._run(model, on_cpu(batch, None), batch, casts)
        return truth, twin

    def _truth(self, params: Arrays, batch: Any, precision: Precision, uncovered: Uncovered) -> Answer:
        wide_batch = on_cpu(batch, torch.float64)
        with in_fp64():
            narrow = frozenset[str]() if self._whole else kept_narrow(unwrapped(self._model))
            try:
                model, mode, answer, drawn = self._wide(params, wide_batch, batch, narrow)
            except UserError:
                raise
            except Exception as error:
                if not narrow:
                    raise
                # Computation by blocks fails if a block does not read its weights by attribute. Compute the whole.
                log.debug("watch: the truth is computed whole: %s", reason(error), exc_info=True)
                self._whole, narrow = True, frozenset()
                model, mode, answer, drawn = self._wide(params, wide_batch, batch, narrow)
            if drawn and not self._same_again(params, wide_batch, batch, answer):
                raise UserError(
                    f"the forward draws random numbers{dropouts(model)}: turn this off, since a check "
                    "repeats the forward pass"
                )
        if changed := _changed(model):
            uncovered.append(f"buffers that the forward changes, read after it: {', '.join(changed[:5])}")
        if mode.asked:
            words = f"the truth stays in FP64 where the code requests another dtype: {in_words(mode.asked)}"
            uncovered.append(words)
            if words not in self._told:
                log.warning("watch: %s", words)
                self._told.add(words)
        if mode.lost:
            narrowest = max(torch.finfo(dtype).eps for _, _, dtype in mode.lost)
            words = f"the module narrows FP64, so it gives no FP64 truth: {in_words(mode.lost)}"
            if narrowest * FINER > (2.0**-8 if precision == "bf16" else 2.0**-24):
                raise UserError(words)
            uncovered.append(words)
        if not np.isfinite(answer.loss):
            raise UserError(f"the module's loss in FP64 is {answer.loss}")
        return answer

    def _wide(
        self, params: Arrays, wide_batch: Any, batch: Any, narrow: frozenset[str]
    ) -> tuple[nn.Module, KeepWide, Answer, bool]:
        """Run a copy in FP64. narrow: parameters that are widened block by block (segments.py)."""
        model = copied(self._model, params, torch.float64, as_read=narrow)
        sink = by_blocks(model, narrow)
        with places(model) as where, KeepWide(where) as mode:
            answer, drawn = self._run(model, wide_batch, batch, sink=sink)
        if written := sorted(name for name, p in parameters_of(model).items() if name in narrow and p._version):
            raise UserError(f"the forward writes to {written[0]}")
        return model, mode, answer, drawn

    def _same_again(self, params: Arrays, wide_batch: Any, batch: Any, first: Answer) -> bool:
        """Run again with other random numbers, and return whether the bits are the same: then they have no effect."""
        again = self._wide(params, wide_batch, batch, frozenset())[2]
        same = (np.array_equal(first.grads[name], again.grads[name], equal_nan=True) for name in first.grads)
        return first.loss == again.loss and all(same)

    def _run(
        self, model: nn.Module, batch: Any, given: Any, casts: Casts = NO_CASTS, sink: Sink | None = None
    ) -> tuple[Answer, bool]:
        """Return loss and gradients of a step, and whether random numbers were drawn.

        batch: the batch for the copy. given: the user's batch. casts: FSDP's casts that the copy makes. sink: the
        gradients of parameters that are widened block by block.
        """
        parts = parts_of(batch, given, self._accumulate, self.divisor)
        total, outputs, before = 0.0, dict[str, np.ndarray](), _random_state()
        model.zero_grad(set_to_none=True)
        sums = Sums(model, casts, parts.divisor)
        with torch.autograd.graph.saved_tensors_hooks(_Room(), lambda x: x):
            for i, part in enumerate(parts.batches):
                value = self._loss(model, part)
                if isinstance(value, tuple):
                    value, found = value
                    outputs = outputs or {name: array_of(x) for name, x in found.items()}
                if not isinstance(value, Tensor) or value.numel() != 1:
                    raise UserError("loss= returns a scalar tensor, or that and a mapping of outputs")
                self._look_at(value, model)
                value = parts.scaled(value, i)
                value.backward()
                sums.after_part(parts.last[i])
                total += float(value.detach()) / parts.divisor
        drawn = any(one != other for one, other in zip(before, _random_state(), strict=True))
        alone = self._accumulate is None or len(parts.batches) == 1
        return Answer(total, sums.gradients(sink or {}), outputs if alone else {}), drawn

    def _look_at(self, value: Tensor, model: nn.Module) -> None:
        """Raise UserError unless the loss depends on the copy's parameters, and on none of the user's module."""
        leaves = _leaves(value)
        if leaves & {id(p) for p in unwrapped(self._model).parameters()}:
            raise UserError("loss= uses the model that trains, and not the module that it gets")
        if not leaves & {id(p) for p in model.parameters()}:
            raise UserError("the loss does not depend on the parameters of the module that loss= gets")


def _leaves(value: Tensor) -> set[int]:
    """Return the ids of the tensors that would receive gradients in a backward pass from `value`."""
    found, seen, todo = set[int](), set[Any](), [value.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        todo += [following for following, _ in node.next_functions]
    return found


class _Room:
    """A limit on activations: at least `LEAST_FREE` bytes of memory stay free."""

    def __init__(self) -> None:
        self._bytes = 0

    def __call__(self, x: Tensor) -> Tensor:
        self._bytes += x.numel() * x.element_size()
        if self._bytes >= LOOK_EVERY:
            self._bytes = 0
            if 0 < (free := available_memory_bytes()) < LEAST_FREE:
                raise UserError(f"the copy's activations do not fit into memory, of which {free / 1e9:.1f} GB are free")
        return x


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run the context eagerly on the CPU, with gradients and without autocast; restore every random state."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autocast("cpu", enabled=False))
            stack.enter_context(torch.device("cpu"))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def in_fp64() -> Iterator[None]:
    """Run the context like the truth: FP64 as default dtype, and attention by the math kernel."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with undisturbed(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_default_dtype(default)


@contextmanager
def as_it_trains(precision: Precision, model: nn.Module, casts: Casts) -> Iterator[None]:
    """Run the context in the declared precision: autocast for bf16 over FP32 weights, unless FSDP casts them."""
    dtypes = {p.dtype for p in unwrapped(model).parameters() if p.is_floating_point()}
    with (
        undisturbed(),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16" and dtypes == {torch.float32} and not casts),
    ):
        yield


def _random_state() -> tuple[Any, ...]:
    """Return the states of the random number generators that a module may use, for comparison."""
    numpy: Mapping[str, Any] = np.random.get_state(legacy=False)
    return (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        str(numpy["state"]["pos"]),
        numpy["state"]["key"].tobytes(),
    )


def dropouts(model: nn.Module) -> str:
    """List the modules in training mode with a probability `p` > 0, as text for a message; "" if there are none."""
    found = [
        f"{name} (p={p:g})"
        for name, module in model.named_modules()
        if module.training and isinstance(p := getattr(module, "p", None), float) and p > 0
    ]
    return f" ({', '.join(found[:5])}{', …' if len(found) > 5 else ''})" if found else ""


def _changed(model: nn.Module) -> list[str]:
    """List the buffers that were changed since the copy was made."""
    return [name for name, x in model.named_buffers() if x._version]
