"""Every stage of the forward chain as a function of its own inputs, with its backward. Twin: jax_backend/stages.py.

Input and output names are those of core/parity/reference/stages.py. The functions are the model's own methods, so that
a session of a changed model judges by what that model does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lockstep.torch_backend.kernels.embedding import embedding
from lockstep.torch_backend.kernels.float8 import Float8
from lockstep.torch_backend.kernels.library_heads import library_nll
from lockstep.torch_backend.model import Block, Llama, positions, rms_norm, rope_at
from lockstep.torch_backend.precision import Policy, head, linear

Inputs = Mapping[str, Tensor]
StageFunction = Callable[[Inputs], Tensor]


LINEARS = ("q", "k", "v", "o_proj", "gate", "up", "down_proj")


def stage_functions(model: Llama, policy: Policy, float8: Float8 | None) -> dict[str, StageFunction]:
    """Stage id → function of its inputs, under one policy; `ID/fp8` of a linear layer that computes in FP8."""
    block = model.blocks[0]
    assert isinstance(block, Block)
    attention, mlp, eps = block.attn, block.mlp, model.final_norm.eps
    heads, kv_heads, head_dim = attention.heads, attention.kv_heads, attention.head_dim

    def norm(inputs: Inputs) -> Tensor:
        return rms_norm(inputs["x"], inputs["weight"], eps)

    def project(inputs: Inputs, float8: Float8 | None = None) -> Tensor:
        return linear(inputs["x"], inputs["weight"], inputs.get("bias"), policy, float8)

    def rope(inputs: Inputs, count: int) -> Tensor:
        length = inputs["x"].shape[1]
        places = positions(inputs["documents"]) if "documents" in inputs else None
        tables = rope_at((model.cos[:length], model.sin[:length]), places, policy)
        return attention.rotate(inputs["x"].unflatten(-1, (count, head_dim)), tables)

    def attend(inputs: Inputs) -> Tensor:
        v_BSKE = inputs["v"].unflatten(-1, (kv_heads, head_dim))
        mask = (model.kernel.mask(inputs["documents"]),) if "documents" in inputs else ()
        return attention.attend(inputs["q"], inputs["k"], v_BSKE, policy, *mask).flatten(2)

    def add(inputs: Inputs) -> Tensor:
        return inputs["x"] + inputs["y"]

    def library_head(inputs: Inputs) -> Tensor:
        largest = inputs["grad"].abs().max().double() if "grad" in inputs else torch.tensor(0.0).double()
        return library_nll(inputs["x"], inputs["weight"], inputs["targets"], largest, policy, model.head)

    return {
        "embed": lambda inputs: embedding(inputs["tokens"], inputs["weight"]),
        **dict.fromkeys(("attn_norm", "mlp_norm", "final_norm"), norm),
        **dict.fromkeys(LINEARS, project),
        **({f"{name}/fp8": partial(project, float8=float8) for name in LINEARS} if float8 else {}),
        "q_rope": lambda inputs: rope(inputs, heads),
        "k_rope": lambda inputs: rope(inputs, kv_heads),
        "attn": attend,
        **dict.fromkeys(("attn_residual", "mlp_residual"), add),
        "act": lambda inputs: mlp.activate(inputs["gate"], inputs["up"]),
        "logits": lambda inputs: head(inputs["x"], inputs["weight"], policy),
        "nll": lambda inputs: model.nll(inputs["logits"], inputs["targets"]),
        **({f"{model.head.head}_head": library_head} if model.head.of_library else {}),
    }


def run_stage(function: StageFunction, inputs: Mapping[str, np.ndarray], policy: Policy) -> dict[str, Tensor]:
    """`out`, and `grad/ROLE` of every floating input if `inputs` hold `grad`, the gradient of the output."""
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
    grads = torch.autograd.grad(out, list(leaves.values()), grad)
    return {"out": out, **{f"grad/{role}": g for role, g in zip(leaves, grads, strict=True)}}
