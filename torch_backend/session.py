"""The trainer behind the seam of core/backend.py: model, optimizer and compiled forward-backward of one run."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from core.backend import Arrays, Batch, Gradients, NotSupported, Session, State, StepRecord
from core.config import RunConfig
from core.errors import UserError
from core.init import init_parameters
from core.metrics import norms_by_group
from core.names import GRADIENT, check_state, edge_names, probe_shapes, tap_names
from core.parity.observations import PARAMETER, PROBE_NLL, Observation
from core.parity.sketch import K
from core.schedule import learning_rate
from torch_backend.loss import weighted_mean
from torch_backend.model import Llama, Tap, no_tap
from torch_backend.optim import MOMENTS, build_optimizer, clip_coefficient, global_norm, read_moments, write_moments
from torch_backend.precision import POLICIES, Policy
from torch_backend.ranks import Ranks, in_force
from torch_backend.sketch import (
    Kept,
    lift,
    sign_table,
    sketch,
    sketch_alone,
    sketches_of,
    statistics,
    whole_observation,
)
from torch_backend.stages import run_stage, stage_functions

Tensors = Mapping[str, Tensor]
# torch.compile refuses to compile one function more often than this.
SESSIONS = 64


class TorchSession:
    """One run in torch. Subclass and override a method to make another candidate (docs/candidates.md)."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.device = resolve_device(config)
        self.policy: Policy = POLICIES[config.precision.policy]
        self.steps_done = 0
        self.model = self.build_model()
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = self.build_optimizer()
        self._micro_loss = self.compiled(self.micro_loss) if config.compile.enabled else self.micro_loss
        self._tapped_programs: dict[frozenset[str], Any] = {}
        self._sketching: tuple[Any, Any, Tensor] | None = None
        # Kept only while `gradients` or `step_and_gradients` asks.
        self._program_gradients: dict[str, Tensor] | None = None
        self._of_step: Gradients | None = None
        self._show_step = False
        self.ranks: Ranks | None = None
        self._load_parameters(init_parameters(config.model, config.seed))

    def build_model(self) -> Llama:
        """The model with unset weights in the policy's stream dtype (RoPE tables stay FP64 until they are used)."""
        with torch.device("meta"):
            model = Llama(self.config.model, self.config.train.sequence_length)
        model.to_empty(device=self.device).to(self.policy.stream)
        model.place_rope(self.device)
        return model

    def build_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer over the model's parameters."""
        return build_optimizer(self.config.optim, self.parameters)

    def join_ranks(self) -> None:
        """Share batches with the default process group from now on. Every rank calls it (torch_backend/parallel.py)."""
        self.ranks = self.build_ranks()
        self._micro_loss = self.ranks.alone

    def build_ranks(self) -> Ranks:
        """How this session shares its batches with the other ranks."""
        return Ranks(self)

    def state(self) -> State:
        """A copy of weights, moments and step count."""
        moments = read_moments(self.optimizer, self.parameters)
        return State(
            self.steps_done,
            {name: _numpy(p) for name, p in self.parameters.items()},
            {kind: {name: _numpy(m) for name, m in by_name.items()} for kind, by_name in moments.items()},
        )

    def load(self, state: State) -> None:
        """Take over a canonical state. Raises ValueError if names or shapes are not this model's."""
        check_state(self.config.model, state)
        self._load_parameters(state.params)
        write_moments(self.optimizer, self.parameters, state)
        self.steps_done = state.step

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        """Accumulate gradients over micro-batches, clip by the global norm, update. `norms` adds norms by group."""
        loss, nll = self.accumulate(batch)
        if self._show_step:
            self._of_step = self._gradients(loss, nll)
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = global_norm(grads)
        before = {n: p.detach().clone() for n, p in self.parameters.items()} if norms else {}
        group_norms = self._norms({n: p.grad for n, p in self.parameters.items()}) if norms else {}
        coefficient = clip_coefficient(self.config.optim, norm).to(self.policy.stream)
        torch._foreach_mul_(grads, coefficient)
        lr = learning_rate(self.config.optim, self.steps_done + 1, self.config.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.steps_done += 1
        metrics = {}
        if norms:
            updates = {n: p.detach() - before[n] for n, p in self.parameters.items()}
            metrics = norms_by_group(group_norms, self._norms(before), self._norms(updates))
        return StepRecord(
            step=self.steps_done,
            loss=loss.item(),
            loss_weight=float(batch.weights.sum(dtype=np.float64)),
            lr=lr,
            grad_norm=norm.item(),
            clip_coefficient=coefficient.item(),
            digest=batch.digest(),
            tokens=batch.targets.size,
            metrics=metrics,
        )

    def gradients(self, batch: Batch) -> Gradients:
        """Per-token NLL, loss and accumulated gradients of `batch`, through the program that trains."""
        self._program_gradients = {}
        found = self._gradients(*self.accumulate(batch))
        self.optimizer.zero_grad(set_to_none=True)
        of_program, self._program_gradients = self._program_gradients, None
        return replace(found, program={name: _numpy(g) for name, g in of_program.items()})

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
            program = self._tapped_programs[names] = self.compiled(program) if self.config.compile.enabled else program
        asked = [name.removeprefix(GRADIENT) for name in names if name.startswith(GRADIENT)]
        shapes = probe_shapes(self.config.model, *batch.tokens.shape)
        probes = {
            name: torch.zeros(shapes[name], dtype=self.policy.stream, device=self.device, requires_grad=True)
            for name in sorted(asked)
            if name not in self.parameters
        }
        with torch.set_grad_enabled(bool(asked)):
            loss, seen = program(*self.to_device(batch), self.total_weight(batch), probes)
        wanted = probes | {name: p for name, p in self.parameters.items() if name in asked}
        grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True) if wanted else ()
        by_name = zip(wanted, grads, strict=True)
        return {n: _numpy(v) for n, v in seen.items()} | {GRADIENT + n: _numpy(g) for n, g in by_name if g is not None}

    def tapped_micro_loss(
        self,
        wanted: frozenset[str],
        tokens: Tensor,
        targets: Tensor,
        weights: Tensor,
        total: Tensor,
        probes: Tensors,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`micro_loss`, and the taps that it passed; a zero is added to each probed one: its gradient is the tap's."""
        seen: dict[str, Tensor] = {}

        def tap(name: str, value: Tensor) -> Tensor:
            if name in probes:
                value = value + probes[name].to(value.dtype)
            if name in wanted:
                seen[name] = value.detach()
            return value

        return self._through(tap, tokens, targets, weights, total), seen

    def _through(self, tap: Tap, tokens: Tensor, targets: Tensor, weights: Tensor, total: Tensor) -> Tensor:
        """The loss of `micro_loss`, the model's tensors passing `tap` on their way."""
        self.model.tap = tap
        try:
            loss, _ = self.micro_loss(tokens, targets, weights, total)
        finally:
            self.model.tap = no_tap
        return loss

    def sketch(self, batch: Batch) -> dict[str, Observation]:
        """What is kept of one micro-batch (core/parity/end_to_end.py), without a tensor leaving the device.

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
                of_taps, of_gradients = self.compiled(of_taps), self.compiled(of_gradients)
            self._sketching = of_taps, of_gradients, table
        of_taps, of_gradients, table = self._sketching
        zeros = {
            name: torch.zeros(K, dtype=self.policy.stream, device=self.device, requires_grad=True)
            for name in tap_names(model)
        }
        inputs = *self.to_device(batch), self.total_weight(batch)
        loss, seen = of_taps(*inputs, torch.tensor(rows, device=self.device), zeros, table)
        by_tap = torch.autograd.grad(loss, list(zeros.values()), allow_unused=True)
        loss, _ = self._micro_loss(*inputs)
        by_parameter = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        found = {name: whole_observation(kept, shapes[name]) for name, kept in seen.items()}
        for name, grad in zip(zeros, by_tap, strict=True):
            if grad is not None:
                found[GRADIENT + name] = sketch_alone(grad, shapes[name])
        if "nll" in found:
            found[PROBE_NLL] = found["nll"]
        grads = {name: g for name, g in zip(self.parameters, by_parameter, strict=True) if g is not None}
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

        return self._through(tap, tokens, targets, weights, total), seen

    def run_stage(self, stage: str, inputs: Arrays) -> Arrays:
        """Execute one stage on the given inputs: see `JaxSession.run_stage`, whose torch twin this is."""
        if stage == "update":
            return self._run_update(inputs)
        functions = stage_functions(self.model, self.policy)
        if stage not in functions:
            raise NotSupported(f"no such stage: {stage}")
        return {name: _numpy(value) for name, value in run_stage(functions[stage], inputs, self.policy).items()}

    def _run_update(self, inputs: Arrays) -> Arrays:
        def under(prefix: str) -> dict[str, np.ndarray]:
            return {name: inputs[f"{prefix}/{name}"] for name in self.parameters}

        parameters = {
            name: nn.Parameter(torch.tensor(value, dtype=self.policy.stream, device=self.device))
            for name, value in under("params").items()
        }
        optimizer = build_optimizer(self.config.optim, parameters)
        state = State(int(inputs["step"]), {}, {kind: under(kind) for kind in MOMENTS})
        write_moments(optimizer, parameters, state)
        coefficient = torch.tensor(float(inputs["coefficient"]), dtype=self.policy.stream, device=self.device)
        for name, p in parameters.items():
            p.grad = torch.tensor(inputs[f"grads/{name}"], dtype=self.policy.stream, device=self.device) * coefficient
        for group in optimizer.param_groups:
            group["lr"] = float(inputs["lr"])
        optimizer.step()
        after: dict[str, Mapping[str, Tensor]] = {"params": parameters, **read_moments(optimizer, parameters)}
        return {f"{kind}/{name}": _numpy(value) for kind, tree in after.items() for name, value in tree.items()}

    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        """Per-token `nll` and `top1` of `batch` in eager, under the run's policy or a named one."""
        tokens, targets, _ = self.to_device(batch)
        chosen = POLICIES[policy] if policy else self.policy
        with torch.no_grad():
            logits = self.model.logits(self.model.trunk(tokens, chosen), chosen)
            return {
                "nll": _numpy(self.model.nll(logits, targets)),
                "top1": _numpy(logits.argmax(-1) == targets),
            }

    def next_token_logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits (V,) of the token that follows `tokens`, int32 (n,), n at most the run's sequence length."""
        with torch.no_grad():
            ids = torch.tensor(tokens[None], dtype=torch.long, device=self.device)
            return _numpy(self.model.logits(self.model.trunk(ids, self.policy)[:, -1:], self.policy)[0, 0])

    def close(self) -> None:
        """Nothing is held beyond the object itself."""

    def to_device(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (B, S) and targets (B, S) as int64, weights (B, S) in the stream dtype, on the device."""
        return (
            torch.from_numpy(batch.tokens).to(self.device, torch.long),
            torch.from_numpy(batch.targets).to(self.device, torch.long),
            torch.from_numpy(batch.weights).to(self.device, self.policy.stream),
        )

    def accumulate(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Gradients of the batch into `.grad`; returns the loss and the per-token NLL of each micro-batch.

        Each micro-batch contributes Σ weight·nll divided by the *whole* batch's Σ weight, so that accumulation
        weights by
        tokens: the sum over micro-batches is the mean over the batch, however unevenly the weights lie. Several ranks
        (torch_backend/ranks.py) compute a part of the micro-batches each.
        """
        self.optimizer.zero_grad(set_to_none=True)
        total = self.total_weight(batch)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        nll = []
        micros = batch.micro_batches(min(self.config.train.micro_batch_size, len(batch.tokens)))
        for micro, program in self.ranks.plan(micros) if self.ranks else ((m, self._micro_loss) for m in micros):
            tokens, targets, weights = self.to_device(micro)
            micro_loss, micro_nll = program(tokens, targets, weights, total)
            micro_loss.backward()
            loss += micro_loss.detach()
            nll.append(micro_nll.detach())
        if self.ranks and self.ranks.shares(micros):
            return self.ranks.together(loss, nll, shown=self._show_step or self._program_gradients is not None)
        if self._program_gradients is not None and len(micros) == 1:
            grads = {name: p.grad for name, p in self.parameters.items()}
            self._program_gradients = {name: g.clone() for name, g in grads.items() if g is not None}
        return loss, nll

    def micro_loss(self, tokens: Tensor, targets: Tensor, weights: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """Σ weight·nll / total of one micro-batch, and its per-token nll (B, S)."""
        nll = self.model(tokens, targets, self.policy)
        return weighted_mean(nll, weights, total), nll

    def total_weight(self, batch: Batch) -> Tensor:
        """Σ weight over a batch, a float64 scalar on the device: what the loss is divided by."""
        return torch.tensor(float(batch.weights.sum(dtype=np.float64)), dtype=torch.float64, device=self.device)

    def compiled(self, program: Any) -> Any:
        """`program` through torch.compile as the configuration says."""
        # A process may open many sessions (a replay, a bisection): each has programs of the same few functions.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SESSIONS)
        backend = self.config.compile.backend
        # Inductor drops a cast to bf16 and back inside a fusion, and with it the policy's rounding of the head's
        # operands.
        options: Any = {"emulate_precision_casts": True} if backend == "inductor" else None
        return torch.compile(program, fullgraph=True, dynamic=False, backend=backend, options=options)

    def _load_parameters(self, params: Arrays) -> None:
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(torch.from_numpy(np.ascontiguousarray(params[name])))

    def _norms(self, tensors: Mapping[str, Tensor | None]) -> dict[str, float]:
        present = {name: t for name, t in tensors.items() if t is not None}
        norms = torch._foreach_norm(list(present.values()))
        return {name: n.item() for name, n in zip(present, norms, strict=True)}


class TorchBackend:
    """Opens `session_class` on a configuration; a candidate names its own session class."""

    name = "torch"
    # Opens sessions of several ranks.
    ranked = True
    session_class: type[TorchSession] = TorchSession

    def open(self, config: RunConfig) -> Session:
        """A session at the initial weights of `config`, of several ranks if it says so.

        Raises UserError if the device is not there.
        """
        if config.train.ranks == 1:
            return self.open_rank(config)
        from torch_backend.parallel import open_ranked

        return open_ranked(self, config)

    def open_rank(self, config: RunConfig) -> TorchSession:
        """The session of one rank, before it joins the others."""
        return self.session_class(config)

    def describe(self, config: RunConfig) -> Mapping[str, Any]:
        """Versions, device and what is in force."""
        device = resolve_device(config)
        compiled = f"torch.compile({config.compile.backend}, fullgraph)" if config.compile.enabled else "eager"
        return {
            "backend": self.name,
            "versions": {"torch": torch.__version__},
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
            "device_kind": device.type,
            "threads": torch.get_num_threads(),
            "in_force": {
                "program": compiled,
                "attention": "scaled_dot_product_attention",
                "optimizer": "AdamW (foreach)",
                **in_force(config, device.type),
            },
        }


def resolve_device(config: RunConfig) -> torch.device:
    """The device asked for; `auto` takes CUDA where there is one. Raises UserError if CUDA was asked for in vain."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device = 'cuda' was asked for, but torch sees no CUDA device here; use device = 'cpu' or 'auto'"
        )
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    # Sums inside a bf16 product stay in FP32: the policy promises it, cuBLAS's default does not.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return torch.device("cuda")


def _numpy(tensor: Tensor | None) -> np.ndarray:
    assert tensor is not None
    array: np.ndarray = tensor.detach().to("cpu", copy=True).numpy()
    return array
