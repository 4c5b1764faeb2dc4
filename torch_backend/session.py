"""The trainer behind the seam of core/backend.py: model, optimizer and compiled forward-backward of one run."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.core.backend import Arrays, Batch, Gradients, NotSupported, Session, State, StepRecord
from lockstep.core.checkpoint.format import PARAMS, read_state
from lockstep.core.checkpoint.reader import Stored
from lockstep.core.config.auto import settled
from lockstep.core.config.schema import LossConfig, RunConfig
from lockstep.core.errors import UserError
from lockstep.core.model.families import graph_of
from lockstep.core.model.groups import check_state, moment_names
from lockstep.core.model.init import init_parameter, init_parameters
from lockstep.core.model.names import GRADIENT, edge_names, fp8_modules, groups_of, probe_shapes, tap_names
from lockstep.core.parity.evidence.observations import PARAMETER, PROBE_NLL, Observation
from lockstep.core.parity.evidence.sketch import K
from lockstep.core.train.finite import NotFinite, first_place
from lockstep.core.train.loss_scale import SCALE
from lockstep.core.train.metrics import RECOMPILED, norms_by_group
from lockstep.core.train.schedule import learning_rate
from lockstep.core.train.skipped_steps import first_scalars, is_made, leaves_out, own_scalars, scalars_after
from lockstep.torch_backend.attention import check_kernel, in_force
from lockstep.torch_backend.checkpoint import Writer, WritingTorch
from lockstep.torch_backend.kernels.bitsandbytes_adamw import check_bitsandbytes
from lockstep.torch_backend.kernels.float8 import float8
from lockstep.torch_backend.kernels.library_heads import check_head
from lockstep.torch_backend.kernels.recompute import in_force as recompute_in_force
from lockstep.torch_backend.model import Linear, Llama, Tap, no_tap
from lockstep.torch_backend.optim import (
    build_optimizer,
    clip_coefficient,
    global_norm,
    in_words,
    put_moments,
    read_moments,
    set_learning_rate,
    write_moments,
)
from lockstep.torch_backend.precision import POLICIES, Policy, policy_of, products_in_force
from lockstep.torch_backend.ranks.ddp import Ranks, Sharing
from lockstep.torch_backend.ranks.ddp import in_force as ranks_in_force
from lockstep.torch_backend.ranks.fsdp import ShardedRanks
from lockstep.torch_backend.ranks.sharded_tensors import (
    Root,
    check_sharded,
    cut,
    is_sharded,
    local,
    put,
    rows_of,
    whole,
)
from lockstep.torch_backend.stages import run_stage, stage_functions
from lockstep.torch_backend.switches import INDUCTOR, Switches, check_environment
from lockstep.torch_backend.tools.attention_logits import largest_logits
from lockstep.torch_backend.tools.deterministic import check_deterministic, costs, guarded, switch
from lockstep.torch_backend.tools.memory import memory
from lockstep.torch_backend.tools.nvtx import in_force as ranges_in_force
from lockstep.torch_backend.tools.nvtx import marking, part
from lockstep.torch_backend.tools.sketch import (
    Kept,
    lift,
    sign_table,
    sketch,
    sketch_alone,
    sketches_of,
    statistics,
    whole_observation,
)
from lockstep.torch_backend.tools.step_timer import ACCUMULATED, StepClock
from lockstep.torch_backend.upload import on_device, uploaded

Tensors = Mapping[str, Tensor]
# torch.compile refuses to compile one function more often than this.
SESSIONS = 64


class TorchSession:
    """One run in torch. Subclass and override a method to make another candidate (docs/guide/candidates.md)."""

    def __init__(self, config: RunConfig) -> None:
        self.device = resolve_device(config)
        # With what `auto` stands for here in its place.
        self.config = config = settled(config, self.device.type)
        switch(config, self.device)
        self.switches = Switches(config.precision.policy, self.device)
        self.switches.set()
        self.policy: Policy = policy_of(config, self.device)
        self.float8 = float8(config.precision, self.device)
        # Gives the parts of a step their names (torch_backend/tools/nvtx.py).
        self.mark = marking(config, self.device)
        self.steps_done = 0
        # What torch.compile has made for the step, and the lengths of sequences that it has made it for.
        self.programs, self._stepped = 0, set[int]()
        self.scalars = first_scalars(config)
        self.clock = StepClock(self.device)
        # The outermost module of a model whose weights are cut over ranks.
        self.root: Root | None = None
        self.model = self.build_model()
        if self.model.has_own_head:
            self.model.head = config.loss.model_copy(update={"head": "full"})
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = self.build_optimizer()
        self._micro_loss = self.build_program() if config.compile.enabled else self.micro_loss
        self._tapped_programs: dict[frozenset[str], Any] = {}
        self._sketching: tuple[Any, Any, Tensor] | None = None
        # Kept only while `gradients` or `step_and_gradients` asks.
        self._program_gradients: dict[str, Tensor] | None = None
        self._of_step: Gradients | None = None
        self._show_step = False
        self.ranks: Sharing | None = None
        self._writer = Writer(self)
        self._initialise()

    def build_model(self) -> Llama:
        """The model with unset weights in the policy's stream dtype (RoPE tables stay FP64 until they are used)."""
        with torch.device("meta"):
            model = Llama(self.config)
        model.to(self.policy.stream)
        if is_sharded(self.config) and dist.is_initialized():
            self.root = cut(model, self.config, self.device)
            # A compiled block that was tapped would be another program the second time. Kept, it has the same bits.
            model.tapped_again = not self.config.compile.enabled
        (self.root or model).to_empty(device=self.device)
        model.place_rope(self.device)
        modules = dict(model.named_modules())
        for name in fp8_modules(self.config):
            linear = modules[name]
            assert isinstance(linear, Linear)
            linear.float8 = self.float8
        return model

    def build_program(self) -> Any:
        """The compiled forward pass: of the whole model, or one program for all blocks and one for the chunked head.

        The blocks' program is compiled once; what stands between them runs eagerly.
        """
        if self.config.compile.scope == "model":
            return self.compiled(self.micro_loss)
        for block in self.model.blocks:
            block.forward = self.compiled(block.forward)
        self.model.chunked_loss = self.compiled(self.model.chunked_loss)
        return self.micro_loss

    def build_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer over the model's parameters."""
        return build_optimizer(self.config, self.parameters)

    def join_ranks(self) -> None:
        """Share batches with the default process group. Every rank calls it (torch_backend/ranks/session.py)."""
        self.ranks = self.build_ranks()
        self._micro_loss = self.ranks.alone
        self._writer.join_ranks()

    def build_ranks(self) -> Sharing:
        """How this session shares its batches with the other ranks."""
        return Ranks(self) if self.root is None else ShardedRanks(self)

    def state(self) -> State:
        """A copy of weights, moments and step count. Where weights are cut over ranks, every rank calls it."""
        moments = read_moments(self.config, self.optimizer, self.parameters)
        return State(
            self.steps_done,
            {name: _numpy(p) for name, p in self.parameters.items()},
            {kind: {name: _numpy(m) for name, m in by_name.items()} for kind, by_name in moments.items()},
            dict(self.scalars),
        )

    def load(self, state: State) -> None:
        """Take over a canonical state. Raises ValueError if names or shapes are not this model's."""
        check_state(self.config, state)
        self._load_parameters(state.params)
        write_moments(self.config, self.optimizer, self.parameters, state)
        self._go_on_from(state.step, state.scalars)

    def restore(self, folder: Path, step: int, scalars: Mapping[str, float]) -> None:
        """Take over the state in a checkpoint's folder; of each tensor, what this rank holds is all that is read.

        Raises ValueError if names or shapes are not this model's, and what reading raises.
        """
        if self.root is None:
            self.load(read_state(folder, step, scalars))
            return
        with Stored(folder) as stored:
            check_state(self.config, stored.shaped(step, scalars))
            for name, p in self.parameters.items():
                local(p).copy_(torch.from_numpy(stored.read(PARAMS, name, rows_of(p))))
            updates = State(step, {}, {}, scalars).updates
            put_moments(
                self.config,
                self.optimizer,
                self.parameters,
                updates,
                lambda kind, name: stored.read(kind, name, rows_of(self.parameters[name])),
            )
        self._go_on_from(step, scalars)

    def _go_on_from(self, step: int, scalars: Mapping[str, float]) -> None:
        self.steps_done = step
        self.scalars = own_scalars(self.config, scalars)

    @part("checkpoint")
    def write(self, folder: Path) -> WritingTorch:
        """Begin to write the state by torch.distributed.checkpoint; every rank of the session calls it."""
        return self._writer.begin(folder)

    def random_state(self) -> dict[str, np.ndarray]:
        """States of torch's random number generators, uint8 by name. Nothing here draws; a subclass may."""
        found = {"torch_cpu": torch.get_rng_state().numpy().copy()}
        if self.device.type == "cuda":
            found["torch_cuda"] = torch.cuda.get_rng_state(self.device).numpy().copy()
        return found

    def set_random_state(self, states: Arrays) -> None:
        """Take over what `random_state` gave; what is not there, or of another device, stays as it is."""
        if "torch_cpu" in states:
            torch.set_rng_state(torch.from_numpy(states["torch_cpu"].copy()))
        if "torch_cuda" in states and self.device.type == "cuda":
            torch.cuda.set_rng_state(torch.from_numpy(states["torch_cuda"].copy()), self.device)

    @part("step")
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        """Accumulate gradients over micro-batches, clip by the global norm, update. `norms` adds norms by group.

        If the loss or a gradient is not finite, weights and moments stay: raises NotFinite, or counts a step left out.
        """
        made = self.programs
        self.clock.begin()
        loss, nll = self.accumulate(batch)
        self.clock.mark(ACCUMULATED)
        anew = self._made_anew(self.programs - made, batch.tokens.shape[1])
        if self._show_step:
            with self.clock.aside("checks"):
                self._of_step = self._gradients(loss, nll)
        grads = [local(p.grad) for p in self.parameters.values() if p.grad is not None]
        norm = self._global_norm(grads)
        if norms:
            with self.clock.aside("logging"):
                before = {n: p.detach().clone() for n, p in self.parameters.items()}
                group_norms = self._norms({n: p.grad for n, p in self.parameters.items()})
        coefficient = self.clip_coefficient(norm).to(self.policy.stream)
        lr = learning_rate(self.config.optim, self.steps_done + 1, self.config.train.steps)
        # The one wait for the device in a step: what is not finite must be known before it reaches the weights.
        told_loss, told_norm, told_coefficient = torch.stack([x.double() for x in (loss, norm, coefficient)]).tolist()
        record = StepRecord(
            step=self.steps_done + 1,
            loss=told_loss,
            loss_weight=float(batch.weights.sum(dtype=np.float64)),
            lr=lr,
            grad_norm=told_norm,
            clip_coefficient=told_coefficient,
            digest=batch.digest(),
            tokens=batch.targets.size,
        )
        finite = is_made(self.config, told_loss, told_norm)
        if not finite and not leaves_out(self.config):
            raise NotFinite(record, self._first_not_finite(told_loss))
        if not finite and SCALE not in self.scalars:
            record = replace(record, left_out=self._first_not_finite(told_loss))
        self._update(grads, coefficient, lr, finite)
        metrics = dict(self.scalars) | ({RECOMPILED: float(anew)} if anew else {})
        if norms:
            with self.clock.aside("logging"):
                updates = {n: p.detach() - before[n] for n, p in self.parameters.items()}
                metrics |= norms_by_group(
                    groups_of(self.config.model), group_norms, self._norms(before), self._norms(updates)
                )
        self.clock.end()
        return replace(record, metrics=metrics)

    def _made_anew(self, programs: int, length: int) -> int:
        """Of the programs that a step had made, those that are news: one for each of the run's lengths is none."""
        due = not self._stepped or length in set(self.config.train.lengths) - self._stepped
        self._stepped.add(length)
        return 0 if due else programs

    def _global_norm(self, grads: list[Tensor]) -> Tensor:
        with self.mark("clip"):
            norm = global_norm(grads)
            return norm if self.ranks is None else self.ranks.norm(norm)

    def _update(self, grads: list[Tensor], coefficient: Tensor, lr: float, finite: bool) -> None:
        with self.mark("clip"):
            torch._foreach_mul_(grads, coefficient)
        set_learning_rate(self.optimizer, lr)
        self.switches.require()
        if finite:
            with self.mark("optimizer"):
                self.optimizer.step()
        self.scalars = self.scalars_after(finite)
        self.steps_done += 1

    def seconds_of_step(self) -> Mapping[str, float]:
        """Seconds of the last step by part, as `StepClock.take` says."""
        return self.clock.take()

    def memory(self) -> Mapping[str, float]:
        """Bytes in use on the device, and the most since the last call; on the CPU, of this process."""
        return memory(self.device)

    def attention_logits(self, batch: Batch) -> np.ndarray:
        """(layers,) the largest attention logit of each layer (torch_backend/tools/attention_logits.py), in eager."""
        tokens, _, _ = self.to_device(batch)
        with torch.no_grad():
            found = self._run(partial(largest_logits, self.model), tokens, self.policy, *self.documents(batch))
        largest: np.ndarray = found
        return largest

    def _first_not_finite(self, loss: float) -> str:
        """Where this rank, by itself, first had what is not finite; nothing if it had not."""
        odd = [p.grad is not None and not bool(local(p.grad).isfinite().all()) for p in self.parameters.values()]
        odd = odd if self.ranks is None else list(self.ranks.everywhere(odd))
        found = [name for name, is_odd in zip(self.parameters, odd, strict=True) if is_odd]
        if self.ranks is not None:
            loss, own = self.ranks.not_finite()
            found = [name for name in found if id(self.parameters[name]) in own]
        return first_place(loss, found, len(self.parameters))

    def clip_coefficient(self, norm: Tensor) -> Tensor:
        """What the gradients are multiplied by, from their global norm; float64 scalars."""
        return clip_coefficient(self.config.optim, norm)

    def scalars_after(self, finite: bool) -> dict[str, float]:
        """Loss scale and counts after a step that was finite or not."""
        return scalars_after(self.config, self.scalars, finite)

    def gradients(self, batch: Batch) -> Gradients:
        """Per-token NLL, loss and accumulated gradients of `batch`, through the program that trains."""
        self._program_gradients = {}
        found = self._gradients(*self.accumulate(batch))
        self.optimizer.zero_grad(set_to_none=True)
        of_program, self._program_gradients = self._program_gradients, None
        return replace(found, program={name: _numpy(g) for name, g in of_program.items()})

    def own_gradients(self, micro: Batch) -> Arrays:
        """Gradients of a micro-batch as this rank by itself has them; all ranks call it, each with its own."""
        if not isinstance(self.ranks, ShardedRanks):
            return self.gradients(micro).grads
        inputs = *self.to_device(micro), self.total_weight(micro), *self.documents(micro)
        return {n: _numpy(g / self.scale) for n, g in self.ranks.unreduced(self.micro_loss, *inputs).items()}

    def step_and_gradients(self, batch: Batch, *, norms: bool = False) -> tuple[StepRecord, Gradients | None]:
        """`step`, and the gradients that it made before clipping; None if a subclass steps without showing them."""
        self._of_step, self._show_step = None, True
        try:
            return self.step(batch, norms=norms), self._of_step
        finally:
            self._of_step, self._show_step = None, False

    def _gradients(self, loss: Tensor, nll: list[Tensor]) -> Gradients:
        grads = {name: _numpy(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        return Gradients(np.concatenate([_numpy(n) for n in nll]), loss.item(), grads)

    def observe(self, batch: Batch, taps: Sequence[str]) -> Arrays:
        """Taps and gradients of one micro-batch from the tapped program, compiled if the trainer is.

        Besides taps, names are `grad/NAME` for a tap, an edge or a parameter. What the model does not pass through its
        tap is left out. Raises NotSupported for a name that no Llama has.
        """
        taps_of_model = tap_names(self.config.model)
        probed = (*taps_of_model, *edge_names(self.config.model), *self.parameters)
        if unknown := sorted(set(taps) - {*taps_of_model, *(GRADIENT + name for name in probed)}):
            raise NotSupported(f"no such tap: {', '.join(unknown)}")
        return self._observe_tapped(batch, frozenset(taps))

    def _observe_tapped(self, batch: Batch, names: frozenset[str]) -> dict[str, np.ndarray]:
        program = self._tapped_programs.get(names)
        if program is None:
            program = partial(self.tapped_micro_loss, frozenset(n for n in names if not n.startswith(GRADIENT)))
            program = self._tapped_programs[names] = self.compiled(program) if self._compiles_whole else program
        asked = [name.removeprefix(GRADIENT) for name in names if name.startswith(GRADIENT)]
        shapes = probe_shapes(self.config.model, *batch.tokens.shape)
        probes = {
            name: torch.zeros(shapes[name], dtype=self.policy.stream, device=self.device, requires_grad=True)
            for name in sorted(asked)
            if name not in self.parameters
        }
        inputs = *self.to_device(batch), self._total_alone(batch), probes, *self.documents(batch)
        with torch.set_grad_enabled(bool(asked)):
            loss, seen = self._run(program, *inputs)
        wanted = probes | {name: p for name, p in self.parameters.items() if name in asked}
        grads = self._grads(loss, list(wanted.values())) if wanted else ()
        found = seen | {GRADIENT + n: g for n, g in zip(wanted, grads, strict=True) if g is not None}
        return {n: _numpy(v / self.scale if n.startswith(GRADIENT) else v) for n, v in found.items()}

    def tapped_micro_loss(
        self,
        wanted: frozenset[str],
        tokens: Tensor,
        targets: Tensor,
        weights: Tensor,
        total: Tensor,
        probes: Tensors,
        *documents: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`micro_loss`, and the taps that it passed; a zero is added to each probed one: its gradient is the tap's."""
        seen: dict[str, Tensor] = {}

        def tap(name: str, value: Tensor) -> Tensor:
            if name in probes:
                value = value + probes[name].to(value.dtype)
            # What is recomputed passes here twice. The first time is the forward pass.
            if name in wanted and name not in seen:
                seen[name] = value.detach()
            return value

        return self._through(tap, tokens, targets, weights, total, *documents), seen

    def _through(
        self, tap: Tap, tokens: Tensor, targets: Tensor, weights: Tensor, total: Tensor, *documents: Tensor
    ) -> Tensor:
        """The loss of `micro_loss`, the model's tensors passing `tap` on their way."""
        self.model.tap = tap
        try:
            loss, _ = self.micro_loss(tokens, targets, weights, total, *documents)
        finally:
            self.model.tap = no_tap
        return loss

    def sketch(self, batch: Batch) -> dict[str, Observation]:
        """What is kept of one micro-batch (core/parity/judge/end_to_end.py), without a tensor leaving the device.

        Taps and their gradients come from a tapped program of its own, parameter gradients from the one that trains.
        Only the sequences that hold the batch's loss weight are observed. Of a tap's gradient nothing
        but the sketch is known: its norm is the sketch's, its largest value and its mean are NaN.
        """
        model = self.config.model
        rows = np.flatnonzero(batch.weights.any(axis=1))
        shapes = probe_shapes(model, len(rows), batch.tokens.shape[1])
        if self._sketching is None:
            sizes = [math.prod(shape) for shape in probe_shapes(model, *batch.tokens.shape).values()]
            table = sign_table(max(*sizes, *(p.numel() for p in self.parameters.values())), self.device)
            of_taps, of_gradients = self.sketched_micro_loss, sketches_of
            if self.config.compile.enabled:
                of_gradients = self.compiled(of_gradients)
            if self._compiles_whole:
                of_taps = self.compiled(of_taps)
            self._sketching = of_taps, of_gradients, table
        of_taps, of_gradients, table = self._sketching
        zeros = {
            name: torch.zeros(K, dtype=self.policy.stream, device=self.device, requires_grad=True)
            for name in tap_names(model)
        }
        inputs = *self.to_device(batch), self._total_alone(batch)
        documents = self.documents(batch)
        loss, seen = self._run(of_taps, *inputs, torch.tensor(rows, device=self.device), zeros, table, *documents)
        by_tap = self._grads(loss, list(zeros.values()))
        loss, _ = self._micro_loss(*inputs, *documents)
        by_parameter = self._grads(loss, list(self.parameters.values()))
        found = {name: whole_observation(kept, shapes[name]) for name, kept in seen.items()}
        for name, grad in zip(zeros, by_tap, strict=True):
            if grad is not None:
                found[GRADIENT + name] = sketch_alone(grad / self.scale, shapes[name])
        if "nll" in found:
            found[PROBE_NLL] = found["nll"]
        grads = {n: g / self.scale for n, g in zip(self.parameters, by_parameter, strict=True) if g is not None}
        kept = of_gradients(grads, table)
        return found | {PARAMETER + name: whole_observation(kept[name], tuple(g.shape)) for name, g in grads.items()}

    def sketched_micro_loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        weights: Tensor,
        total: Tensor,
        rows: Tensor,
        probes: Tensors,
        table: Tensor,
        *documents: Tensor,
    ) -> tuple[Tensor, dict[str, Kept]]:
        """`micro_loss`, and sketch and statistics of each tap's `rows`, its first axis.

        Sᵀ·0 is added to them, so that the gradient of the probe, 0, is the sketch of the tap's gradient.
        """
        seen: dict[str, Kept] = {}

        def tap(name: str, value: Tensor) -> Tensor:
            if name in probes:
                part = value.detach()[rows]
                value = value.index_add(0, rows, lift(probes[name], tuple(part.shape), table).to(value.dtype))
                seen[name] = sketch(part, table=table), statistics(part)
            return value

        return self._through(tap, tokens, targets, weights, total, *documents), seen

    def run_stage(self, stage: str, inputs: Arrays) -> Arrays:
        """Execute one stage on the given inputs: see `JaxSession.run_stage`, whose torch twin this is."""
        self.switches.require()
        if stage == "update":
            return self._run_update(inputs)
        functions = stage_functions(self.config, self.model, self.policy, self.float8)
        if stage not in functions:
            raise NotSupported(f"no such stage: {stage}")
        return {name: _numpy(value) for name, value in run_stage(functions[stage], inputs, self.policy).items()}

    def _run_update(self, inputs: Arrays) -> Arrays:
        parameters = {
            name: nn.Parameter(torch.tensor(value, dtype=self.policy.stream, device=self.device))
            for name, value in ((name, inputs[f"params/{name}"]) for name in self.parameters)
        }
        optimizer = build_optimizer(self.config, parameters)
        kinds = moment_names(self.config)
        moments = {kind: {name: inputs[f"{kind}/{name}"] for name in names} for kind, names in kinds.items()}
        write_moments(self.config, optimizer, parameters, State(int(inputs["step"]), {}, moments))
        coefficient = torch.tensor(float(inputs["coefficient"]), dtype=self.policy.stream, device=self.device)
        for name, p in parameters.items():
            p.grad = torch.tensor(inputs[f"grads/{name}"], dtype=self.policy.stream, device=self.device) * coefficient
        set_learning_rate(optimizer, float(inputs["lr"]))
        optimizer.step()
        after: dict[str, Mapping[str, Tensor]] = {
            "params": parameters,
            **read_moments(self.config, optimizer, parameters),
        }
        return {f"{kind}/{name}": _numpy(value) for kind, tree in after.items() for name, value in tree.items()}

    def costs_of_determinism(self, batch: Batch) -> Sequence[float]:
        """Time of forward and backward pass / time without `deterministic = true`, several times."""
        return costs(self, batch)

    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        """Per-token `nll` and `top1` of `batch` in eager, under the run's policy or a named one."""
        tokens, targets, _ = self.to_device(batch)
        chosen = replace(POLICIES[policy], onednn=self.policy.onednn) if policy else self.policy
        with torch.no_grad(), self._declaring(chosen.name):
            nll, top1 = self._run(self.model.scores, tokens, targets, chosen, *self.documents(batch))
            return {"nll": _numpy(nll), "top1": _numpy(top1)}

    def next_token_logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits (V,) of the token that follows `tokens`, int32 (n,), n at most the run's longest sequence.

        They are one document.
        """
        with torch.no_grad():
            ids = torch.tensor(tokens[None], dtype=torch.long, device=self.device)
            return _numpy(self._run(self._next_logits, ids))

    def _next_logits(self, ids: Tensor) -> Tensor:
        return self.model.logits(self.model.trunk(ids, self.policy)[:, -1:], self.policy)[0, 0]

    def close(self) -> None:
        """Nothing is held beyond the object itself."""

    def to_device(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (B, S) and targets (B, S) as int64, weights (B, S) in the stream dtype, on the device."""
        tokens, targets, weights = on_device(batch, ("tokens", "targets", "weights"), self.device)
        return tokens, targets, weights.to(self.policy.stream)

    def documents(self, batch: Batch) -> tuple[Tensor, ...]:
        """(B, S) as int64 on the device, alone in a tuple, where attention asks for documents; else nothing.

        Raises ValueError if it does and the batch has none.
        """
        found = batch.documents_for(self.config.attention)
        return () if found is None else tuple(on_device(batch, ("documents",), self.device))

    def accumulate(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Gradients of the batch into `.grad`; returns the loss and the per-token NLL of each micro-batch.

        Each micro-batch contributes Σ weight·nll divided by the *whole* batch's Σ weight, so that accumulation
        weights by
        tokens: the sum over micro-batches is the mean over the batch, however unevenly the weights lie. Several ranks
        (torch_backend/ranks/ddp.py) compute a part of the micro-batches each.
        """
        micros = batch.cut(self.config.train)
        mine = uploaded(self.ranks.own(micros) if self.ranks else micros, self.device)
        total = self.total_weight(batch)
        if self.ranks:
            self.ranks.arrange(micros, lambda program: self._forward_backward(mine[0], program, total))
        # What CUDA graphs give is overwritten by their next replay: gradients are added to memory of their own.
        self.optimizer.zero_grad(set_to_none=not self.replays)
        for p in self.parameters.values() if self.replays else ():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        nll = []
        programs = self.ranks.plan(micros) if self.ranks else (self._micro_loss for _ in mine)
        for micro, program in zip(mine, programs, strict=True):
            micro_loss, micro_nll = self._forward_backward(micro, program, total)
            loss += micro_loss.detach()
            nll.append(micro_nll.detach().clone() if self.replays else micro_nll.detach())
        if self.ranks and self.ranks.shares(micros):
            shown = self._show_step or self._program_gradients is not None
            with self.mark("reduction"):
                loss, nll = self.ranks.together(loss, nll, shown)
        grads = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        if self._program_gradients is not None and len(micros) == 1:
            self._program_gradients = {name: g / self.scale for name, g in grads.items()}
        if self.scale != 1:
            torch._foreach_div_([local(grad) for grad in grads.values()], self.scale)
        return loss / self.scale, nll

    @part("micro-batch")
    def _forward_backward(self, micro: Batch, program: Any, total: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gradients of a micro-batch to `.grad`; returns its loss and per-token NLL."""
        self.switches.require()
        tokens, targets, weights = self.to_device(micro)
        if self.replays:
            torch.compiler.cudagraph_mark_step_begin()
        made = self._programs_made()
        with guarded(self, micro):
            with self.mark("forward"):
                loss, nll = program(tokens, targets, weights, total, *self.documents(micro))
            self.programs += self._programs_made() - made
            with self.mark("backward"):
                loss.backward()
        return loss, nll

    def _programs_made(self) -> int:
        """Graphs that torch.compile has compiled in this process."""
        if not self.config.compile.enabled:
            return 0
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"]

    def micro_loss(
        self, tokens: Tensor, targets: Tensor, weights: Tensor, total: Tensor, *documents: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Σ weight·loss / total of one micro-batch, and its per-token losses (B, S). documents: as `documents` says."""
        return self.model.loss(tokens, targets, weights, total, self.policy, *documents)

    @property
    def replays(self) -> bool:
        """Whether the program is a CUDA graph."""
        return self.device.type == "cuda" and self.config.compile.enabled and self.config.compile.mode != "default"

    @property
    def scale(self) -> float:
        """The loss scale, 1 but under fp16."""
        return self.scalars.get(SCALE, 1.0)

    def total_weight(self, batch: Batch) -> Tensor:
        """Σ weight over a batch / loss scale, a float64 scalar on the device: what the loss is divided by.

        Every gradient is then as much larger as the loss scale says; it is a power of two, and nothing is rounded.
        """
        total = float(batch.weights.sum(dtype=np.float64)) / self.scale
        # Filled on the device: a copy to it would keep the host.
        return torch.full((), total, dtype=torch.float64, device=self.device)

    def compiled(self, program: Any) -> Any:
        """`program` through torch.compile as the configuration says."""
        config = self.config.compile
        # A process may open many sessions (a replay, a bisection): each has programs of the same few functions.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SESSIONS)
        # A tap inside a part that is recomputed notes what it sees in the forward pass alone.
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        options: Any = None
        if config.backend == "inductor":
            # Inductor drops a cast to bf16 and back inside a fusion, and with it the policy's rounding of the head's
            # operands.
            options = {"emulate_precision_casts": True, **INDUCTOR, **torch._inductor.list_mode_options(config.mode)}
        made = torch.compile(program, fullgraph=True, dynamic=False, backend=config.backend, options=options)
        budget = self.config.recompute.memory_budget

        def run(*arguments: Any) -> Any:
            with torch._functorch.config.patch(activation_memory_budget=budget):
                return made(*arguments)

        return made if budget == 1.0 else run

    def _run(self, program: Any, *inputs: Any) -> Any:
        """A program over the model's weights, on this rank alone or, where they are cut, on all of them."""
        self.switches.require()
        return program(*inputs) if self.ranks is None else self.ranks.run(program, *inputs)

    @contextmanager
    def _declaring(self, policy: str) -> Iterator[None]:
        """While something is computed under another policy: what that one declares is in force."""
        own, other = self.switches, Switches(policy, self.device)
        if other.declared == own.declared:
            yield
            return
        own.require()
        self.switches = other
        try:
            other.set()
            yield
        finally:
            self.switches = own
            own.set()

    def _grads(self, loss: Tensor, wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
        if self.ranks is None:
            return torch.autograd.grad(loss, wanted, allow_unused=True)
        return self.ranks.grads(loss, wanted)

    def _total_alone(self, batch: Batch) -> Tensor:
        """`total_weight` of what rank 0 computes alone."""
        total = self.total_weight(batch)
        return total if self.ranks is None else self.ranks.total(total)

    @property
    def _compiles_whole(self) -> bool:
        """Whether a program of the whole model can be compiled: not around what gathers its weights."""
        return self.config.compile.enabled and self.root is None

    def _initialise(self) -> None:
        """The initial weights; where they are cut, a parameter at a time, so that nobody holds the whole model."""
        model, seed = self.config.model, self.config.seed
        if self.root is None:
            self._load_parameters(init_parameters(model, seed))
            return
        for name, parameter in graph_of(model).parameters.items():
            put(self.parameters[name], init_parameter(parameter, seed))

    def _load_parameters(self, params: Arrays) -> None:
        for name, p in self.parameters.items():
            put(p, params[name])

    def _norms(self, tensors: Mapping[str, Tensor | None]) -> dict[str, float]:
        present = {name: local(t) for name, t in tensors.items() if t is not None}
        if not present:
            return {}
        norms = torch.stack(list(torch._foreach_norm(list(present.values()))))
        norms = norms if self.ranks is None else self.ranks.norm(norms)
        return dict(zip(present, norms.tolist(), strict=True))


class TorchBackend:
    """Opens `session_class` on a configuration; a candidate names its own session class."""

    name = "torch"
    # Opens sessions of several ranks.
    ranked = True
    session_class: type[TorchSession] = TorchSession

    def open(self, config: RunConfig) -> Session:
        """A session at the initial weights of `config`, of several ranks if it says so.

        Raises UserError if the device is not there, or the attention kernel that was asked for cannot run on it.
        """
        check_kernel(config, resolve_device(config))
        check_head(config.loss, resolve_device(config))
        check_bitsandbytes(config.optim)
        check_deterministic(config, resolve_device(config))
        check_sharded(config)
        if config.train.ranks == 1:
            return self.open_rank(config)
        from lockstep.torch_backend.ranks.session import open_ranked

        return open_ranked(self, config)

    def open_rank(self, config: RunConfig) -> TorchSession:
        """The session of one rank, before it joins the others."""
        return self.session_class(config)

    def describe(self, config: RunConfig) -> Mapping[str, Any]:
        """Versions, device and what is in force. Raises UserError as `open` does."""
        device = resolve_device(config)
        check_kernel(config, device)
        check_head(config.loss, device)
        check_bitsandbytes(config.optim)
        check_deterministic(config, device)
        check_environment(config.precision.policy, device)
        check_sharded(config)
        float8(config.precision, device)
        config = settled(config, device.type)
        scope = "" if config.compile.scope == "model" else ", block by block"
        mode = "" if config.compile.mode == "default" else f", {config.compile.mode}"
        compiled = (
            f"torch.compile({config.compile.backend}, fullgraph{mode}{scope})" if config.compile.enabled else "eager"
        )
        return {
            "backend": self.name,
            "versions": {"torch": torch.__version__},
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
            "device_kind": device.type,
            "threads": torch.get_num_threads(),
            "in_force": {
                "program": compiled,
                **products_in_force(config, device),
                "attention": in_force(config.attention, device, config.deterministic),
                "loss head": loss_in_force(config.loss),
                "recomputed": recompute_in_force(config.recompute),
                "optimizer": in_words(config),
                **ranks_in_force(config, device.type),
                **ranges_in_force(config, device),
            },
        }


def resolve_device(config: RunConfig) -> torch.device:
    """The device asked for; `auto` takes CUDA where there is one. Raises UserError if CUDA was asked for in vain."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device = 'cuda' was asked for, but torch sees no CUDA device here; use device = 'cpu' or 'auto'"
        )
    if config.device == "cpu" or not torch.cuda.is_available():
        if config.precision.policy == "tf32":
            raise UserError("precision.policy = 'tf32' is a format of CUDA's tensor cores; on the CPU use fp32")
        return torch.device("cpu")
    return torch.device("cuda")


def loss_in_force(loss: LossConfig) -> str:
    """How the head is computed, for the table at start."""
    chunks = f"chunks of {loss.chunk:,} tokens"
    how = {
        "full": "whole logits, FP32 logits",
        "chunked": f"{chunks}, gradients in the forward pass, FP32 logits",
        "torch": f"torch's linear_cross_entropy, {chunks}",
        "liger": "Liger-Kernel's fused linear cross-entropy, FP32 sums",
        "cce": "cut-cross-entropy without its filter",
    }[loss.head]
    return how + (f", z-loss {loss.z_loss:g}" if loss.z_loss else "")


def _numpy(tensor: Tensor | None) -> np.ndarray:
    assert tensor is not None
    array: np.ndarray = whole(tensor.detach()).to("cpu", copy=True).numpy()
    return array
