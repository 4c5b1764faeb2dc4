"""Observations of a session for a check: taps, gradients, sketches, single stages and scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.core.backend import Arrays, Batch, Gradients, NotSupported, State
from lockstep.core.capabilities import Take, collects
from lockstep.core.model.groups import moment_names
from lockstep.core.model.names import GRADIENT, edge_names, probe_shapes, tap_names
from lockstep.core.model.windows import Window, device_bytes, summed_edges, windows_of
from lockstep.core.parity.evidence.observations import PARAMETER, PROBE_NLL, Observation, observed
from lockstep.core.parity.evidence.sketch import K
from lockstep.core.parity.judge.end_to_end import observations
from lockstep.core.plan.checks import taps_budget
from lockstep.core.streams import TAPS, Collected
from lockstep.torch_backend.kernels.float8 import amaxes_seen
from lockstep.torch_backend.optim import (
    build_optimizer,
    moment_of,
    set_learning_rate,
    write_moments,
)
from lockstep.torch_backend.precision import POLICIES
from lockstep.torch_backend.programs import Programs, Tensors
from lockstep.torch_backend.ranks.sharded_tensors import to_numpy, whole
from lockstep.torch_backend.ranks.sharing import MicroLoss
from lockstep.torch_backend.stages import run_stage, stage_functions
from lockstep.torch_backend.step_parts import StepParts, sketched_alone
from lockstep.torch_backend.tools.attention_logits import largest_logits
from lockstep.torch_backend.tools.generate import Decoder
from lockstep.torch_backend.tools.memory import free_memory
from lockstep.torch_backend.tools.scores import scores
from lockstep.torch_backend.tools.sketch import (
    Kept,
    sign_table,
    sketch,
    sketch_alone,
    sketches_of,
    whole_observation,
)


class Observes(Programs):
    """Observations of one micro-batch at the session's weights; none of them changes the state."""

    # Taps do not change the bits of gradients: the program of training has the same autograd nodes
    # (torch_backend/precision.py, `Policy.read`).
    taps_keep_bits = True
    float8: Any
    # Class that computes logits with a key-value cache, for samples.
    decoder_class = Decoder
    # The program of training, run on this rank without the others.
    _micro_loss: MicroLoss
    # Passes a step's gradients to a function before clipping; returns them with the given loss and NLL.
    hand_over: Callable[[Tensor, list[Tensor], Take], Gradients]
    # Tapped programs, by (names of taps, all sequences are recorded).
    _tapped_programs: dict[tuple[frozenset[str], bool], Any]
    # Sets of names for which the programs of all windows were found to give the same bits.
    _sound_windows: set[frozenset[str]]
    # Bytes that were free on the GPU at the first request for taps.
    _free_at_first: float | None
    _sketching: tuple[Any, Any, Tensor] | None
    # Sketches of what each micro-batch of the next step adds to the gradients, if a check needs them.
    _parts: StepParts | None
    # Under FP8's delayed scaling, by layer: the amaxes of its scales, and those that a tapped program measured.
    amaxes: dict[str, Tensor]
    _seen_at_taps: dict[str, Tensor]
    # Copies a tensor of the state or a gradient to the host.
    _shown: Callable[[Tensor | None], np.ndarray]

    def attention_logits(self, batch: Batch) -> np.ndarray:
        """Return the largest attention logit of each layer, (layers,), computed in eager mode.

        See torch_backend/tools/attention_logits.py.
        """
        tokens, _, _ = self.to_device(batch)
        with torch.no_grad():
            found = self._run(partial(largest_logits, self.model), tokens, self.policy, *self.documents(batch))
        largest: np.ndarray = found
        return largest

    @collects
    def observe(self, batch: Batch, taps: Sequence[str]) -> Arrays:
        """Return taps and gradients of one micro-batch from the tapped program, compiled if the trainer is.

        taps: names of taps, and `grad/NAME` for a tap, an edge or a parameter. The result lacks tensors that the model
        does not pass to its tap. Raises NotSupported for a name that the model does not have.
        """
        found = Collected()
        self._stream_taps(batch, taps, found, lambda value: value)
        return found.arrays(TAPS)

    def stream_taps(self, batch: Batch, taps: Sequence[str], take: Take) -> None:
        """Pass each tensor of `observe` to `take`: in eager mode when it is computed, else at the end.

        For taps and their gradients, only sequences with a loss weight are copied to the host.
        """
        self._require_taps(taps)
        rows = torch.tensor(np.flatnonzero(batch.weights.any(axis=1)), device=self.device)
        size = len(batch.tokens)
        windows = self.config.compile.enabled and self.root is None
        if windows and (budget := self._budget_of_taps(size)):
            self._seen_at_taps = {}
            self._observe_windows(batch, frozenset(taps), take, rows, budget)
            return

        def weighted(value: Tensor) -> Tensor:
            return value[rows] if value.ndim and len(value) == size != len(rows) else value

        self._stream_taps(batch, taps, take, weighted)

    def _stream_taps(self, batch: Batch, taps: Sequence[str], take: Take, rows: Callable[[Tensor], Tensor]) -> None:
        """Pass each tap to `take`. rows: function that selects the sequences of a tap to pass."""
        self._require_taps(taps)
        self._seen_at_taps = {}
        if self.config.compile.enabled:
            self._observe_tapped(batch, frozenset(taps), take, rows)
        else:
            self._observe_passing(batch, frozenset(taps), take, rows)

    def _require_taps(self, taps: Sequence[str]) -> None:
        taps_of_model = tap_names(self.config.model)
        probed = (*taps_of_model, *edge_names(self.config.model), *self.parameters)
        if unknown := sorted(set(taps) - {*taps_of_model, *(GRADIENT + name for name in probed)}):
            raise NotSupported(f"no such tap: {', '.join(unknown)}")

    def _observe_tapped(
        self, batch: Batch, names: frozenset[str], take: Take, rows: Callable[[Tensor], Tensor]
    ) -> None:
        for name, value in self._tapped(batch, names, None, {}).items():
            take(TAPS, name, self._shown(value if name.removeprefix(GRADIENT) in self.parameters else rows(value)))

    def _budget_of_taps(self, size: int) -> float:
        """Return the bytes available to windows of blocks, or 0 if one program may record the taps of the whole model.

        size: sequences of the batch. The default on a GPU is the free memory at the first check, if the taps of the
        whole model do not fit into it.
        """
        if (given := taps_budget(self.config)) or self.device.type != "cuda":
            return given
        if self._free_at_first is None:
            self._free_at_first = free_memory(self.device)
        return 0.0 if device_bytes(self.config, size, 0.0) <= self._free_at_first else self._free_at_first

    def _observe_windows(self, batch: Batch, names: frozenset[str], take: Take, rows: Tensor, budget: float) -> None:
        """Observe like `_observe_tapped`, one window of blocks at a time, and only the sequences `rows`.

        At the first use of these names, tensors that two windows share are compared. Raises NotSupported if their bits
        differ: a stage's inputs and its output would then come from different programs.
        """
        parts = windows_of(self.config, names, len(rows), budget)
        if names not in self._sound_windows:
            self._require_alike(batch, parts, rows)
            self._sound_windows.add(names)
        left = {total: {total, *edges} for total, edges in summed_edges(self.config, parts).items()}
        sums: dict[str, Tensor] = {}
        for window, found in self._by_windows(batch, parts, rows):
            for name in window.names & found.keys():
                if name not in left:
                    take(TAPS, name, self._shown(found[name]))
                for total in [total for total, edges in left.items() if name in edges]:
                    left[total].discard(name)
                    sums[total] = sums[total] + found[name] if total in sums else found[name]
                    if not left[total]:
                        take(TAPS, total, self._shown(sums.pop(total)))

    def _by_windows(
        self, batch: Batch, parts: Sequence[Window], rows: Tensor
    ) -> Iterator[tuple[Window, dict[str, Tensor]]]:
        """Yield each window with the tensors that its program records; the last window comes first."""
        given: dict[str, Tensor] = {}
        for window in reversed(parts):
            found = self._tapped(batch, window.names | window.border, rows, given)
            yield window, found
            at_border = {name: found.get(GRADIENT + name) for name in window.border}
            given = {name: gradient * self.scale for name, gradient in at_border.items() if gradient is not None}

    def _require_alike(self, batch: Batch, parts: Sequence[Window], rows: Tensor) -> None:
        shown: dict[str, Tensor] = {}
        for window, found in self._by_windows(batch, parts, rows):
            for name in shown.keys() & found.keys():
                if not torch.equal(shown[name], found[name]):
                    raise NotSupported(
                        f"a program for each window of blocks does not give the same bits at {name}, and the device "
                        "has no memory for one of the whole model (parity.device_gb)"
                    )
            shown = {name: found[name] for name in window.border & found.keys()}

    def _tapped(
        self, batch: Batch, names: frozenset[str], rows: Tensor | None, given: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run one tapped program and return its taps on the device.

        A sharded parameter's gradient is this rank's part. given: gradients of taps at which the backward pass begins;
        if empty, it begins at the loss.
        """
        key = names, rows is None
        program = self._tapped_programs.get(key)
        if program is None:
            program = partial(self.tapped_micro_loss, frozenset(n for n in names if not n.startswith(GRADIENT)))
            program = self._tapped_programs[key] = self.compiled_loss(program) if self._compiles_whole else program
        asked = [name.removeprefix(GRADIENT) for name in names if name.startswith(GRADIENT)]
        count = len(batch.tokens) if rows is None else len(rows)
        shapes = probe_shapes(self.config.model, count, batch.tokens.shape[1])
        probes = {
            name: torch.zeros(shapes[name], dtype=self.policy.stream, device=self.device, requires_grad=True)
            for name in sorted(asked)
            if name not in self.parameters
        }
        inputs = *self.to_device(batch), self._total_alone(batch), rows, probes, given, *self.documents(batch)
        with torch.set_grad_enabled(bool(asked)):
            loss, seen = self._run(program, *inputs)
        wanted = probes | {name: p for name, p in self.parameters.items() if name in asked}
        if not wanted:
            return seen
        given_back = iter(self._grads(loss, [*wanted.values(), *self.amaxes.values()]))
        gradients = [(name, next(given_back)) for name in wanted]
        self._seen_at_taps |= {name: saw for name, saw in zip(self.amaxes, given_back, strict=True) if saw is not None}
        return seen | {GRADIENT + n: self.unscaled(g) for n, g in gradients if g is not None}

    def _observe_passing(
        self, batch: Batch, names: frozenset[str], take: Take, rows: Callable[[Tensor], Tensor]
    ) -> None:
        """Pass taps to `take` during the forward pass and gradients during the backward pass, and keep none of them.

        A zero that requires a gradient is added to each probed tensor, as in the tapped program, so that the bits are
        the same.
        """
        asked = {name.removeprefix(GRADIENT) for name in names if name.startswith(GRADIENT)}
        given: set[str] = set()
        zeros: list[Tensor] = []

        def give(name: str, value: Tensor) -> None:
            # A recomputed tensor is tapped twice. The first time is that of the forward pass.
            if name not in given:
                given.add(name)
                take(TAPS, name, self._shown(value))

        def scaled(gradient: Tensor) -> Tensor:
            return self.unscaled(gradient.detach().to(self.policy.stream))

        def give_gradient(name: str, gradient: Tensor) -> None:
            give(GRADIENT + name, scaled(rows(gradient)))

        def tap(name: str, value: Tensor) -> Tensor:
            if name in asked and name not in self.parameters:
                zeros.append(torch.zeros((), dtype=self.policy.stream, device=self.device, requires_grad=True))
                value = value + zeros[-1].to(value.dtype)
                value.register_hook(partial(give_gradient, name))
            if name in names:
                give(name, rows(value.detach()))
            return value

        def give_own(name: str, p: Tensor) -> None:
            assert p.grad is not None
            give(GRADIENT + name, scaled(p.grad))
            p.grad = None

        inputs = *self.to_device(batch), self._total_alone(batch), *self.documents(batch)
        with torch.set_grad_enabled(bool(asked)):
            loss = self._run(partial(self._through, tap), *inputs)
        if not asked:
            return
        # A frozen parameter has no gradient, and the check reports it.
        own = {name: p for name, p in self.parameters.items() if name in asked and p.requires_grad}
        # Under sharding, autograd uses the gathered weights, and all of them get a gradient.
        touched = own if self.root is None else self.parameters
        before = {name: p.grad for name, p in touched.items()}
        hooks: list[Any] = []
        if self.root is None:
            hooks = [p.register_post_accumulate_grad_hook(partial(give_own, name)) for name, p in own.items()]
        try:
            for p in touched.values():
                p.grad = None
            if self.ranks is None or self.root is None:
                loss.backward(inputs=[*zeros, *own.values(), *self.amaxes.values()])
            else:
                self.ranks.backward(loss)
                for name, p in own.items():
                    give_own(name, p)
        finally:
            for hook in hooks:
                hook.remove()
            for name, p in touched.items():
                p.grad = before[name]
            if self.amaxes:
                self._seen_at_taps = dict(zip(self.amaxes, amaxes_seen(self.amaxes), strict=True))

    def amaxes_of_taps(self) -> Arrays:
        """Return the amaxes that the last tapped program measured, (3,) by layer."""
        return {name: to_numpy(saw) for name, saw in self._seen_at_taps.items()}

    def sketch(self, batch: Batch) -> dict[str, Observation]:
        """Return the sketches of one micro-batch (core/parity/judge/end_to_end.py); no whole tensor leaves the device.

        Taps and their gradients come from a separate tapped program, parameter gradients from the program of training.
        Only sequences with a loss weight are observed. For the gradient of a tap, only the sketch exists: its norm is
        the norm of the sketch, its largest value and its mean are NaN.
        """
        model = self.config.model
        rows = np.flatnonzero(batch.weights.any(axis=1))
        shapes = probe_shapes(model, len(rows), batch.tokens.shape[1])
        sizes = [math.prod(shape) for shape in probe_shapes(model, *batch.tokens.shape).values()]
        of_taps, of_gradients, table = self._sketches(max(sizes))
        zeros = {
            name: torch.zeros(K, dtype=self.policy.stream, device=self.device, requires_grad=True)
            for name in tap_names(model)
        }
        inputs = *self.to_device(batch), self._total_alone(batch)
        documents = self.documents(batch)
        loss, seen = self._run(of_taps, *inputs, torch.tensor(rows, device=self.device), zeros, table, *documents)
        by_tap = self._grads(loss, list(zeros.values()))
        loss, _ = self._micro_loss(*inputs, *documents)
        by_parameter = [None if g is None else whole(g) for g in self._grads(loss, list(self.parameters.values()))]
        found = {name: whole_observation(kept, shapes[name]) for name, kept in seen.items()}
        for name, grad in zip(zeros, by_tap, strict=True):
            if grad is not None:
                found[GRADIENT + name] = sketch_alone(self.unscaled(grad), shapes[name])
        if "nll" in found:
            found[PROBE_NLL] = found["nll"]
        grads = {n: self.unscaled(g) for n, g in zip(self.parameters, by_parameter, strict=True) if g is not None}
        return found | _of_gradients(of_gradients(grads, table), grads)

    def _sketches(self, largest: int) -> tuple[Any, Any, Tensor]:
        """Return the program that sketches taps, the one that sketches gradients, and the table of signs.

        largest: elements of the largest tap; the table covers it and the largest parameter.
        """
        largest = max(largest, *(p.numel() for p in self.parameters.values()))
        if self._sketching is None:
            of_taps, of_gradients = self.sketched_micro_loss, sketches_of
            if self.config.compile.enabled:
                of_gradients = self.compiled(of_gradients)
            if self._compiles_whole:
                of_taps = self.compiled_loss(of_taps)
            self._sketching = of_taps, of_gradients, sign_table(largest, self.device)
        of_taps, of_gradients, table = self._sketching
        if len(table) < largest + K:
            table = sign_table(largest, self.device)
            self._sketching = of_taps, of_gradients, table
        return self._sketching

    def sketched(self, grads: Tensors) -> dict[str, Observation]:
        """Return observations of gradients by parameter name, made only from their sketches."""
        _, _, table = self._sketches(0)
        return sketched_alone({name: sketch(grad, table=table) for name, grad in grads.items()}, grads)

    def keep_parts(self) -> None:
        """Prepare the next step to sketch what each of its micro-batches adds to the gradients."""
        self._parts = StepParts(self.parameters, self._sketches(0)[2])

    def parts_kept(self) -> Sequence[Mapping[str, Observation]]:
        """Return the sketches requested by `keep_parts`, `gradient/NAME` → observation for each micro-batch, in order.

        The session does not keep them any longer.
        """
        found, self._parts = self._parts, None
        return () if found is None else found.found

    def _sketched_gradients(self, loss: Tensor, nll: list[Tensor]) -> dict[str, Observation]:
        """Observe a step's NLL and gradients; of gradients, only the sketches are copied to the host."""
        if self.root is not None:  # under sharding, a whole gradient exists only while it is gathered
            seen: dict[str, Observation] = {}

            def see(kind: str, name: str, gradient: np.ndarray) -> None:
                seen[PARAMETER + name] = observed(gradient)

            return observations(self.hand_over(loss, nll, see), {}, self.config.model) | seen
        _, of_gradients, table = self._sketches(0)
        grads = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        found = _of_gradients(of_gradients(grads, table), grads)
        return {PROBE_NLL: observed(np.concatenate([to_numpy(n) for n in nll])), **found}

    def run_stage(self, stage: str, inputs: Arrays) -> Arrays:
        """Execute a stage, like the twin `JaxSession.run_stage`. Raises NotSupported if the stage is unknown."""
        self.switches.require()
        if stage == "update":
            return self._run_update(inputs)
        functions = stage_functions(self.config, self.model, self.policy, self.float8)
        if stage not in functions:
            raise NotSupported(f"no such stage: {stage}")
        return {name: to_numpy(value) for name, value in run_stage(functions[stage], inputs, self.policy).items()}

    def _run_update(self, inputs: Arrays) -> Arrays:
        names = [name for name in self.parameters if f"params/{name}" in inputs]
        parameters = {
            name: nn.Parameter(torch.tensor(inputs[f"params/{name}"], dtype=self.policy.stream, device=self.device))
            for name in names
        }
        optimizer = build_optimizer(self.config, parameters)
        kinds = {kind: [n for n in of if n in parameters] for kind, of in moment_names(self.config).items()}
        moments = {kind: {name: inputs[f"{kind}/{name}"] for name in of} for kind, of in kinds.items()}
        write_moments(self.config, optimizer, parameters, State(int(inputs["step"]), {}, moments))
        coefficient = torch.tensor(float(inputs["coefficient"]), dtype=self.policy.stream, device=self.device)
        for name, p in parameters.items():
            p.grad = torch.tensor(inputs[f"grads/{name}"], dtype=self.policy.stream, device=self.device) * coefficient
        set_learning_rate(optimizer, float(inputs["lr"]))
        optimizer.step()
        found = {f"params/{name}": to_numpy(p) for name, p in parameters.items()}
        return found | {
            f"{kind}/{name}": to_numpy(moment_of(optimizer, parameters[name], kind))
            for kind, of in kinds.items()
            for name in of
        }

    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        """Return per-token `nll` and `top1` (B, S) of `batch`, in eager mode, under the run's policy or a named one."""
        tokens, targets, _ = self.to_device(batch)
        chosen = POLICIES[policy] if policy else self.policy
        # The run's library of products multiplies operands of the run's dtype.
        if chosen.operand == self.policy.operand:
            chosen = replace(chosen, library=self.policy.library)
        with torch.no_grad(), self._declaring(chosen.name):
            scored = partial(scores, self.model, self.config.loss.chunk)
            nll, top1 = self._run(scored, tokens, targets, chosen, *self.documents(batch))
            return {"nll": to_numpy(nll), "top1": to_numpy(top1)}

    def next_token_logits(self, tokens: np.ndarray) -> np.ndarray:
        """Return logits (V,) of the token that follows `tokens`, int32 (n,), which are one document.

        n is at most the run's longest sequence.
        """
        with torch.no_grad():
            ids = torch.tensor(tokens[None], dtype=torch.long, device=self.device)
            return to_numpy(self._run(self._next_logits, ids))

    def cached_logits(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return logits (n, V) after the first `lengths[i]` tokens, as `lockstep sample` computes them.

        The first row needs a full pass; later rows use the key-value cache. Raises NotSupported as `decoder` does.
        """
        decode = self.decoder()
        return np.stack([decode(tokens[:length]) for length in lengths])

    def decoder(self) -> Callable[[np.ndarray], np.ndarray]:
        """Return a function from tokens (n,), int32, to the next logits (V,); its key-value cache persists over calls.

        Raises NotSupported if sampling has another precision policy than the run, or if weights are sharded.
        """
        if self.root is not None:
            raise NotSupported("a rank has no whole weights, which sampling needs")
        weights = {name: p.detach() for name, p in self.parameters.items()}
        decoder = self.decoder_class(self.config, weights, self.device.type)
        if decoder.policy.name != self.policy.name:
            raise NotSupported(f"it computes in {decoder.policy.name}, and the run in {self.policy.name}")
        return decoder.next_token_logits

    def _next_logits(self, ids: Tensor) -> Tensor:
        x_BSD = self.model.trunk(ids, self.policy)[:, -1:]
        return self.model.cap(self.model.logits(x_BSD, self.policy)[0, 0])


def _of_gradients(kept: Mapping[str, Kept], grads: Mapping[str, Tensor]) -> dict[str, Observation]:
    """Return the observations of parameter gradients, with two copies from the device for all of them."""
    if not kept:
        return {}
    sketches, statistics = (torch.stack(parts).detach().cpu() for parts in zip(*kept.values(), strict=True))
    rows = zip(kept, sketches, statistics, strict=True)
    return {PARAMETER + name: whole_observation((row, of), tuple(grads[name].shape)) for name, row, of in rows}
