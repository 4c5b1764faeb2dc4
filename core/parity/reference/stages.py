"""The chain of stages: literal ids, phases, and which taps and parameters each forward stage reads and writes.

Ids appear as `stage` in verdicts. A forward stage has a backward as well, under the same id with phase `backward`.
`place` gives the position of a link in the chain of a step; the first broken link is the origin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.core.config.schema import LIBRARIES, AttentionConfig, LossConfig, ModelConfig, RunConfig
from lockstep.core.model.names import HEAD_EDGE, head_name


@dataclass(frozen=True)
class ForwardStage:
    """One link of the forward chain at one place.

    id:     literal stage id. tap: the tap that it writes. layer: its block, or None.
    taps:   input role → tap that it reads. params: input role → parameter that it reads. batch: arrays of the batch
            that it reads, by their name, which is the role too.
    edges:  input role → the edge or tap whose gradient is what this stage alone sends back there.
    """

    id: str
    tap: str
    layer: int | None
    taps: Mapping[str, str]
    params: Mapping[str, str]
    batch: tuple[str, ...] = ()
    edges: Mapping[str, str] = field(default_factory=dict)

    def sends(self, role: str) -> str:
        """The tap, edge or parameter whose gradient this stage alone makes through input `role`."""
        return self.edges.get(role) or self.taps.get(role) or self.params[role]


# A library's head: logits and NLL in one.
HEADS = tuple(f"{library}_head" for library in LIBRARIES)

FORWARD = (
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
    *HEADS,
    "loss",
)
UPDATE = ("grad_norm", "clip_coefficient", "learning_rate", "moments", "update", "loss_scale", "step_count")

# Stage id → the phase in which it first acts. `compiler`: the program that trains against the tapped one.
# `gradients`: what the session gives as a micro-batch's gradients against what its program made. `reduction`: the
# gradients that ranks share against each rank's own.
PHASES = {
    "tokens": "data",
    "weights": "state",
    **dict.fromkeys(FORWARD, "forward"),
    **dict.fromkeys(("compiler", "gradients", "accumulation", "reduction"), "backward"),
    **dict.fromkeys(UPDATE, "update"),
    "checkpoint": "state",
}

ORDER = {stage: i for i, stage in enumerate(PHASES)}


def place(stage: str, phase: str, layer: int | None) -> tuple[int, int, int]:
    """Where a link stands in the chain of a step, as a key to sort by. Backward is the forward chain in reverse."""
    minor = ORDER[stage]
    if stage not in FORWARD:
        return (0 if stage in ("tokens", "weights") else 3, minor, 0)
    block = -1 if stage == "embed" else LAST_BLOCK if layer is None else layer
    return (1, block, minor) if phase == "forward" else (2, -block, -minor)


LAST_BLOCK = 1 << 30


def stages_of(config: RunConfig) -> list[ForwardStage]:
    """Every forward stage of a run."""
    return forward_stages(config.model, config.attention, config.loss)


def forward_stages(
    model: ModelConfig, attention: AttentionConfig | None = None, loss: LossConfig | None = None
) -> list[ForwardStage]:
    """Every forward stage of the model in the order of the chain, the per-token NLL last.

    attention: of the run, for what its stages read from the batch; without it, nothing. loss: of the run; a library's
    head, which shows no logits, is one stage from the final norm's output to the NLL.
    """
    attention, loss = attention or AttentionConfig(), loss or LossConfig()
    stages = [ForwardStage("embed", "embed", None, {}, {"weight": "embed.weight"}, ("tokens",))]
    stream = "embed"
    for layer in range(model.layers):
        stages += _block(model, attention, layer, stream)
        stream = f"blocks.{layer}.mlp_residual"
    stages.append(ForwardStage("final_norm", "final_norm", None, {"x": stream}, {"weight": "final_norm.weight"}))
    reads: dict[str, Any] = {"taps": {"x": "final_norm"}, "params": {"weight": head_name(model)}}
    reads["edges"] = {"weight": HEAD_EDGE} if model.tied else {}
    if loss.of_library:
        return [*stages, ForwardStage(f"{loss.head}_head", "nll", None, **reads, batch=("targets",))]
    nll = ForwardStage("nll", "nll", None, {"logits": "logits"}, {}, ("targets",))
    return [*stages, ForwardStage("logits", "logits", None, **reads), nll]


def _block(model: ModelConfig, attention: AttentionConfig, layer: int, stream: str) -> list[ForwardStage]:
    at = f"blocks.{layer}"
    places = ("documents",) if attention.reset_positions else ()
    seen = ("documents",) if attention.document_mask else ()

    def norm(stage: str, x: str) -> ForwardStage:
        tap = f"{at}.{stage}"
        return ForwardStage(stage, tap, layer, {"x": x}, {"weight": f"{tap}.weight"}, edges={"x": f"{tap}.x"})

    def project(stage: str, tap: str, parameter: str, x: str, bias: bool, shared: bool) -> ForwardStage:
        params = {"weight": f"{at}.{parameter}.weight"} | ({"bias": f"{at}.{parameter}.bias"} if bias else {})
        edges = {"x": f"{at}.{tap}.x"} if shared else {}
        return ForwardStage(stage, f"{at}.{tap}", layer, {"x": f"{at}.{x}"}, params, edges=edges)

    def join(stage: str, x: str, y: str) -> ForwardStage:
        tap = f"{at}.{stage}"
        return ForwardStage(stage, tap, layer, {"x": x, "y": y}, {}, edges={"x": f"{tap}.x"})

    def simple(stage: str, tap: str, batch: tuple[str, ...] = (), **taps: str) -> ForwardStage:
        return ForwardStage(stage, f"{at}.{tap}", layer, {role: f"{at}.{t}" for role, t in taps.items()}, {}, batch)

    return [
        norm("attn_norm", stream),
        project("q", "attn.q", "attn.q_proj", "attn_norm", model.qkv_bias, shared=True),
        project("k", "attn.k", "attn.k_proj", "attn_norm", model.qkv_bias, shared=True),
        project("v", "attn.v", "attn.v_proj", "attn_norm", model.qkv_bias, shared=True),
        simple("q_rope", "attn.q_rope", places, x="attn.q"),
        simple("k_rope", "attn.k_rope", places, x="attn.k"),
        simple("attn", "attn.out", seen, q="attn.q_rope", k="attn.k_rope", v="attn.v"),
        project("o_proj", "attn.o_proj", "attn.o_proj", "attn.out", model.o_bias, shared=False),
        join("attn_residual", stream, f"{at}.attn.o_proj"),
        norm("mlp_norm", f"{at}.attn_residual"),
        project("gate", "mlp.gate", "mlp.gate_proj", "mlp_norm", model.mlp_bias, shared=True),
        project("up", "mlp.up", "mlp.up_proj", "mlp_norm", model.mlp_bias, shared=True),
        simple("act", "mlp.act", gate="mlp.gate", up="mlp.up"),
        project("down_proj", "mlp.down_proj", "mlp.down_proj", "mlp.act", model.mlp_bias, shared=False),
        join("mlp_residual", f"{at}.attn_residual", f"{at}.mlp.down_proj"),
    ]


@dataclass(frozen=True)
class Shared:
    """A tensor whose gradient several stages send back: its gradient is the sum of theirs.

    name: tap or parameter. producer: the stage that writes it (for a parameter, the last to send its part).
    consumers: (stage, role, edge); the edge is None where a part has no name of its own.
    """

    name: str
    producer: ForwardStage
    consumers: tuple[tuple[ForwardStage, str, str | None], ...]


def shared_tensors(config: RunConfig) -> list[Shared]:
    """Every tensor with several consumers: the residual stream, the outputs of norms, a tied embedding."""
    stages = stages_of(config)
    writers = {stage.tap: stage for stage in stages}
    readers: dict[str, list[tuple[ForwardStage, str, str | None]]] = {}
    for stage in stages:
        for role, tap in stage.taps.items():
            readers.setdefault(tap, []).append((stage, role, stage.sends(role)))
    found = [Shared(tap, writers[tap], tuple(group)) for tap, group in readers.items() if len(group) > 1]
    if config.model.tied:
        embed, head = stages[0], next(stage for stage in stages if HEAD_EDGE in stage.edges.values())
        found.append(Shared("embed.weight", embed, ((head, "weight", HEAD_EDGE), (embed, "weight", None))))
    return found
