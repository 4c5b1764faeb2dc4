"""The session of one run in torch: weights, optimizer state and the training step. It implements core/backend.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.backend import Arrays, Batch, Gradients, State, StepRecord
from lockstep.core.capabilities import Take, collects
from lockstep.core.checkpoint.format import PARAMS, read_state
from lockstep.core.checkpoint.reader import Stored
from lockstep.core.config.auto import settled
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.families import graph_of
from lockstep.core.model.groups import check_state, moment_names
from lockstep.core.model.init import init_parameter, init_parameters
from lockstep.core.model.names import groups_of
from lockstep.core.parity.evidence.observations import Observation
from lockstep.core.run.ranks import is_sharded
from lockstep.core.streams import GRADS, PROGRAM, Collected
from lockstep.core.train.finite import NotFinite, first_place
from lockstep.core.train.fp8_amax import Amaxes, amaxes_in_force, without_amaxes
from lockstep.core.train.loss_scale import SCALE
from lockstep.core.train.metrics import RECOMPILED, norms_by_group
from lockstep.core.train.schedule import learning_rate
from lockstep.core.train.skipped_steps import first_scalars, is_made, leaves_out, own_scalars, scalars_after
from lockstep.torch_backend.checkpoint import Writer, WritingTorch
from lockstep.torch_backend.checksums import checksums
from lockstep.torch_backend.device import resolve_device
from lockstep.torch_backend.host_memory import HOST_MEMORY
from lockstep.torch_backend.kernels.float8 import amaxes_seen, apply_float8, float8, set_amaxes
from lockstep.torch_backend.kernels.loss_head import apply_loss_head, has_own_head
from lockstep.torch_backend.kernels.recompute import apply_recompute
from lockstep.torch_backend.model import Transformer
from lockstep.torch_backend.observe import Observes
from lockstep.torch_backend.optim import (
    begun_moment,
    build_optimizer,
    clip_coefficient,
    global_norm,
    moment_of,
    put_moments,
    set_learning_rate,
    takes_fp32,
    update_counts,
    write_moments,
)
from lockstep.torch_backend.precision import Policy, policy_of
from lockstep.torch_backend.ranks.ddp import Ranks
from lockstep.torch_backend.ranks.fsdp import ShardedRanks
from lockstep.torch_backend.ranks.sharded_tensors import (
    Root,
    cut,
    local,
    own_rows,
    part_shape,
    part_to_numpy,
    put,
    rows_of,
    to_numpy,
)
from lockstep.torch_backend.ranks.sharing import Sharing
from lockstep.torch_backend.step_parts import StepParts
from lockstep.torch_backend.switches import Switches
from lockstep.torch_backend.tools.compile_time import COMPILE_TIME
from lockstep.torch_backend.tools.deterministic import costs, guarded, switch
from lockstep.torch_backend.tools.memory import memory
from lockstep.torch_backend.tools.nvtx import part, trace_of
from lockstep.torch_backend.tools.step_timer import ACCUMULATED, StepTimer
from lockstep.torch_backend.upload import uploaded


class TorchSession(Observes):
    """A run in torch. A subclass that overrides a method is another candidate (docs/guide/candidates.md)."""

    def __init__(self, config: RunConfig) -> None:
        self.device = resolve_device(config)
        # Replace `auto` by the value for this device.
        self.config = config = settled(config, self.device.type)
        switch(config, self.device)
        self.switches = Switches(config.precision.policy, self.device)
        self.switches.set()
        self.policy: Policy = policy_of(config)
        self.float8 = float8(config.precision, self.device)
        # Creates a profiler range for each part of a step (torch_backend/tools/nvtx.py).
        self.trace = trace_of(config, self.device)
        self.steps_done = 0
        # Number of programs that torch.compile has compiled for steps, and the sequence lengths of the steps so far.
        self.programs, self._stepped = 0, set[int]()
        self.scalars = first_scalars(config)
        # Under FP8's delayed scaling: the amaxes of the scales, by layer, and those that the current step measured.
        self.amaxes: dict[str, Tensor] = {}
        self._amaxes_seen: Tensor | None = None
        self._told_amaxes: Amaxes = {}
        self._seen_at_taps: dict[str, Tensor] = {}
        self.step_timer = StepTimer(self.device)
        # The outermost module of a model with sharded weights.
        self.root: Root | None = None
        # Copies a tensor of the state or a gradient to the host: the whole tensor, or this rank's part.
        self._shown: Callable[[Tensor | None], np.ndarray] = to_numpy
        self.model = self.build_model()
        if has_own_head(self.model):
            self.model.fused_loss = None
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = self.build_optimizer()
        self._taps_of_blocks = {}
        self._micro_loss = self.build_program() if config.compile.enabled else self.micro_loss
        # A recomputed compiled block with a tap would be compiled again for the recomputation. Blocks with taps are not
        # recomputed then, which gives the same bits.
        apply_recompute(self.model, config.recompute, tapped=not config.compile.enabled or self._compiles_whole)
        self._tapped_programs: dict[tuple[frozenset[str], bool], Any] = {}
        self._sound_windows: set[frozenset[str]] = set()
        self._free_at_first: float | None = None
        self._sketching: tuple[Any, Any, Tensor] | None = None
        self._parts: StepParts | None = None
        # Receives the gradients of a single micro-batch's program, while `stream_gradients` runs.
        self._take_program: Take | None = None
        # A function that reads a step's loss, NLL and gradients before clipping, and its result.
        self._show_step: Callable[[Tensor, list[Tensor]], Any] | None = None
        self._of_step: Any = None
        # The inputs of a step's programs, name → one tensor per micro-batch; None while they are not kept.
        self._inputs: dict[str, list[Tensor]] | None = None
        self.ranks: Sharing | None = None
        self._writer = Writer(self)
        self._initialise()
        self._set_amaxes()

    def build_model(self) -> Transformer:
        """Build the model with unset weights in the policy's stream dtype; RoPE tables are FP64."""
        with torch.device("meta"):
            model = Transformer(self.config)
        model.to(self.policy.stream)
        if is_sharded(self.config) and dist.is_initialized():
            self.root = cut(model, self.config, self.device)
        (self.root or model).to_empty(device=self.device)
        model.place_rope(self.device)
        self.amaxes = apply_float8(model, self.config, self.float8)
        apply_loss_head(model, self.config.loss)
        return model

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Build the optimizer over the model's parameters."""
        return build_optimizer(self.config, self.parameters)

    def join_ranks(self) -> None:
        """Share batches with the other ranks of the default process group; every rank calls it.

        See torch_backend/ranks/peer_session.py.
        """
        self.ranks = self.build_ranks()
        self._micro_loss = self.ranks.alone
        self._writer.join_ranks()

    def build_ranks(self) -> Sharing:
        """Return the object that distributes batches over ranks: DDP, or FSDP2 if weights are sharded."""
        return Ranks(self) if self.root is None else ShardedRanks(self)

    @collects
    def state(self) -> State:
        """Return a copy of weights, moments and step count. If weights are sharded, every rank calls it."""
        found = Collected()
        return found.state(self.stream_state(found))

    def stream_state(self, take: Take) -> State:
        """Pass copies of weights and moments to `take`, one at a time; return the state without them."""
        kinds = moment_names(self.config)
        for name, p in self.parameters.items():
            take(PARAMS, name, self._shown(p))
        for kind, names in kinds.items():
            for name in names:
                take(kind, name, self._shown(moment_of(self.optimizer, self.parameters[name], kind)))
        return State(self.steps_done, {}, {kind: {} for kind in kinds}, dict(self.scalars))

    @contextmanager
    def showing_parts(self) -> Iterator[None]:
        """Make streams pass only this rank's part of each weight, moment and gradient, while the context is active."""
        self._shown = part_to_numpy
        try:
            yield
        finally:
            self._shown = to_numpy

    def state_checksums(self) -> dict[str, float]:
        """Return checksums of this rank's tensors by `params/NAME` and `KIND/NAME`, and the step and the scalars."""
        weights = ((f"{PARAMS}/{name}", p) for name, p in self.parameters.items())
        moments = (
            (f"{kind}/{name}", begun_moment(self.config, self.optimizer, name, self.parameters[name], kind))
            for kind, names in moment_names(self.config).items()
            for name in names
        )
        return {**checksums(itertools.chain(weights, moments)), "step": self.steps_done, **self.scalars}

    def load(self, state: State) -> None:
        """Load a canonical state. Raises ValueError if names or shapes are not this model's.

        If weights are sharded, the arrays may be whole or only this rank's rows.
        """
        check_state(self.config, state, {name: part_shape(p) for name, p in self.parameters.items()})
        # Free gradients and copies of the former state: a check that runs beside this session needs their memory.
        self.optimizer.zero_grad(set_to_none=not self.replays)
        self._writer.release()
        self._load_parameters(state.params)
        write_moments(self.config, self.optimizer, self.parameters, state)
        self._go_on_from(state.step, state.scalars)

    def update_counts(self) -> Mapping[str, int]:
        """Return the optimizer's count of updates of each parameter; no entry before the first update."""
        return update_counts(self.optimizer, self.parameters)

    def restore(self, folder: Path, step: int, scalars: Mapping[str, float]) -> None:
        """Load the state in a checkpoint's folder; of each tensor, only this rank's part is read.

        Raises ValueError if names or shapes are not this model's, and the errors of reading.
        """
        if self.root is None:
            self.load(read_state(folder, step, scalars))
            return
        stored = Stored(folder)
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
        self._set_amaxes()

    def _set_amaxes(self) -> None:
        set_amaxes(self.amaxes, amaxes_in_force(self.config, self.scalars))

    def amaxes_of_pass(self) -> Arrays:
        """Return the amaxes (3,) that the last accumulation measured, by layer; {} before the first one."""
        if self._amaxes_seen is None:
            return {}
        return dict(zip(self.amaxes, to_numpy(self._amaxes_seen), strict=True))

    def amaxes_of_parts(self) -> list[Arrays]:
        """Return the amaxes by layer of each micro-batch of a step that `keep_parts` preceded."""
        amaxes = self._parts.amaxes if self._parts is not None else []
        return [dict(zip(self.amaxes, to_numpy(one), strict=True)) for one in amaxes]

    @part("checkpoint")
    def write(self, folder: Path) -> WritingTorch:
        """Start to write the state with torch.distributed.checkpoint. Every rank of the session calls it.

        Gradients are freed first: on the CPU, the copy of the weights takes as much memory.
        """
        if not self.replays:
            self.optimizer.zero_grad(set_to_none=True)
        return self._writer.begin(folder)

    def random_state(self) -> dict[str, np.ndarray]:
        """Return the states of torch's random number generators, uint8 by name. Only a subclass may draw from them."""
        found = {"torch_cpu": torch.get_rng_state().numpy().copy()}
        if self.device.type == "cuda":
            found["torch_cuda"] = torch.cuda.get_rng_state(self.device).numpy().copy()
        return found

    def set_random_state(self, states: Arrays) -> None:
        """Set the generators from a result of `random_state`; a generator without an entry or a device is unchanged."""
        if "torch_cpu" in states:
            torch.set_rng_state(torch.from_numpy(states["torch_cpu"].copy()))
        if "torch_cuda" in states and self.device.type == "cuda":
            torch.cuda.set_rng_state(torch.from_numpy(states["torch_cuda"].copy()), self.device)

    @part("step")
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        """Accumulate gradients over micro-batches, clip by the global norm, update.

        norms: add the norms of weights, gradients and updates by group to the record. If the loss or a gradient is not
        finite, weights and moments stay: it raises NotFinite, or counts a skipped step.
        """
        made = self.programs
        self.step_timer.begin()
        loss, nll = self.accumulate(batch)
        self.step_timer.mark(ACCUMULATED)
        anew = self._made_anew(self.programs - made, batch.tokens.shape[1])
        if self._show_step is not None:
            with self.step_timer.exclude("checks"):
                self._of_step = self._show_step(loss, nll)
        grads = [local(p.grad) for p in self.parameters.values() if p.grad is not None]
        norm = self._global_norm(grads)
        if norms:
            with self.step_timer.exclude("logging"):
                before = {n: p.detach().clone() for n, p in self.parameters.items()}
                group_norms = self._norms({n: p.grad for n, p in self.parameters.items()})
        coefficient = self.clip_coefficient(norm).to(self.policy.stream)
        lr = learning_rate(self.config.optim, self.steps_done + 1, self.config.train.steps)
        # The step's only synchronisation: a value that is not finite must be found before it reaches the weights.
        told = torch.stack([x.double() for x in (loss, norm, coefficient)])
        if self._amaxes_seen is not None:
            told = torch.cat([told, self._amaxes_seen.double().flatten()])
        told_loss, told_norm, told_coefficient, *told_amaxes = told.tolist()
        record = StepRecord(
            step=self.steps_done + 1,
            loss=told_loss,
            loss_weight=float(batch.weights.sum(dtype=np.float64)),
            lr=lr,
            grad_norm=told_norm,
            clip_coefficient=told_coefficient,
            digest=batch.digest(),
            tokens=batch.targets.size,
            norm_in_fp64=True,
            adam_in_fp32=takes_fp32(self.optimizer),
        )
        finite = is_made(self.config, told_loss, told_norm)
        if not finite and not leaves_out(self.config):
            raise NotFinite(record, self._first_not_finite(told_loss))
        if not finite and SCALE not in self.scalars:
            record = replace(record, left_out=self._first_not_finite(told_loss))
        self._told_amaxes = {name: tuple(told_amaxes[3 * i : 3 * i + 3]) for i, name in enumerate(self.amaxes)}
        self._update(grads, coefficient, lr, finite)
        metrics = without_amaxes(self.scalars) | ({RECOMPILED: float(anew)} if anew else {})
        if norms:
            with self.step_timer.exclude("logging"):
                updates = {n: p.detach() - before[n] for n, p in self.parameters.items()}
                metrics |= norms_by_group(
                    groups_of(self.config.model), group_norms, self._norms(before), self._norms(updates)
                )
        HOST_MEMORY.keep()
        self.step_timer.end()
        return replace(record, metrics=metrics)

    def _made_anew(self, programs: int, length: int) -> int:
        """Count unexpected recompilations; one per sequence length is expected."""
        due = not self._stepped or length in set(self.config.train.lengths) - self._stepped
        self._stepped.add(length)
        return 0 if due else programs

    def _global_norm(self, grads: list[Tensor]) -> Tensor:
        with self.trace("clip"):
            norm = global_norm(grads)
            return norm if self.ranks is None else self.ranks.norm(norm)

    def _update(self, grads: list[Tensor], coefficient: Tensor, lr: float, finite: bool) -> None:
        with self.trace("clip"):
            torch._foreach_mul_(grads, coefficient)
        set_learning_rate(self.optimizer, lr)
        self.switches.require()
        if finite:
            with self.trace("optimizer"):
                self.optimizer.step()
        self.scalars = self.scalars_after(finite)
        self._set_amaxes()
        self.steps_done += 1

    def seconds_of_step(self) -> Mapping[str, float]:
        """Return seconds of the last step by part, as `StepTimer.take` lists them."""
        return self.step_timer.take()

    def seconds_compiling(self) -> float:
        """Return the seconds that torch.compile has taken in this process."""
        return COMPILE_TIME.seconds

    def memory(self) -> Mapping[str, float]:
        """Return bytes in use on the device, and the maximum since the last call; on the CPU, those of this process."""
        return memory(self.device)

    def _first_not_finite(self, loss: float) -> str:
        """Describe the first of this rank's own values that is not finite."""
        odd = [p.grad is not None and not bool(local(p.grad).isfinite().all()) for p in self.parameters.values()]
        odd = odd if self.ranks is None else list(self.ranks.everywhere(odd))
        found = [name for name, is_odd in zip(self.parameters, odd, strict=True) if is_odd]
        if self.ranks is not None:
            loss, own = self.ranks.not_finite(loss)
            found = [name for name in found if id(self.parameters[name]) in own]
        return first_place(loss, found, len(self.parameters))

    def clip_coefficient(self, norm: Tensor) -> Tensor:
        """Return the clip coefficient for a global norm; both are float64 scalars."""
        return clip_coefficient(self.config.optim, norm)

    def scalars_after(self, finite: bool) -> dict[str, float]:
        """Return the scalars of the state (loss scale, counts, amaxes) after a step. finite: the step was finite."""
        return scalars_after(self.config, self.scalars, finite, self._told_amaxes)

    @collects
    def gradients(self, batch: Batch) -> Gradients:
        """Return per-token NLL, loss and accumulated gradients of `batch`, computed by the program of training."""
        found = Collected()
        return found.gradients(self.stream_gradients(batch, found))

    def stream_gradients(self, batch: Batch, take: Take) -> Gradients:
        """Pass each gradient of `gradients` to `take`, and free it; return NLL and loss."""
        self._take_program = take
        try:
            found = self.hand_over(*self.accumulate(batch), take, release=True)
        finally:
            self._take_program = None
        self.optimizer.zero_grad(set_to_none=True)
        return found

    def sketch_gradients(self, batch: Batch) -> Mapping[str, Observation]:
        """Return observations of `gradients`; only sketches leave the device.

        The sketches are computed in eager mode: a check has too few passes to save the time of a compilation.
        """
        self.accumulate(batch)
        found = self.sketched({name: p.grad for name, p in self.parameters.items() if p.grad is not None})
        self.optimizer.zero_grad(set_to_none=True)
        return found

    def stream_own_gradients(self, micro: Batch, take: Take) -> None:
        """Pass to `take` the gradients of this rank's micro-batch before any reduction. All ranks call it."""
        if not isinstance(self.ranks, ShardedRanks):
            for name, gradient in self.gradients(micro).grads.items():
                take(GRADS, name, gradient)
            return
        names = {id(p): name for name, p in self.parameters.items()}
        inputs = *self.to_device(micro), self.total_weight(micro), *self.documents(micro)
        self.switches.require()
        self.ranks.unreduced(
            lambda p, gradient: take(GRADS, names[id(p)], to_numpy(self.unscaled(gradient))), self.micro_loss, *inputs
        )

    @collects
    def step_and_gradients(self, batch: Batch, *, norms: bool = False) -> tuple[StepRecord, Gradients | None]:
        """Run `step`, and also return its gradients before clipping; None if a subclass does not expose them."""
        taken = Collected()
        record, found = self.stream_step(batch, taken, norms=norms)
        return record, None if found is None else taken.gradients(found)

    def stream_step(self, batch: Batch, take: Take, *, norms: bool = False) -> tuple[StepRecord, Gradients | None]:
        """Run `step_and_gradients`, and pass the gradients to `take`, one at a time, instead of returning them."""
        return self._step_and(lambda loss, nll: self.hand_over(loss, nll, take), batch, norms)

    def step_and_sketches(
        self, batch: Batch, *, norms: bool = False
    ) -> tuple[StepRecord, Mapping[str, Observation] | None]:
        """Run `step`, and also return observations of its gradients before clipping; None in some subclasses."""
        return self._step_and(self._sketched_gradients, batch, norms)

    def _step_and(
        self, show: Callable[[Tensor, list[Tensor]], Any], batch: Batch, norms: bool
    ) -> tuple[StepRecord, Any]:
        self._of_step, self._show_step = None, show
        try:
            return self.step(batch, norms=norms), self._of_step
        finally:
            self._of_step, self._show_step = None, None

    def hand_over(self, loss: Tensor, nll: list[Tensor], take: Take, release: bool = False) -> Gradients:
        """Pass each `.grad` to `take`; return NLL and loss. release: free each gradient afterwards.

        Only gradients that the optimizer would clear are freed. Otherwise the check would hide the fault of a candidate
        whose optimizer lacks a parameter.
        """
        cleared = {id(p) for group in self.optimizer.param_groups for p in group["params"]} if release else set()
        for name, p in self.parameters.items():
            if p.grad is not None:
                take(GRADS, name, self._shown(p.grad))
                p.grad = None if id(p) in cleared else p.grad
        return Gradients(np.concatenate([to_numpy(n) for n in nll]), loss.item(), {})

    def show_program(self, grads: Mapping[str, Tensor]) -> None:
        """Pass the unscaled gradients of a single micro-batch to the check that requested them, if any."""
        if self._take_program is None:
            return
        for name, grad in grads.items():
            self._take_program(PROGRAM, name, self._shown(self.unscaled(grad)))

    def keep_inputs(self) -> None:
        """Keep copies of the inputs of the programs of the next step, or of the next gradients."""
        self._inputs = {}

    def inputs_kept(self) -> Arrays:
        """Return the inputs of this rank's micro-batches by name, concatenated along B, and stop keeping inputs."""
        found, self._inputs = self._inputs or {}, None
        return {name: torch.cat(parts).cpu().numpy() for name, parts in found.items()}

    def costs_of_determinism(self, batch: Batch) -> Sequence[float]:
        """Measure several times: the time of a pass / its time without `deterministic = true`."""
        return costs(self, lambda: self.accumulate(batch))

    def close(self) -> None:
        """Do nothing: the session holds no resource except its memory."""

    def accumulate(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Compute the batch's gradients into `.grad`; return the loss and the per-token NLL of each micro-batch.

        Each micro-batch contributes Σ weight·nll / Σ weight of the *whole* batch. The sum over micro-batches is then
        the weighted mean over the batch, for any distribution of weights over micro-batches. With several ranks
        (torch_backend/ranks/ddp.py), each computes a part of the micro-batches.
        """
        micros = batch.cut(self.config.train)
        mine = uploaded(self.ranks.own(micros) if self.ranks else micros, self.device)
        total = self.total_weight(batch)
        if self.ranks:
            self.ranks.arrange(micros, lambda program: self._forward_backward(mine[0], program, total))
        if self.ranks and not self.replays:
            self.ranks.clear(list(self.parameters.values()))
        else:
            self.optimizer.zero_grad(set_to_none=not self.replays)
        # The next replay of a CUDA graph overwrites its outputs, so gradients need memory outside the graph.
        for p in self.parameters.values() if self.replays else ():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        alone = len(micros) == 1 and self.ranks is None and not self.replays and self._take_program is not None
        kept = self._set_aside() if alone else {}
        self._amaxes_seen = None
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        nll = []
        programs = self.ranks.plan(micros) if self.ranks else (self._micro_loss for _ in mine)
        if self._inputs is not None:
            self._inputs.clear()
        if self._parts is not None:
            self._parts.begin()
        for micro, program in zip(mine, programs, strict=True):
            micro_loss, micro_nll = self._forward_backward(micro, program, total)
            loss += micro_loss.detach()
            nll.append(micro_nll.detach().clone() if self.replays else micro_nll.detach())
        if self.ranks and self.ranks.shares(micros):
            self.ranks.reduced(self.parameters.values())
            shown = self._show_step is not None or self._take_program is not None
            with self.trace("reduction"):
                loss, nll = self.ranks.together(loss, nll, shown)
                if self._amaxes_seen is not None:
                    self.ranks.most(self._amaxes_seen)
        grads = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        if len(micros) == 1:
            self.show_program(grads)
        for name, earlier in kept.items():
            grads[name] = self.parameters[name].grad = earlier + grads[name] if name in grads else earlier
        if self.scale != 1:
            torch._foreach_div_([local(grad) for grad in grads.values()], self.scale)
        return loss / self.scale, nll

    def _set_aside(self) -> dict[str, Tensor]:
        """Clear the gradients that the optimizer has left from an earlier batch, and return them.

        The program of training does not compute them, so a check must not see them as the program's.
        """
        kept = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        for name in kept:
            self.parameters[name].grad = None
        return kept

    @part("micro-batch")
    def _forward_backward(self, micro: Batch, program: Any, total: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gradients of a micro-batch to `.grad`; return its loss and per-token NLL."""
        self.switches.require()
        tokens, targets, weights = self.to_device(micro)
        documents = self.documents(micro)
        if self._inputs is not None:
            for name, given in zip(micro.arrays, (tokens, targets, weights, *documents), strict=False):
                self._inputs.setdefault(name, []).append(given.clone())
        if self.replays:
            torch.compiler.cudagraph_mark_step_begin()
        made = self._programs_made()
        with guarded(self, micro):
            with self.trace("forward"):
                loss, nll = program(tokens, targets, weights, total, *documents)
            self.programs += self._programs_made() - made
            parts = self._parts.next_one(self.scale) if self._parts is not None else nullcontext()
            with self.trace("backward"), parts:
                loss.backward()
        if self.amaxes:
            seen = amaxes_seen(self.amaxes)
            if self._parts is not None:
                self._parts.amaxes.append(seen)
            self._amaxes_seen = seen if self._amaxes_seen is None else torch.maximum(self._amaxes_seen, seen)
        return loss, nll

    def _initialise(self) -> None:
        """Set the initial weights; sharded ones one by one, so that no rank holds the whole model."""
        model, seed = self.config.model, self.config.seed
        if self.root is None:
            self._load_parameters(init_parameters(model, seed))
            return
        for name, parameter in graph_of(model).parameters.items():
            put(p := self.parameters[name], init_parameter(parameter, seed)[rows_of(p)])

    def _load_parameters(self, params: Arrays) -> None:
        for name, p in self.parameters.items():
            put(p, own_rows(params, name, p))

    def _norms(self, tensors: Mapping[str, Tensor | None]) -> dict[str, float]:
        present = {name: local(t) for name, t in tensors.items() if t is not None}
        if not present:
            return {}
        norms = torch.stack(list(torch._foreach_norm(list(present.values()))))
        norms = norms if self.ranks is None else self.ranks.norm(norms)
        return dict(zip(present, norms.tolist(), strict=True))
