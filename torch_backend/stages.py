"""The stages of the forward chain as functions of their inputs, with their backward. Twin: jax_backend/stages.py.

Names of inputs and outputs are those of core/parity/reference/stages.py. The functions call the model's own methods, so
that they compute what a changed model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.core.config.schema import RunConfig
from lockstep.core.model.families import graph_of
from lockstep.core.model.families.transformer import WINDOWED
from lockstep.core.model.graph import KINDS
from lockstep.core.parity.reference.stages import stages_of
from lockstep.torch_backend.kernels.embedding import embedding
from lockstep.torch_backend.kernels.float8 import Float8
from lockstep.torch_backend.kernels.layer_norm import layer_norm
from lockstep.torch_backend.kernels.library_heads import library_nll
from lockstep.torch_backend.kernels.recompute_products import rms_norm
from lockstep.torch_backend.model import Block, Transformer, positions, rope_at
from lockstep.torch_backend.precision import Policy, head, linear

Inputs = Mapping[str, Tensor]
StageFunction = Callable[[Inputs], Tensor]


def stage_functions(
    run: RunConfig, model: Transformer, policy: Policy, float8: Float8 | None
) -> dict[str, StageFunction]:
    """Map stage ids to functions of inputs under one policy; `ID/fp8` is the same linear layer in FP8.

    Stages that differ only in shapes have one function.
    """
    block = model.blocks[0]
    assert isinstance(block, Block)
    attention, mlp, eps = block.attn, block.mlp, run.model.norm_eps
    heads, kv_heads, head_dim = attention.heads, attention.kv_heads, attention.head_dim

    def by_heads(x: Tensor, heads: int) -> Tensor:
        return x if x.ndim == 4 else x.unflatten(-1, (heads, head_dim))

    def embed(inputs: Inputs) -> Tensor:
        return policy.kept(embedding(inputs["tokens"], inputs["weight"]), "residual")

    def scale(inputs: Inputs) -> Tensor:
        x = policy.read(policy.kept(inputs["x"], "residual"), "residual")
        return policy.kept(x * model.embed_scale, "residual")

    def position(inputs: Inputs) -> Tensor:
        x = policy.read(policy.kept(inputs["x"], "residual"), "residual")
        length = x.shape[1]
        places = positions(inputs["documents"]) if "documents" in inputs else torch.arange(length, device=x.device)
        return policy.kept(x + F.embedding(places, inputs["weight"]), "residual")

    def norm(inputs: Inputs) -> Tensor:
        x = policy.read(policy.kept(inputs["x"], "residual"), "residual")
        return policy.kept(rms_norm(x, inputs["weight"], eps), "norm")

    def centered(inputs: Inputs) -> Tensor:
        return policy.kept(rms_norm(inputs["x"], 1 + inputs["weight"], eps), "norm")

    def with_mean(inputs: Inputs) -> Tensor:
        return policy.kept(layer_norm(inputs["x"], inputs["weight"], inputs["bias"], eps), "norm")

    def of_heads(inputs: Inputs) -> Tensor:
        heads = inputs["x"].shape[-1] // head_dim
        return policy.kept(rms_norm(by_heads(inputs["x"], heads), inputs["weight"], eps), "norm")

    def project(inputs: Inputs, float8: Float8 | None = None) -> Tensor:
        of_layer = replace(float8, amax=inputs["amax"]) if float8 and "amax" in inputs else float8
        return linear(inputs["x"], inputs["weight"], inputs.get("bias"), policy, of_layer)

    def rope(inputs: Inputs, heads: int) -> Tensor:
        length = inputs["x"].shape[1]
        places = positions(inputs["documents"]) if "documents" in inputs else None
        tables = rope_at(model.rope_of(length), places, policy)
        x = policy.kept(by_heads(inputs["x"], heads), "linear")
        return policy.rotated(lambda x: attention.rotate(x, tables), x)

    def attend(inputs: Inputs, windowed: bool = False) -> Tensor:
        v = policy.kept(by_heads(inputs["v"], kv_heads), "linear")
        q, k = (policy.kept(by_heads(inputs[role], n), "rotation") for role, n in (("q", heads), ("k", kv_heads)))
        documents = inputs.get("documents")
        masks = [] if documents is None else [model.kernel.mask(documents)]
        if windowed:
            masks = [model.kernel.window(documents, model.window, 0, q.shape[1], q.device)]
        return attention.attend(q, k, v, policy, *masks).flatten(2)

    def activate(inputs: Inputs) -> Tensor:
        read = (policy.kept(inputs[role], "linear") for role in ("gate", "up") if role in inputs)
        return policy.activated(mlp.activate, *read)

    def add(inputs: Inputs) -> Tensor:
        return policy.kept(policy.kept(inputs["x"], "residual") + policy.kept(inputs["y"], "linear"), "residual")

    def logits(inputs: Inputs) -> Tensor:
        return head(inputs["x"], inputs["weight"], policy)

    def cap(inputs: Inputs) -> Tensor:
        return model.cap(policy.read(policy.kept(inputs["logits"], "logits"), "logits"))

    def nll(inputs: Inputs) -> Tensor:
        return model.nll(policy.kept(inputs["logits"], "logits"), inputs["targets"])

    def library_head(inputs: Inputs) -> Tensor:
        largest = inputs["grad"].abs().max().double() if "grad" in inputs else torch.tensor(0.0).double()
        return library_nll(
            policy.kept(inputs["x"], "norm"), inputs["weight"], inputs["targets"], largest, policy, run.loss
        )

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
    in_float8, in_window = partial(project, float8=float8), partial(attend, windowed=True)
    found: dict[str, StageFunction] = {}
    # With a library's loss head, the stages of Lockstep's own head exist too.
    for operation in (*graph_of(run.model).operations, *stages_of(run)):
        turned = partial(rope, heads=operation.width[0] if operation.kind == "rope" else 0)
        function = in_window if operation.id == WINDOWED else of_kind.get(operation.kind, turned)
        found.setdefault(operation.id, function)
        if float8 and KINDS[operation.kind].in_fp8:
            found[f"{operation.id}/fp8"] = in_float8
    return found


def run_stage(function: StageFunction, inputs: Mapping[str, np.ndarray], policy: Policy) -> dict[str, Tensor]:
    """Return `out`, and, if `inputs` has `grad`, the gradient of the output, `grad/ROLE` of every floating input."""
    tensors = {}
    for role, array in inputs.items():
        tensor = torch.tensor(array)
        tensors[role] = tensor.to(policy.stream) if tensor.is_floating_point() else tensor.long()
    grad = tensors.get("grad")
    roles = [role for role, t in tensors.items() if role != "grad" and t.is_floating_point() and grad is not None]
    leaves = {role: tensors[role].requires_grad_() for role in roles}
    out = function(tensors)
    if grad is None:
        return {"out": out}
    # allow_unused: a layer that is not in FP8 does not read its amaxes.
    sent = torch.autograd.grad(
        out, list(leaves.values()), grad.to(out.dtype), allow_unused=True, materialize_grads=True
    )
    grads = tuple(sent)
    return {"out": out, **{f"grad/{role}": g for role, g in zip(leaves, grads, strict=True)}}
