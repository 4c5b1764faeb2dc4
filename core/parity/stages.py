"""The chain of stages: literal ids, phases, and which taps and parameters each forward stage reads and writes.

Ids appear as `stage` in verdicts. Order is the chain's order; the first broken link is the origin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from core.config import ModelConfig
from core.names import head_name


@dataclass(frozen=True)
class ForwardStage:
    """One link of the forward chain at one place.

    id:     literal stage id. tap: the tap that it writes. layer: its block, or None.
    taps:   input role → tap that it reads. params: input role → parameter that it reads. batch: roles read from the
    batch.
    """

    id: str
    tap: str
    layer: int | None
    taps: Mapping[str, str]
    params: Mapping[str, str]
    batch: tuple[str, ...] = ()


PHASES = {
    "tokens": "data",
    "weights": "state",
    **dict.fromkeys(
        (
            "embed",
            "attn_norm",
            "q",
            "k",
            "v",
            "q_rope",
            "k_rope",
            "attn",
            "o_proj",
            "attn_residual",
            "mlp_norm",
            "gate",
            "up",
            "act",
            "down_proj",
            "mlp_residual",
            "final_norm",
            "logits",
            "nll",
            "loss",
        ),
        "forward",
    ),
    "gradients": "backward",
    **dict.fromkeys(("grad_norm", "clip_coefficient", "learning_rate", "moments", "update", "step_count"), "update"),
}

ORDER = {stage: i for i, stage in enumerate(PHASES)}


def forward_stages(model: ModelConfig) -> list[ForwardStage]:
    """Every forward stage of the model in the order of the chain, the per-token NLL last."""
    stages = [ForwardStage("embed", "embed", None, {}, {"weight": "embed.weight"}, ("tokens",))]
    stream = "embed"
    for layer in range(model.layers):
        stages += _block(model, layer, stream)
        stream = f"blocks.{layer}.mlp_residual"
    stages += [
        ForwardStage("final_norm", "final_norm", None, {"x": stream}, {"weight": "final_norm.weight"}),
        ForwardStage("logits", "logits", None, {"x": "final_norm"}, {"weight": head_name(model)}),
        ForwardStage("nll", "nll", None, {"logits": "logits"}, {}, ("targets",)),
    ]
    return stages


def _block(model: ModelConfig, layer: int, stream: str) -> list[ForwardStage]:
    at = f"blocks.{layer}"

    def norm(stage: str, x: str) -> ForwardStage:
        return ForwardStage(stage, f"{at}.{stage}", layer, {"x": x}, {"weight": f"{at}.{stage}.weight"})

    def project(stage: str, tap: str, parameter: str, x: str, bias: bool) -> ForwardStage:
        params = {"weight": f"{at}.{parameter}.weight"} | ({"bias": f"{at}.{parameter}.bias"} if bias else {})
        return ForwardStage(stage, f"{at}.{tap}", layer, {"x": f"{at}.{x}"}, params)

    def join(stage: str, x: str, y: str) -> ForwardStage:
        return ForwardStage(stage, f"{at}.{stage}", layer, {"x": x, "y": y}, {})

    def simple(stage: str, tap: str, **taps: str) -> ForwardStage:
        return ForwardStage(stage, f"{at}.{tap}", layer, {role: f"{at}.{t}" for role, t in taps.items()}, {})

    return [
        norm("attn_norm", stream),
        project("q", "attn.q", "attn.q_proj", "attn_norm", model.qkv_bias),
        project("k", "attn.k", "attn.k_proj", "attn_norm", model.qkv_bias),
        project("v", "attn.v", "attn.v_proj", "attn_norm", model.qkv_bias),
        simple("q_rope", "attn.q_rope", x="attn.q"),
        simple("k_rope", "attn.k_rope", x="attn.k"),
        simple("attn", "attn.out", q="attn.q_rope", k="attn.k_rope", v="attn.v"),
        project("o_proj", "attn.o_proj", "attn.o_proj", "attn.out", model.o_bias),
        join("attn_residual", stream, f"{at}.attn.o_proj"),
        norm("mlp_norm", f"{at}.attn_residual"),
        project("gate", "mlp.gate", "mlp.gate_proj", "mlp_norm", model.mlp_bias),
        project("up", "mlp.up", "mlp.up_proj", "mlp_norm", model.mlp_bias),
        simple("act", "mlp.act", gate="mlp.gate", up="mlp.up"),
        project("down_proj", "mlp.down_proj", "mlp.down_proj", "mlp.act", model.mlp_bias),
        join("mlp_residual", f"{at}.attn_residual", f"{at}.mlp.down_proj"),
    ]
