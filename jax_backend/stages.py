"""The stages of the forward chain as functions of their own inputs, so that the reference can judge one stage alone.

Input and output names are those of core/parity/reference/stages.py. The functions are the model's own methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lockstep.core.config.schema import RunConfig
from lockstep.core.model.families import graph_of
from lockstep.core.model.families.transformer import WINDOWED
from lockstep.core.model.graph import KINDS
from lockstep.core.parity.reference.operations import aligned
from lockstep.core.parity.reference.stages import stages_of
from lockstep.jax_backend.attention import document_mask, window_mask
from lockstep.jax_backend.kernels.float8 import Float8
from lockstep.jax_backend.kernels.layer_norm import layer_norm
from lockstep.jax_backend.kernels.library_heads import library_nll
from lockstep.jax_backend.model import Transformer, positions, rms_norm, rope_at
from lockstep.jax_backend.policy import Policy
from lockstep.jax_backend.precision import head, linear

Inputs = Mapping[str, Array]
StageFunction = Callable[[Inputs], Array]


def stage_functions(run: RunConfig, model: Transformer, policy: Policy) -> dict[str, StageFunction]:
    """Map stage ids to functions of inputs under one policy; `ID/fp8` is the same linear layer in FP8.

    Stages that differ only in shapes have one function.
    """
    attention, mlp, eps = model.blocks[0].attn, model.blocks[0].mlp, run.model.norm_eps
    heads, kv_heads, head_dim = attention.heads, attention.kv_heads, attention.head_dim
    recipe = run.precision.fp8

    def by_heads(x: Array, heads: int) -> Array:
        return x if x.ndim == 4 else x.reshape(*x.shape[:2], heads, head_dim)

    def embed(inputs: Inputs) -> Array:
        return policy.kept(inputs["weight"][inputs["tokens"]], "residual")

    def scale(inputs: Inputs) -> Array:
        return policy.kept(policy.read(inputs["x"], "residual") * model.embed_scale, "residual")

    def position(inputs: Inputs) -> Array:
        x = policy.read(inputs["x"], "residual")
        places = positions(inputs["documents"]) if "documents" in inputs else jnp.arange(x.shape[1])
        return policy.kept(x + inputs["weight"][places], "residual")

    def norm(inputs: Inputs) -> Array:
        return policy.kept(rms_norm(policy.read(inputs["x"], "residual"), inputs["weight"], eps), "norm")

    def centered(inputs: Inputs) -> Array:
        return policy.kept(rms_norm(inputs["x"], 1 + inputs["weight"], eps), "norm")

    def with_mean(inputs: Inputs) -> Array:
        return policy.kept(layer_norm(inputs["x"], inputs["weight"], inputs["bias"], eps), "norm")

    def of_heads(inputs: Inputs) -> Array:
        heads = inputs["x"].shape[-1] // head_dim
        return policy.kept(rms_norm(by_heads(inputs["x"], heads), inputs["weight"], eps), "norm")

    def project(inputs: Inputs, float8: Float8 | None = None) -> Array:
        return linear(inputs["x"], inputs["weight"], inputs.get("bias"), policy, float8, inputs.get("amax"))

    def rope(inputs: Inputs, heads: int) -> Array:
        length = inputs["x"].shape[1]
        places = positions(inputs["documents"]) if "documents" in inputs else None
        tables = rope_at(model.rope_of(length), places, policy)
        return policy.rotated(lambda x: attention.rotate(x, tables), by_heads(inputs["x"], heads))

    def attend(inputs: Inputs, windowed: bool = False) -> Array:
        v = by_heads(inputs["v"], kv_heads)
        q, k = by_heads(inputs["q"], heads), by_heads(inputs["k"], kv_heads)
        documents = inputs.get("documents")
        masks = [] if documents is None else [document_mask(documents)]
        if windowed:
            masks = [window_mask(documents, model.window, q.shape[1])]
        out = attention.attend(q, k, v, policy, *masks)
        return out.reshape(*out.shape[:2], -1)

    def activate(inputs: Inputs) -> Array:
        return policy.activated(mlp.activate, *(inputs[role] for role in ("gate", "up") if role in inputs))

    def add(inputs: Inputs) -> Array:
        return policy.kept(inputs["x"] + policy.read(inputs["y"], "linear"), "residual")

    def logits(inputs: Inputs) -> Array:
        return head(inputs["x"], inputs["weight"], policy)

    def cap(inputs: Inputs) -> Array:
        return model.cap(policy.read(inputs["logits"], "logits"))

    def nll(inputs: Inputs) -> Array:
        return model.nll(policy.read(inputs["logits"], "logits"), inputs["targets"])

    def library_head(inputs: Inputs) -> Array:
        return library_nll(policy.read(inputs["x"], "norm"), inputs["weight"], inputs["targets"], policy, run.loss)

    of_kind: dict[str, StageFunction] = {
        "embedding": embed,
        "scale": scale,
        "position": position,
        "norm": norm,
        "centered_norm": centered,
        "layer_norm": with_mean,
        "head_norm": of_heads,
        "linear": project,
        "attention": attend,
        "gated": activate,
        "gated_gelu": activate,
        "gelu": activate,
        "sum": add,
        "logits": logits,
        "cap": cap,
        "nll": nll,
        "library_head": library_head,
    }
    in_float8, in_window = partial(project, float8=recipe), partial(attend, windowed=True)
    found: dict[str, StageFunction] = {}
    # With a library's loss head, the stages of Lockstep's own head exist too.
    for operation in (*graph_of(run.model).operations, *stages_of(run)):
        turned = partial(rope, heads=operation.width[0] if operation.kind == "rope" else 0)
        function = in_window if operation.id == WINDOWED else of_kind.get(operation.kind, turned)
        found.setdefault(operation.id, function)
        if recipe and KINDS[operation.kind].in_fp8:
            found[f"{operation.id}/fp8"] = in_float8
    return found


def with_gradients(function: StageFunction) -> Callable[[Inputs], dict[str, Array]]:
    """Return the stage as a program: `out`, and `grad/ROLE` of every floating input if the inputs hold `grad`."""

    def run(inputs: Inputs) -> dict[str, Array]:
        if "grad" not in inputs:
            return {"out": function(inputs)}
        fixed = {n: a for n, a in inputs.items() if n != "grad" and not jnp.issubdtype(a.dtype, jnp.floating)}
        floating = {n: a for n, a in inputs.items() if n != "grad" and n not in fixed}
        out, pull_back = jax.vjp(lambda arrays: function({**fixed, **arrays}), floating)
        (grads,) = pull_back(inputs["grad"])
        return {"out": out, **{f"grad/{role}": grad for role, grad in grads.items()}}

    return run


def in_stream(inputs: Mapping[str, np.ndarray], policy: Policy) -> dict[str, np.ndarray]:
    """Return floating inputs in the policy's stream dtype, integers as they are."""
    # By NumPy: in JAX each shape's cast is a program of its own, and XLA on the CPU takes subnormal FP32 numbers for 0.
    arrays = {name: np.asarray(value) for name, value in inputs.items()}
    with np.errstate(over="ignore", invalid="ignore"):  # beyond the format is infinity, as in every step
        floating = {n: aligned(a, policy.stream) for n, a in arrays.items() if jnp.issubdtype(a.dtype, jnp.floating)}
    return {**arrays, **floating}
