"""The reference behind the seam of core/backend.py: the same step as torch_backend/session.py, in JAX."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from lockstep.core.backend import Arrays, Batch, Gradients, NotSupported, State, StepRecord
from lockstep.core.checkpoint.format import PARAMS
from lockstep.core.config.auto import settled
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.model.groups import check_state, moment_names
from lockstep.core.model.init import init_parameters
from lockstep.core.model.names import GRADIENT, edge_names, groups_of, parameter_shapes, probe_shapes, tap_names
from lockstep.core.train.finite import NotFinite, first_place
from lockstep.core.train.fp8_amax import layers, without_amaxes
from lockstep.core.train.loss_scale import SCALE, SKIPPED
from lockstep.core.train.metrics import norms_by_group
from lockstep.core.train.process_memory import process_memory
from lockstep.core.train.schedule import learning_rate
from lockstep.core.train.skipped_steps import first_scalars, is_made, leaves_out, own_scalars, scalars_after
from lockstep.jax_backend import checkpoint
from lockstep.jax_backend.checkpoint import WritingJax
from lockstep.jax_backend.kernels.float8 import apply_float8
from lockstep.jax_backend.kernels.loss_head import apply_loss_head
from lockstep.jax_backend.model import Tap, Transformer, no_tap
from lockstep.jax_backend.optim import Terms, Tree, clip_coefficient, global_norm, next_state
from lockstep.jax_backend.policy import Kernel, Policy
from lockstep.jax_backend.precision import POLICIES
from lockstep.jax_backend.sharding import Shards
from lockstep.jax_backend.stages import in_stream, stage_functions, with_gradients
from lockstep.jax_backend.tools.attention_logits import largest_logits
from lockstep.jax_backend.tools.scores import scores

Names = frozenset[str]
KERNELS: dict[Kernel, str] = {
    "cpu": "torch's flash kernel on the CPU",
    "cuda": "the fused kernels on CUDA",
    "wide": "Lockstep's kernel on the CPU",
    "math": "torch's math kernel",
}
NARROW = {"bf16": jnp.bfloat16, "fp16": jnp.float16}


class JaxSession:
    """A run in JAX: parameters and moments are flat dicts by canonical name, programs are jitted pure functions."""

    def __init__(self, config: RunConfig) -> None:
        # With `auto` resolved: the twin follows the kernel that runs.
        self.config = config = settled(config, device_of(config))
        self.policy = self._under(config.precision.policy)
        self.shards = Shards(config.parity.reference_devices)
        self.steps_done = 0
        self.scalars = first_scalars(config)
        self._seconds: dict[str, float] = {}
        model = nnx.eval_shape(partial(build_model, config))
        self.graph, abstract = nnx.split(model)
        self._paths = {".".join(map(str, path)): path for path, _ in nnx.to_flat_state(abstract)}
        shapes = parameter_shapes(config.model)
        places = {name: self.shards.of(shape) for name, shape in shapes.items()}
        places_of_moments = {kind: {n: places[n] for n in names} for kind, names in moment_names(config).items()}
        self._micro_gradients = self.shards.jit(jax.value_and_grad(self.micro_loss, has_aux=True), (None, places))
        self._add = jax.jit(partial(jax.tree.map, jnp.add))
        self._sum = self.shards.jit(summed, places)
        self._norm = jax.jit(global_norm)
        self._leaf_norms = jax.jit(partial(jax.tree.map, lambda x: jnp.linalg.norm(x.ravel())))
        self._move = self.shards.jit(self.move, (None, places_of_moments))
        self._move_in_fp32 = self.shards.jit(partial(self.move, adam_in_fp32=True), (None, places_of_moments))
        self._observe = jax.jit(self.observed, static_argnums=6)
        functions = stage_functions(config, model, self.policy)
        # Stages with the same function share its compiled programs.
        programs = {f: jax.jit(with_gradients(f)) for f in set(functions.values())}
        self._stages = {name: programs[f] for name, f in functions.items()}
        self._scores = jax.jit(self.scores, static_argnames="policy")
        self._next_logits = jax.jit(self.next_logits)
        self._largest_logits = jax.jit(self.largest_logits)

    @cached_property
    def params(self) -> Tree:
        """Weights by canonical name; a session that runs stages alone never makes them."""
        return self._arrays(init_parameters(self.config.model, self.config.seed))

    @cached_property
    def moments(self) -> dict[str, Tree]:
        """Moments by kind, then by canonical name."""
        shapes = parameter_shapes(self.config.model)
        return {
            kind: {n: self.shards.parameter(np.zeros(shapes[n]), self.policy.stream) for n in names}
            for kind, names in moment_names(self.config).items()
        }

    def state(self) -> State:
        """Return a copy of weights, moments and step count."""
        return State(
            self.steps_done,
            {name: np.array(p) for name, p in self.params.items()},
            {kind: {name: np.array(m) for name, m in by_name.items()} for kind, by_name in self.moments.items()},
            dict(self.scalars),
        )

    def state_checksums(self) -> dict[str, float]:
        """Return CRC-32 of each array, by `params/NAME` and `KIND/NAME`; the step and the scalars as they are."""
        kinds = {PARAMS: self.params, **self.moments}
        arrays = {f"{kind}/{name}": np.asarray(x) for kind, of_kind in kinds.items() for name, x in of_kind.items()}
        sums = {name: zlib.crc32(np.ascontiguousarray(x).tobytes()) for name, x in arrays.items()}
        return {**sums, "step": self.steps_done, **self.scalars}

    def load(self, state: State) -> None:
        """Take over a canonical state. Raises ValueError if names or shapes are not this model's."""
        check_state(self.config, state)
        self.params = self._arrays(state.params)
        self.moments = {kind: self._arrays(arrays) for kind, arrays in state.optimizer.items()}
        self.steps_done = state.step
        self.scalars = own_scalars(self.config, state.scalars)

    def write(self, folder: Path) -> WritingJax:
        """Start to write the state by orbax."""
        return WritingJax(self.steps_done, self.scalars, {PARAMS: self.params, **self.moments}, folder)

    def read(self, folder: Path) -> State:
        """Read the state in a checkpoint that `write` made."""
        return checkpoint.read(folder, {PARAMS: self.params, **self.moments})

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        """Accumulate gradients over micro-batches, clip by the global norm, update. `norms` adds norms by group.

        If the loss or a gradient is not finite, weights and moments stay: raises NotFinite, or counts a step left out.
        Raises UserError under FP8's delayed scaling.
        """
        if layers(self.config):
            raise UserError(
                f"precision.policy = {self.policy.name!r}: JAX judges a step with delayed scaling, a stage at a time, "
                "and makes none; take --backend torch"
            )
        started = time.perf_counter()
        loss, _, grads = self.accumulate(batch)
        norm = self._norm(grads)
        coefficient = clip_coefficient(self.config.optim, norm).astype(self.policy.stream)
        lr = learning_rate(self.config.optim, self.steps_done + 1, self.config.train.steps)
        record = StepRecord(
            step=self.steps_done + 1,
            loss=float(loss),
            loss_weight=float(batch.weights.sum(dtype=np.float64)),
            lr=lr,
            grad_norm=float(norm),
            clip_coefficient=float(coefficient),
            digest=batch.digest(),
            tokens=batch.targets.size,
            norm_in_fp64=True,
        )
        computed = time.perf_counter()
        params, moments = self.params, self.moments
        finite = is_made(self.config, record.loss, record.grad_norm)
        if not finite and not leaves_out(self.config):
            raise NotFinite(record, self._first_not_finite(record.loss, grads))
        if not finite and SCALE not in self.scalars:
            record = replace(record, left_out=self._first_not_finite(record.loss, grads))
        if finite:
            done = self.steps_done - int(self.scalars.get(SKIPPED, 0))
            params, moments = self.update(params, moments, grads, coefficient, done, lr)
        self.scalars = scalars_after(self.config, self.scalars, finite)
        metrics = without_amaxes(self.scalars)
        if norms:
            updates = jax.tree.map(jnp.subtract, params, self.params)
            metrics |= norms_by_group(
                groups_of(self.config.model),
                *({n: float(v) for n, v in self._leaf_norms(t).items()} for t in (grads, self.params, updates)),
            )
        self.params, self.moments = params, moments
        self.steps_done += 1
        # The update runs asynchronously; the next step waits for it.
        self._seconds = {"compute": computed - started, "optimizer": time.perf_counter() - computed}
        return replace(record, metrics=metrics)

    def _first_not_finite(self, loss: float, grads: Tree) -> str:
        found = [name for name in self.params if not np.isfinite(grads[name]).all()]
        return first_place(loss, found, len(self.params))

    def seconds_of_step(self) -> Mapping[str, float]:
        """Return seconds of the last step, once: `compute` until loss and norm are known, `optimizer` after that."""
        found, self._seconds = self._seconds, {}
        return found

    def memory(self) -> Mapping[str, float]:
        """Return bytes: on a GPU `allocated` now and `peak` since the process began; on the CPU, of this process."""
        stats = jax.devices()[0].memory_stats()
        if not stats:
            return process_memory()
        return {"allocated": float(stats["bytes_in_use"]), "peak": float(stats["peak_bytes_in_use"])}

    def attention_logits(self, batch: Batch) -> np.ndarray:
        """Return (layers,), the largest attention logit of each layer (jax_backend/tools/attention_logits.py)."""
        documents = batch.documents_for(self.config.attention)
        return np.array(self._largest_logits(self.params, batch.tokens, documents), np.float64)

    def gradients(self, batch: Batch) -> Gradients:
        """Return per-token NLL, loss and accumulated gradients of `batch`; the state is left as it was."""
        loss, nll, grads = self.accumulate(batch)
        return Gradients(
            np.concatenate([np.array(n) for n in nll]), float(loss), {name: np.array(g) for name, g in grads.items()}
        )

    def observe(self, batch: Batch, taps: Sequence[str]) -> Arrays:
        """Return taps of one micro-batch, and `grad/NAME` of a tap, an edge or a parameter.

        Raises NotSupported for a name that the model does not have.
        """
        parameters = parameter_shapes(self.config.model)
        names = [*tap_names(self.config.model), *edge_names(self.config.model), *parameters]
        if unknown := sorted(set(taps) - {*tap_names(self.config.model), *(GRADIENT + n for n in names)}):
            raise NotSupported(f"no such tap: {', '.join(unknown)}")
        grads = [name.removeprefix(GRADIENT) for name in taps if name.startswith(GRADIENT)]
        shapes = probe_shapes(self.config.model, *batch.tokens.shape)
        probes = {n: np.zeros(shapes[n], self.policy.stream) for n in sorted(grads) if n not in parameters}
        seen, by_probe, by_parameter = self._observe(
            self.params,
            probes,
            *self._inputs(batch),
            self.total_weight(batch),
            frozenset(taps),
            self._documents(batch),
        )
        by_name = self._unscaled({**by_probe, **by_parameter})
        found = seen | {GRADIENT + n: g for n, g in by_name.items() if n in grads}
        return {name: np.array(value) for name, value in found.items()}

    def run_stage(self, stage: str, inputs: Arrays) -> Arrays:
        """Execute one stage on the given inputs: the output is under `out`, or as in `update`.

        With `grad`, the gradient of the output, among the inputs there is also `grad/ROLE` for every floating input.
        `update` takes `step` (steps done), `coefficient`, `lr`, `adam_in_fp32` where AdamW's kernel takes its
        hyperparameters so, and by prefix `params/`, `grads/` and each kind of
        moment, `exp_avg/`, `exp_avg_sq/` or `momentum_buffer/`; it gives the new `params/` and moments. Any of the
        parameters may be among the inputs; instead of one whose update is not that of a matrix as a whole, a flat
        stretch of it. Raises NotSupported for a stage that it does not know.
        """
        if stage == "update":
            return self._run_update(inputs)
        if stage not in self._stages:
            raise NotSupported(f"no such stage: {stage}")
        found = self._stages[stage](in_stream(inputs, self.policy))
        # On the CPU the arrays are JAX's own memory, which is read-only.
        return {name: np.asarray(value) for name, value in found.items()}

    def prepare_stage(self, stage: str, inputs: Arrays) -> None:
        """Trace and compile one stage for inputs of these shapes, which `run_stage` then finds; nothing is run."""
        self._stages[stage].lower({name: self._shape(x) for name, x in inputs.items()}).compile()

    def _shape(self, x: np.ndarray) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype that an input has in the stream."""
        return jax.ShapeDtypeStruct(x.shape, self.policy.stream if x.dtype.kind == "f" else x.dtype)

    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        """Return per-token `nll` and `top1` of `batch`, under the run's policy or a named one."""
        tokens, targets, _ = self._inputs(batch)
        asked = self._under(policy or self.policy.name)
        nll, top1 = self._scores(self.params, tokens, targets, self._documents(batch), policy=asked)
        return {"nll": np.array(nll), "top1": np.array(top1)}

    def next_token_logits(self, tokens: np.ndarray) -> np.ndarray:
        """Return logits (V,) of the token that follows `tokens`, int32 (n,), n at most the run's longest sequence.

        They are one document.
        """
        padded = np.zeros((1, self.config.train.longest), np.int32)
        one_document = np.zeros_like(padded)
        padded[0, : len(tokens)] = tokens
        batch = Batch(padded, padded, np.ones(padded.shape, np.float32), one_document)
        documents = batch.documents_for(self.config.attention)
        return np.array(self._next_logits(self.params, padded, np.int32(len(tokens) - 1), documents))

    def close(self) -> None:
        """Do nothing: the session holds no resources beyond the object itself."""

    def model(self, params: Tree, tap: Tap = no_tap) -> Transformer:
        """Build the module with these parameters, its tensors passing `tap` on their way."""
        flat = [(self._paths[name], nnx.Param(p)) for name, p in params.items()]
        model: Transformer = nnx.merge(self.graph, nnx.from_flat_state(flat))
        model.tap = tap
        return model

    def accumulate(self, batch: Batch) -> tuple[Array, list[Array], Tree]:
        """Return loss, per-token NLL of each micro-batch, and gradients accumulated in order, weighted by tokens.

        Sums over ranks in a narrow format are rounded as by the ranks: each rank's sum, and each addition of one.
        """
        total = self.total_weight(batch)
        micros = batch.cut(self.config.train)
        narrow, ranks = NARROW.get(self.config.parallel.gradient_dtype), self.config.train.ranks
        share = len(micros) // ranks if narrow and len(micros) % ranks == 0 else len(micros)
        loss, nll = jnp.zeros((), jnp.float64), []
        sums: list[Tree] = []
        for number, micro in enumerate(micros, 1):
            (part, micro_nll), micro_grads = self._micro_gradients(
                self.params, *self._inputs(micro), total, self._documents(micro)
            )
            if number % share == 1 % share:
                sums.append(micro_grads)
            else:
                sums[-1] = self._add(sums[-1], micro_grads)
            loss += part
            nll.append(micro_nll)
        if len(sums) == 1:
            return loss / self.scale, nll, self._unscaled(sums[0])
        cast = [{name: g.astype(narrow) for name, g in tree.items()} for tree in sums]
        reduced = {name: sum((tree[name] for tree in cast[1:]), start=g) for name, g in cast[0].items()}
        return loss / self.scale, nll, self._unscaled({n: g.astype(self.policy.stream) for n, g in reduced.items()})

    def micro_loss(
        self,
        params: Tree,
        tokens: Array,
        targets: Array,
        weights: Array,
        total: Array,
        documents: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return Σ weight·nll / total of one micro-batch, and its per-token nll (B, S)."""
        model = self.model(params, self.shards.tap(no_tap))
        return model.loss(tokens, targets, weights, total, self.policy, *_given(documents))

    @property
    def scale(self) -> float:
        """The loss scale, 1 but under fp16."""
        return self.scalars.get(SCALE, 1.0)

    def total_weight(self, batch: Batch) -> Array:
        """Return Σ weight over a batch / loss scale, a float64 scalar: the divisor of the loss."""
        return jnp.asarray(batch.weights.sum(dtype=np.float64) / self.scale, jnp.float64)

    def _unscaled(self, grads: Tree) -> Tree:
        return grads if self.scale == 1 else {name: g / g.dtype.type(self.scale) for name, g in grads.items()}

    def update(
        self,
        params: Tree,
        moments: dict[str, Tree],
        grads: Tree,
        coefficient: Array,
        step: int,
        lr: float,
        adam_in_fp32: bool = False,
    ) -> tuple[Tree, dict[str, Tree]]:
        """Clip, then the optimizer: new weights and moments. `step` is the number of steps done before this one."""
        move = self._move_in_fp32 if adam_in_fp32 else self._move
        terms, moments = move(params, moments, grads, coefficient, jnp.asarray(step + 1), jnp.asarray(lr, jnp.float64))
        return self._sum(terms), moments

    def move(
        self,
        params: Tree,
        moments: dict[str, Tree],
        grads: Tree,
        coefficient: Array,
        step: Array,
        lr: Array,
        adam_in_fp32: bool = False,
    ) -> tuple[Terms, dict[str, Tree]]:
        """Compute everything of the update but the last additions."""
        clipped = jax.tree.map(lambda g: g * coefficient.astype(g.dtype), grads)
        return next_state(self.config, params, moments, clipped, step, lr, adam_in_fp32)

    def observed(
        self,
        params: Tree,
        probes: Tree,
        tokens: Array,
        targets: Array,
        weights: Array,
        total: Array,
        names: Names,
        documents: Array | None = None,
    ) -> tuple[Tree, Tree, Tree]:
        """Return taps by name, and the loss's gradients by probe (a zero added to a tap) and by parameter; pure."""

        def loss(params: Tree, probes: Tree) -> tuple[Array, Tree]:
            seen: Tree = {}

            def tap(name: str, value: Array) -> Array:
                value = value + probes[name] if name in probes else value
                if name in names:
                    seen[name] = value
                return value

            model = self.model(params, self.shards.tap(tap))
            return model.loss(tokens, targets, weights, total, self.policy, *_given(documents))[0], seen

        if not any(name.startswith(GRADIENT) for name in names):
            return loss(params, probes)[1], {}, {}
        (_, seen), (by_parameter, by_probe) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, probes)
        return seen, by_probe, by_parameter

    def scores(
        self, params: Tree, tokens: Array, targets: Array, documents: Array | None, policy: Policy
    ) -> tuple[Array, Array]:
        """Return per-token nll (B, S) without z-loss, and whether the likeliest token is the target (B, S)."""
        model = self.model(params, self.shards.tap(no_tap))
        return scores(model, self.config.loss.chunk, tokens, targets, policy, *_given(documents))

    def next_logits(self, params: Tree, tokens: Array, last: Array, documents: Array | None) -> Array:
        """Return logits (V,) after the token at position `last` of the one sequence in `tokens` (1, S)."""
        model = self.model(params)
        x_BSD = model.trunk(tokens, self.policy, self.shards.tap(no_tap), documents)
        return model.cap(model.logits(x_BSD[:, last][:, None], self.policy)[0, 0])

    def largest_logits(self, params: Tree, tokens: Array, documents: Array | None) -> Array:
        """Return (layers,), the largest attention logit of each layer."""
        return largest_logits(self.model(params), tokens, self.policy, documents)

    def _under(self, policy: str) -> Policy:
        """Return a policy by name, with the roundings of the run's attention kernel."""
        found = replace(POLICIES[policy], kernel=kernel_followed(self.config))
        own = policy == self.config.precision.policy
        return replace(found, casts=self.config.precision.plan) if own else found

    def _run_update(self, inputs: Arrays) -> Arrays:
        def under(prefix: str) -> Tree:
            names = [name for name in parameter_shapes(self.config.model) if f"{prefix}/{name}" in inputs]
            return {n: jnp.asarray(inputs[f"{prefix}/{n}"], self.policy.stream) for n in names}

        params, grads = under("params"), under("grads")
        moments = {kind: under(kind) for kind in moment_names(self.config)}
        coefficient = jnp.asarray(inputs["coefficient"])
        step, lr, in_fp32 = int(inputs["step"]), float(inputs["lr"]), bool(inputs.get("adam_in_fp32", False))
        new, after = self.update(params, moments, grads, coefficient, step, lr, in_fp32)
        out = {f"params/{n}": np.asarray(p) for n, p in new.items()}
        return out | {f"{kind}/{n}": np.asarray(m) for kind, tree in after.items() for n, m in tree.items()}

    def _inputs(self, batch: Batch) -> tuple[Array, Array, Array]:
        """Return tokens, targets and weights of a batch, each device with its sequences."""
        weights = np.asarray(batch.weights, self.policy.stream)
        return self.shards.rows(batch.tokens), self.shards.rows(batch.targets), self.shards.rows(weights)

    def _documents(self, batch: Batch) -> Array | None:
        return self.shards.rows(batch.documents_for(self.config.attention))

    def _arrays(self, params: Mapping[str, np.ndarray]) -> Tree:
        return {n: self.shards.parameter(params[n], self.policy.stream) for n in self._paths if n in params}


def build_model(config: RunConfig) -> Transformer:
    """Build the model with unset weights."""
    model = Transformer(config)
    apply_float8(model, config)
    apply_loss_head(model, config.loss)
    return model


def _given(documents: Array | None) -> tuple[Array, ...]:
    return () if documents is None else (documents,)


def device_of(config: RunConfig) -> Literal["cpu", "cuda"]:
    """Return the device whose kernels the reference follows; `auto`, where nobody resolved it before, is the CPU."""
    return "cuda" if config.device == "cuda" else "cpu"


def kernel_followed(config: RunConfig) -> Kernel:
    """Return the attention kernel whose roundings the twin follows."""
    kernel = settled(config, device_of(config)).attention.chosen
    if kernel.written_out or config.model.attention_cap:
        return "math"
    return "wide" if kernel.wide_sums else device_of(config)


def summed(terms: Terms) -> Tree:
    """Return each parameter's terms, added from left to right."""
    return {name: reduce(jnp.add, of_name) for name, of_name in terms.items()}
