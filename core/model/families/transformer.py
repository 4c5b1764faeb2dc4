"""The operations of a decoder-only transformer, derived from the traits of its family."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lockstep.core.config.sections import AttentionConfig, LossConfig, ModelConfig
from lockstep.core.model.families.traits import Traits
from lockstep.core.model.graph import Constant, Normal, Operation, Parameter, Shape

# Initial standard deviation of the embedding, and of GPT-2's matrices (Radford et al. 2019).
NARROW = 0.02
# The stage id of attention in a block with a window.
WINDOWED = "window_attn"
# The tap of logits before their cap.
UNCAPPED = "uncapped_logits"


@dataclass(frozen=True)
class Transformer:
    """A family of models, defined by its traits. A call with a run's sections lists the operations."""

    traits: Traits

    def __call__(self, model: ModelConfig, attention: AttentionConfig, loss: LossConfig) -> list[Operation]:
        """Return every operation, in the order of the chain; taps of blocks have names that begin with `blocks.`."""
        found = self._embedded(model, attention)
        stream = found[-1].tap
        for layer in range(model.layers):
            found += _Block(self.traits, model, attention, layer).operations(stream)
            stream = f"blocks.{layer}.mlp_residual"
        found.append(norm(self.traits, model, "final", None, "final_norm", stream))
        return [*found, *_head(model, loss)]

    def _embedded(self, model: ModelConfig, attention: AttentionConfig) -> list[Operation]:
        """List the operations before the first block: the look-up of tokens, its scale, and learned positions."""
        parameters, width = {"weight": _table(model)}, (model.hidden,)
        found = [Operation("embed", "embedding", "embed", None, "embedding", {}, parameters, width, batch=("tokens",))]
        if self.traits.scaled_embedding:
            x = {"x": found[-1].tap}
            found.append(Operation("embed_scale", "scale", "embed_scale", None, "embedding", x, {}, width))
        if not self.traits.rotary:
            rows = Parameter("position.weight", (model.positions, model.hidden), "embedding", Normal(NARROW))
            x, places = {"x": found[-1].tap}, ("documents",) if attention.reset_positions else ()
            found.append(
                Operation("position", "position", "position", None, "embedding", x, {"weight": rows}, width, places)
            )
        return found


def norm(traits: Traits, model: ModelConfig, place: str, layer: int | None, tap: str, x: str) -> Operation:
    """Return a norm of the residual stream, or one after attention or MLP. place: the first word of its id."""
    shape, kind = (model.hidden,), traits.norm
    parameters = {"weight": Parameter(f"{tap}.weight", shape, "gains", Constant(float(kind != "centered_norm")))}
    if kind == "layer_norm":
        parameters["bias"] = Parameter(f"{tap}.bias", shape, "biases", Constant(0.0))
    return Operation(f"{place}_{kind}", kind, tap, layer, "norms", {"x": x}, parameters, shape)


def _table(model: ModelConfig) -> Parameter:
    return Parameter("embed.weight", (model.vocab_size, model.hidden), "embedding", Normal(NARROW))


@dataclass(frozen=True)
class _Block:
    """The operations of one block."""

    traits: Traits
    model: ModelConfig
    attention: AttentionConfig
    layer: int

    @property
    def at(self) -> str:
        return f"blocks.{self.layer}"

    def operations(self, stream: str) -> list[Operation]:
        """Return the operations of the block, up to `mlp_residual`. stream: the residual stream's tap before it."""
        between = f"{self.at}.attn_residual"
        found = [norm(self.traits, self.model, "attn", self.layer, f"{self.at}.attn_norm", stream)]
        found += self._attention()
        found += self._added("attn", stream, found[-1].tap)
        found.append(norm(self.traits, self.model, "mlp", self.layer, f"{self.at}.mlp_norm", between))
        found += self._mlp()
        return [*found, *self._added("mlp", between, found[-1].tap)]

    def _project(self, id: str, part: str, tap: str, x: str, into: int, out: int, bias: bool) -> Operation:
        module = f"{self.at}.{tap.partition('.')[0]}.{id.removesuffix('_proj')}_proj"
        parameters = {"weight": Parameter(f"{module}.weight", (out, into), "matrices", Normal(self._std(id, into)))}
        if bias:
            parameters["bias"] = Parameter(f"{module}.bias", (out,), "biases", Constant(0.0))
        reads, flops = {"x": f"{self.at}.{x}"}, (2.0 * into * out, 0.0)
        return Operation(id, "linear", f"{self.at}.{tap}", self.layer, part, reads, parameters, (out,), flops=flops)

    def _std(self, id: str, into: int) -> float:
        # Projections into the residual stream start smaller, by the root of their number (Radford et al. 2019, 2.3).
        writes_stream = id in ("o_proj", "down_proj")
        of_all = NARROW if self.traits.narrow_start else (self.model.hidden if writes_stream else into) ** -0.5
        return of_all / math.sqrt(2 * self.model.layers) if writes_stream else of_all

    def _plain(
        self, id: str, kind: str, part: str, tap: str, width: Shape, reads: dict[str, str], batch: tuple[str, ...] = ()
    ) -> Operation:
        taps = {role: f"{self.at}.{read}" for role, read in reads.items()}
        return Operation(id, kind, f"{self.at}.{tap}", self.layer, part, taps, {}, width, batch)

    def _attention(self) -> list[Operation]:
        traits, model = self.traits, self.model
        hidden, wide, kv = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
        biased = traits.biased(model, "qkv_bias")
        found = [
            self._project("q", "attention", "attn.q", "attn_norm", hidden, wide, biased),
            self._project("k", "attention", "attn.k", "attn_norm", hidden, kv, biased),
            self._project("v", "attention", "attn.v", "attn_norm", hidden, kv, biased),
        ]
        reads = {"q": "attn.q", "k": "attn.k", "v": "attn.v"}
        if traits.head_norms:
            found += [self._head_norm(role, reads) for role in ("q", "k")]
        if traits.rotary:
            found += [self._rope(role, reads) for role in ("q", "k")]
        seen = ("documents",) if self.attention.document_mask else ()
        id = WINDOWED if has_window(traits, model, self.layer) else "attn"
        attend = self._plain(id, "attention", "attention", "attn.out", (wide,), reads, seen)
        # Scores and values: each has 2 · wide FLOPs per key, and a token sees S/2 keys on average.
        found.append(replace(attend, flops=(0.0, 2.0 * wide)))
        biased = traits.biased(model, "o_bias")
        found.append(self._project("o_proj", "attention", "attn.o_proj", "attn.out", wide, hidden, biased))
        return found

    def _heads(self, role: str) -> Shape:
        return (self.model.heads if role == "q" else self.model.kv_heads, self.model.head_dim)

    def _head_norm(self, role: str, reads: dict[str, str]) -> Operation:
        """Return the norm of queries or keys, and make later operations read its output."""
        tap, x = f"attn.{role}_norm", {"x": reads[role]}
        reads[role] = tap
        gain = Parameter(f"{self.at}.{tap}.weight", (self.model.head_dim,), "gains", Constant(1.0))
        found = self._plain(f"{role}_norm", "head_norm", "attention", tap, self._heads(role), x)
        return replace(found, parameters={"weight": gain})

    def _rope(self, role: str, reads: dict[str, str]) -> Operation:
        """Return the rotation of queries or keys, and make later operations read its output."""
        tap, x = f"attn.{role}_rope", {"x": reads[role]}
        reads[role] = tap
        places = ("documents",) if self.attention.reset_positions else ()
        return self._plain(f"{role}_rope", "rope", "attention", tap, self._heads(role), x, places)

    def _mlp(self) -> list[Operation]:
        traits, hidden, ffn = self.traits, self.model.hidden, self.model.ffn_hidden
        biased = traits.biased(self.model, "mlp_bias")
        found, reads = [], {"up": "mlp.up"} if traits.activation == "gelu" else {"gate": "mlp.gate", "up": "mlp.up"}
        for role in reads:
            found.append(self._project(role, "mlp", f"mlp.{role}", "mlp_norm", hidden, ffn, biased))
        id = "act" if traits.activation == "gated" else f"{traits.activation}_act"
        found.append(self._plain(id, traits.activation, "mlp", "mlp.act", (ffn,), reads))
        found.append(self._project("down_proj", "mlp", "mlp.down_proj", "mlp.act", ffn, hidden, biased))
        return found

    def _added(self, part: str, stream: str, made: str) -> list[Operation]:
        """Return the sum into the residual stream, after a post-norm if the family has one."""
        found = []
        if self.traits.post_norms:
            tap = f"{self.at}.{part}_post_norm"
            found.append(norm(self.traits, self.model, f"{part}_post", self.layer, tap, made))
            made = tap
        id, width = f"{part}_residual", (self.model.hidden,)
        added = Operation(id, "sum", f"{self.at}.{id}", self.layer, "block", {"x": stream, "y": made}, {}, width)
        return [*found, added]


def has_window(traits: Traits, model: ModelConfig, layer: int) -> bool:
    """Return whether a block's queries see at most `model.window` keys."""
    return model.window > 0 and layer % traits.window_every == 0


def _head(model: ModelConfig, loss: LossConfig) -> list[Operation]:
    shape = (model.vocab_size, model.hidden)
    own = Parameter("lm_head.weight", shape, "head", Normal(model.hidden**-0.5))
    weight = {"weight": _table(model) if model.tied else own}
    flops, x = (2.0 * model.vocab_size * model.hidden, 0.0), {"x": "final_norm"}
    if loss.of_library:
        id = loss.chosen.stage
        return [Operation(id, "library_head", "nll", None, "head", x, weight, (), ("targets",), flops)]
    width = (model.vocab_size,)
    tap = UNCAPPED if model.logits_cap else "logits"
    found = [Operation("logits", "logits", tap, None, "head", x, weight, width, flops=flops)]
    if model.logits_cap:
        found.append(Operation("logits_cap", "cap", "logits", None, "head", {"logits": UNCAPPED}, {}, width))
    return [*found, Operation("nll", "nll", "nll", None, "head", {"logits": "logits"}, {}, (), ("targets",))]
