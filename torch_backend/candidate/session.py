"""The session of a `ModuleCandidate`: its state as canonical arrays, its step, gradients, taps and scores."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from lockstep.core.backend import Arrays, Batch, Gradients, NotSupported, State, StepRecord
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.model.groups import check_state, moment_names
from lockstep.core.model.init import init_parameters
from lockstep.core.model.names import GRADIENT, edge_names, parameter_shapes, tap_names
from lockstep.core.train.finite import NotFinite, first_place
from lockstep.core.train.skipped_steps import first_scalars, is_made, leaves_out, own_scalars, scalars_after
from lockstep.torch_backend.candidate.layout import parameters_there
from lockstep.torch_backend.candidate.numerics import Numerics
from lockstep.torch_backend.candidate.taps import NLL, Taps
from lockstep.torch_backend.checksums import checksums
from lockstep.torch_backend.device import resolve_device
from lockstep.torch_backend.optim import moment_of, put_moments, takes_fp32, update_counts
from lockstep.torch_backend.precision import DTYPES
from lockstep.torch_backend.ranks.sharded_tensors import to_numpy


class ModuleSession:
    """A run of a candidate's module. The candidate defines the numerics: torch_backend/candidate/numerics.py."""

    def __init__(self, candidate: Numerics, config: RunConfig) -> None:
        self.candidate, self.config = candidate, config
        self.taps_keep_bits = candidate.taps_keep_bits
        self.device = resolve_device(config)
        self._stream = DTYPES[config.precision.chosen.stream]
        with candidate.precision(config):
            self.model = candidate.build(config).to(self.device, self._stream)
        self._layout = candidate.layout(config)
        self._parameters = parameters_there(self.model, self._layout.placed, parameter_shapes(config.model))
        self.taps = Taps(config.model, self.model, self._layout, candidate.taps_of(config), candidate.calls_of(config))
        self._put(init_parameters(config.model, config.seed))
        # The key of a fused parameter is the first of its canonical names.
        self._placed = {next(iter(one.rows)): one for one in self._layout.placed}
        self._by_ours = {name: self._parameters[one.theirs] for name, one in self._placed.items()}
        self.optimizer = candidate.build_optimizer(config, self._by_ours)
        self.steps_done, self.scalars = 0, first_scalars(config)
        self._inputs: dict[str, list[Tensor]] | None = None

    def _put(self, params: Arrays) -> None:
        with torch.no_grad():
            for one in self._layout.placed:
                self._parameters[one.theirs].copy_(torch.from_numpy(one.to_theirs(params.__getitem__)))

    def state(self) -> State:
        """Return a copy of weights, moments and step count; a moment that the optimizer does not have yet is zero."""
        kinds: dict[str, dict[str, np.ndarray]] = {}
        for kind, names in moment_names(self.config).items():
            first = [name for name in names if name in self._placed]
            kinds[kind] = self._ours({name: moment_of(self.optimizer, self._by_ours[name], kind) for name in first})
        return State(self.steps_done, self._ours(self._by_ours), kinds, dict(self.scalars))

    def _ours(self, tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Return arrays by canonical name, in canonical order.

        tensors: the module's tensors, each by the first canonical name in it.
        """
        found: dict[str, np.ndarray] = {}
        for name, tensor in tensors.items():
            found |= self._placed[name].to_ours(to_numpy(tensor))
        return {name: found[name] for name in parameter_shapes(self.config.model) if name in found}

    def load(self, state: State) -> None:
        """Load a canonical state. Raises ValueError if names or shapes are not this model's."""
        check_state(self.config, state)
        self.optimizer.zero_grad(set_to_none=True)
        self._put(state.params)

        def read(kind: str, name: str) -> np.ndarray:
            return self._placed[name].to_theirs(state.optimizer[kind].__getitem__)

        put_moments(self.config, self.optimizer, self._by_ours, state.updates, read)
        self.steps_done, self.scalars = state.step, own_scalars(self.config, state.scalars)

    def state_checksums(self) -> dict[str, float]:
        """Return checksums by `params/NAME` and `KIND/NAME`, the step and the scalars of the state.

        A fused parameter has the first of its canonical names.
        """
        weights = ((f"params/{name}", p) for name, p in self._by_ours.items())
        moments = (
            (f"{kind}/{name}", moment_of(self.optimizer, self._by_ours[name], kind))
            for kind, names in moment_names(self.config).items()
            for name in names
            if name in self._by_ours
        )
        return {**checksums(itertools.chain(weights, moments)), "step": self.steps_done, **self.scalars}

    def update_counts(self) -> Mapping[str, int]:
        """Return the optimizer's count of updates, by canonical name."""
        counts = update_counts(self.optimizer, self._by_ours)
        return {name: count for first, count in counts.items() for name in self._placed[first].rows}

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        """Accumulate gradients, clip, update. `norms` has no effect here.

        A step with a loss or gradient that is not finite changes no weight. It raises NotFinite, or is counted as a
        skipped step if the run skips such steps.
        """
        record, _ = self._step(batch, show=False)
        return record

    def step_and_gradients(self, batch: Batch, *, norms: bool = False) -> tuple[StepRecord, Gradients | None]:
        """Run `step`, and also return its gradients before clipping."""
        return self._step(batch, show=True)

    def _step(self, batch: Batch, show: bool) -> tuple[StepRecord, Gradients | None]:
        config, step = self.config, self.steps_done + 1
        loss, nll = self._accumulate(batch)
        shown = Gradients(nll, loss, self._grads()) if show else None
        norm, coefficient = self.candidate.clip(config, [p for p in self._parameters.values() if p.grad is not None])
        lr = self.candidate.learning_rate(config, step)
        record = StepRecord(
            step=step,
            loss=loss,
            loss_weight=float(batch.weights.sum(dtype=np.float64)),
            lr=lr,
            grad_norm=norm,
            clip_coefficient=coefficient,
            digest=batch.digest(),
            tokens=batch.targets.size,
            adam_in_fp32=takes_fp32(self.optimizer),
        )
        finite = is_made(config, loss, norm)
        if not finite and not leaves_out(config):
            raise NotFinite(record, self._first_not_finite(loss))
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group.get("lr_factor", 1.0)
            self.optimizer.step()
        self.scalars = scalars_after(config, self.scalars, finite)
        self.steps_done = step
        return record, shown

    def _first_not_finite(self, loss: float) -> str:
        odd = [name for name, g in self._grads().items() if not np.isfinite(g).all()]
        return first_place(loss, odd, len(parameter_shapes(self.config.model)))

    def _grads(self) -> dict[str, np.ndarray]:
        return self._ours({name: p.grad for name, p in self._by_ours.items() if p.grad is not None})

    def gradients(self, batch: Batch) -> Gradients:
        """Return per-token NLL, loss and accumulated gradients, as `step` makes them."""
        loss, nll = self._accumulate(batch)
        found = Gradients(nll, loss, self._grads())
        self.optimizer.zero_grad(set_to_none=True)
        return found

    def _accumulate(self, batch: Batch) -> tuple[float, np.ndarray]:
        self.optimizer.zero_grad(set_to_none=True)
        micros = batch.cut(self.config.train)
        loss, nll = 0.0, []
        for micro in micros:
            each, part = self._forward(micro, batch, len(micros))
            part.backward()
            loss += part.item()
            nll.append(to_numpy(each))
        return loss, np.concatenate(nll)

    def _forward(self, micro: Batch, batch: Batch, count: int) -> tuple[Tensor, Tensor]:
        """Return a micro-batch's per-token NLL (B, S), and its part of the loss of `batch`.

        count: number of micro-batches of `batch`. Raises UserError if `losses` returns another shape than (B, S).
        """
        tokens, targets, weights = self._tensors(micro)
        if self._inputs is not None:
            for name, x in (("tokens", tokens), ("targets", targets), ("weights", weights)):
                self._inputs.setdefault(name, []).append(x.detach().clone())
        with self.candidate.precision(self.config):
            each = self.candidate.losses(self.model, tokens, targets)
        if each.shape != targets.shape:
            raise UserError(f"losses gave {tuple(each.shape)}, not one loss for each of {tuple(targets.shape)} tokens")
        total = float(batch.weights.sum(dtype=np.float64))
        return each, self.candidate.share(each, weights.to(each.dtype), total, count)

    def _tensors(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        ids = (torch.from_numpy(np.ascontiguousarray(x)).long() for x in (batch.tokens, batch.targets))
        tokens, targets = (x.to(self.device) for x in ids)
        return tokens, targets, torch.from_numpy(np.ascontiguousarray(batch.weights)).to(self.device)

    def observe(self, batch: Batch, taps: Sequence[str]) -> Arrays:
        """Return taps of a micro-batch by name, recorded by hooks; gradients have names that begin with `grad/`.

        Raises NotSupported for unknown names.
        """
        known = tap_names(self.config.model)
        probed = {*known, *edge_names(self.config.model), *parameter_shapes(self.config.model)}
        if unknown := sorted(set(taps) - {*known, *(GRADIENT + name for name in probed)}):
            raise NotSupported(f"no such tap: {', '.join(unknown)}")
        asked, seen = set(taps), dict[str, np.ndarray]()

        def take(name: str, x: Tensor) -> None:
            if name in asked:
                seen[name] = to_numpy(x.to(self._stream))

        self.optimizer.zero_grad(set_to_none=True)
        gradients = any(name.startswith(GRADIENT) for name in asked)
        with torch.set_grad_enabled(gradients), self.taps.showing(batch.tokens.shape, take) as see:
            each, loss = self._forward(batch, batch, 1)
            see(NLL, each)
            if gradients:
                loss.backward()
                seen |= {GRADIENT + name: g for name, g in self._grads().items() if GRADIENT + name in asked}
        self.optimizer.zero_grad(set_to_none=True)
        return seen

    def hidden_taps(self) -> Mapping[str, str]:
        """Return the taps that this session cannot record, each with the reason."""
        return self.taps.hidden

    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        """Return per-token `nll` and `top1` (B, S). Raises NotSupported for another policy than the run's."""
        if policy not in (None, self.config.precision.policy):
            raise NotSupported(f"the candidate computes in {self.config.precision.policy} alone")
        tokens, targets, _ = self._tensors(batch)
        with torch.no_grad(), self.candidate.precision(self.config):
            nll = self.candidate.losses(self.model, tokens, targets)
            top1 = self.candidate.logits(self.model, tokens).argmax(-1) == targets
        return {"nll": to_numpy(nll), "top1": to_numpy(top1)}

    def next_token_logits(self, tokens: np.ndarray) -> np.ndarray:
        """Return logits (V,) of the token that follows `tokens`, int32 (n,)."""
        ids = torch.from_numpy(np.ascontiguousarray(tokens)).long()[None].to(self.device)
        with torch.no_grad(), self.candidate.precision(self.config):
            return to_numpy(self.candidate.logits(self.model, ids)[0, -1].to(self._stream))

    def keep_inputs(self) -> None:
        """Keep copies of the inputs of the forward passes of the next step, or of the next gradients."""
        self._inputs = {}

    def inputs_kept(self) -> Arrays:
        """Return the inputs that were kept, by name, concatenated along B, and stop keeping inputs."""
        found, self._inputs = self._inputs or {}, None
        return {name: np.concatenate([to_numpy(x) for x in parts]) for name, parts in found.items()}

    def close(self) -> None:
        """Do nothing: the session holds no resource."""
