"""Llama 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU (Grattafiori et al. 2024, section 3.2)."""

from __future__ import annotations

import math

from lockstep.core.config.sections import AttentionConfig, LossConfig, ModelConfig
from lockstep.core.model.graph import Constant, Normal, Operation, Parameter, Shape


def operations(model: ModelConfig, attention: AttentionConfig, loss: LossConfig) -> list[Operation]:
    """Every operation in the order of the chain; names without `blocks.` stand outside the blocks."""
    found = [_embedding(model)]
    stream = "embed"
    for layer in range(model.layers):
        found += _block(model, attention, layer, stream)
        stream = f"blocks.{layer}.mlp_residual"
    found.append(_norm(model, "final_norm", None, "final_norm", stream))
    return [*found, *_head(model, loss)]


def _table(model: ModelConfig) -> Parameter:
    return Parameter("embed.weight", (model.vocab_size, model.hidden), "embedding", Normal(0.02))


def _embedding(model: ModelConfig) -> Operation:
    parameters = {"weight": _table(model)}
    width = (model.hidden,)
    return Operation("embed", "embedding", "embed", None, "embedding", {}, parameters, width, batch=("tokens",))


def _norm(model: ModelConfig, id: str, layer: int | None, tap: str, x: str) -> Operation:
    gain = Parameter(f"{tap}.weight", (model.hidden,), "gains", Constant(1.0))
    return Operation(id, "norm", tap, layer, "norms", {"x": x}, {"weight": gain}, (model.hidden,))


def _block(model: ModelConfig, attention: AttentionConfig, layer: int, stream: str) -> list[Operation]:
    at = f"blocks.{layer}"
    hidden, kv, ffn = model.hidden, model.kv_heads * model.head_dim, model.ffn_hidden
    places = ("documents",) if attention.reset_positions else ()
    seen = ("documents",) if attention.document_mask else ()
    # Projections that write the residual stream start smaller, by their number (Radford et al. 2019, section 2.3).
    into_stream = hidden**-0.5 / math.sqrt(2 * model.layers)

    def project(id: str, part: str, tap: str, module: str, x: str, into: int, out: int, bias: bool) -> Operation:
        std = into_stream if id in ("o_proj", "down_proj") else into**-0.5
        parameters = {"weight": Parameter(f"{at}.{module}.weight", (out, into), "matrices", Normal(std))}
        if bias:
            parameters["bias"] = Parameter(f"{at}.{module}.bias", (out,), "biases", Constant(0.0))
        reads, flops = {"x": f"{at}.{x}"}, (2.0 * into * out, 0.0)
        return Operation(id, "linear", f"{at}.{tap}", layer, part, reads, parameters, (out,), flops=flops)

    def plain(id: str, kind: str, part: str, tap: str, width: Shape, **reads: str) -> Operation:
        return Operation(id, kind, f"{at}.{tap}", layer, part, {r: f"{at}.{t}" for r, t in reads.items()}, {}, width)

    def rotate(id: str, tap: str, x: str, heads: int) -> Operation:
        reads, width = {"x": f"{at}.{x}"}, (heads, model.head_dim)
        return Operation(id, "rope", f"{at}.{tap}", layer, "attention", reads, {}, width, places)

    def add(id: str, x: str, y: str) -> Operation:
        return Operation(id, "sum", f"{at}.{id}", layer, "block", {"x": x, "y": y}, {}, (hidden,))

    attend = {"q": f"{at}.attn.q_rope", "k": f"{at}.attn.k_rope", "v": f"{at}.attn.v"}
    # Scores and values, each 2 · hidden FLOPs a key, over the S/2 keys that a token sees on average.
    of_scores = (0.0, 2.0 * hidden)
    return [
        _norm(model, "attn_norm", layer, f"{at}.attn_norm", stream),
        project("q", "attention", "attn.q", "attn.q_proj", "attn_norm", hidden, hidden, model.qkv_bias),
        project("k", "attention", "attn.k", "attn.k_proj", "attn_norm", hidden, kv, model.qkv_bias),
        project("v", "attention", "attn.v", "attn.v_proj", "attn_norm", hidden, kv, model.qkv_bias),
        rotate("q_rope", "attn.q_rope", "attn.q", model.heads),
        rotate("k_rope", "attn.k_rope", "attn.k", model.kv_heads),
        Operation("attn", "attention", f"{at}.attn.out", layer, "attention", attend, {}, (hidden,), seen, of_scores),
        project("o_proj", "attention", "attn.o_proj", "attn.o_proj", "attn.out", hidden, hidden, model.o_bias),
        add("attn_residual", stream, f"{at}.attn.o_proj"),
        _norm(model, "mlp_norm", layer, f"{at}.mlp_norm", f"{at}.attn_residual"),
        project("gate", "mlp", "mlp.gate", "mlp.gate_proj", "mlp_norm", hidden, ffn, model.mlp_bias),
        project("up", "mlp", "mlp.up", "mlp.up_proj", "mlp_norm", hidden, ffn, model.mlp_bias),
        plain("act", "gated", "mlp", "mlp.act", (ffn,), gate="mlp.gate", up="mlp.up"),
        project("down_proj", "mlp", "mlp.down_proj", "mlp.down_proj", "mlp.act", ffn, hidden, model.mlp_bias),
        add("mlp_residual", f"{at}.attn_residual", f"{at}.mlp.down_proj"),
    ]


def _head(model: ModelConfig, loss: LossConfig) -> list[Operation]:
    shape = (model.vocab_size, model.hidden)
    own = Parameter("lm_head.weight", shape, "head", Normal(model.hidden**-0.5))
    weight = {"weight": _table(model) if model.tied else own}
    flops, x = (2.0 * model.vocab_size * model.hidden, 0.0), {"x": "final_norm"}
    if loss.of_library:
        id = loss.chosen.stage
        return [Operation(id, "library_head", "nll", None, "head", x, weight, (), ("targets",), flops)]
    return [
        Operation("logits", "logits", "logits", None, "head", x, weight, (model.vocab_size,), flops=flops),
        Operation("nll", "nll", "nll", None, "head", {"logits": "logits"}, {}, (), ("targets",)),
    ]
