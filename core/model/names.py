"""Canonical names of parameters, groups and taps. They are torch's `state_dict` keys and the JAX model's paths."""

from __future__ import annotations

from lockstep.core.config.schema import ModelConfig

Shape = tuple[int, ...]

GROUPS = ("embedding", "head", "matrices", "gains", "biases")


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Every parameter's shape in canonical order; matrices are (out, in). A tied head has no name of its own."""
    hidden, kv = model.hidden, model.kv_heads * model.head_dim
    shapes: dict[str, Shape] = {"embed.weight": (model.vocab_size, hidden)}

    def linear(name: str, out: int, into: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (out, into)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    for i in range(model.layers):
        block = f"blocks.{i}"
        shapes[f"{block}.attn_norm.weight"] = (hidden,)
        linear(f"{block}.attn.q_proj", hidden, hidden, model.qkv_bias)
        linear(f"{block}.attn.k_proj", kv, hidden, model.qkv_bias)
        linear(f"{block}.attn.v_proj", kv, hidden, model.qkv_bias)
        linear(f"{block}.attn.o_proj", hidden, hidden, model.o_bias)
        shapes[f"{block}.mlp_norm.weight"] = (hidden,)
        linear(f"{block}.mlp.gate_proj", model.ffn_hidden, hidden, model.mlp_bias)
        linear(f"{block}.mlp.up_proj", model.ffn_hidden, hidden, model.mlp_bias)
        linear(f"{block}.mlp.down_proj", hidden, model.ffn_hidden, model.mlp_bias)
    shapes["final_norm.weight"] = (hidden,)
    if not model.tied:
        shapes["lm_head.weight"] = (model.vocab_size, hidden)
    return shapes


def head_name(model: ModelConfig) -> str:
    """The parameter that turns hidden states into logits."""
    return "embed.weight" if model.tied else "lm_head.weight"


def group_of(name: str) -> str:
    """The optimizer group of a parameter: one of `GROUPS`. A tied head belongs to `embedding`."""
    if name == "embed.weight":
        return "embedding"
    if name == "lm_head.weight":
        return "head"
    if name.endswith(".bias"):
        return "biases"
    if name.endswith("norm.weight"):
        return "gains"
    return "matrices"


def layer_of(name: str) -> int | None:
    """The block that a parameter or tap belongs to, under whatever prefix (`exp_avg/…`), or None outside the blocks."""
    parts = name.rpartition("/")[2].split(".")
    return int(parts[1]) if parts[0] == "blocks" else None


# Taps inside one block, in the order in which the forward pass makes them: (B, S, …), heads an axis of their own.
BLOCK_TAPS = (
    "attn_norm",
    "attn.q",
    "attn.k",
    "attn.v",
    "attn.q_rope",
    "attn.k_rope",
    "attn.out",
    "attn.o_proj",
    "attn_residual",
    "mlp_norm",
    "mlp.gate",
    "mlp.up",
    "mlp.act",
    "mlp.down_proj",
    "mlp_residual",
)

# Edges inside one block: where a tensor with several consumers enters one of them, under the consumer's tap and role.
# Forward an edge is the tensor itself; its gradient is what this consumer alone sends back.
BLOCK_EDGES = (
    "attn_norm.x",
    "attn.q.x",
    "attn.k.x",
    "attn.v.x",
    "attn_residual.x",
    "mlp_norm.x",
    "mlp.gate.x",
    "mlp.up.x",
    "mlp_residual.x",
)

# The head's weight where it enters the product: with tied weights, its gradient is the head's part of the table's.
HEAD_EDGE = "logits.weight"

# `grad/NAME`: d loss / d NAME for a tap, an edge or a parameter, from the tapped program.
GRADIENT = "grad/"


def tap_names(model: ModelConfig) -> list[str]:
    """Every forward tap of the model, in the order of the chain."""
    blocks = [f"blocks.{i}.{tap}" for i in range(model.layers) for tap in BLOCK_TAPS]
    return ["embed", *blocks, "final_norm", "logits", "nll"]


def edge_names(model: ModelConfig) -> list[str]:
    """Every edge of the model; only their gradients are observed."""
    return [*(f"blocks.{i}.{edge}" for i in range(model.layers) for edge in BLOCK_EDGES), HEAD_EDGE]


def probe_shapes(model: ModelConfig, batch: int, length: int) -> dict[str, Shape]:
    """Shape of every tap and edge on `batch` sequences of `length` tokens."""
    hidden, kv = model.hidden, model.kv_heads * model.head_dim
    widths: dict[str, Shape] = {
        "attn.k": (kv,),
        "attn.v": (kv,),
        "attn.q_rope": (model.heads, model.head_dim),
        "attn.k_rope": (model.kv_heads, model.head_dim),
        **dict.fromkeys(("mlp.gate", "mlp.up", "mlp.act"), (model.ffn_hidden,)),
        "logits": (model.vocab_size,),
        "nll": (),
    }
    shapes = {}
    for name in (*tap_names(model), *edge_names(model)):
        within = name.split(".", 2)[2] if layer_of(name) is not None else name
        shapes[name] = (batch, length, *widths.get(within, (hidden,)))
    return shapes | {HEAD_EDGE: (model.vocab_size, hidden)}
