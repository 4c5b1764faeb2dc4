"""Model families by name (`model.family`). A new family needs a file here and an entry in FAMILIES."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from lockstep.core.config.sections import AttentionConfig, LossConfig, ModelConfig
from lockstep.core.model.families import gemma2, gpt2, llama, mistral, qwen2, qwen3
from lockstep.core.model.families.traits import Traits
from lockstep.core.model.families.transformer import Transformer
from lockstep.core.model.graph import Graph, Operation

Family = Callable[[ModelConfig, AttentionConfig, LossConfig], list[Operation]]

FAMILIES: dict[str, Family] = {
    "llama": Transformer(llama.TRAITS),
    "gpt2": Transformer(gpt2.TRAITS),
    "qwen2": Transformer(qwen2.TRAITS),
    "qwen3": Transformer(qwen3.TRAITS),
    "mistral": Transformer(mistral.TRAITS),
    "gemma2": Transformer(gemma2.TRAITS),
}


@lru_cache(maxsize=32)
def graph_of(model: ModelConfig, attention: AttentionConfig | None = None, loss: LossConfig | None = None) -> Graph:
    """Build the graph of a model.

    attention: the run's section, which decides whether operations read documents from the batch; None: they do not.
    loss: the run's section; a library's head is one operation from the final norm's output to the NLL; None: Lockstep's
    own head. Raises KeyError for an unknown family.
    """
    return Graph.of(FAMILIES[model.family](model, attention or AttentionConfig(), loss or LossConfig()))


def traits_of(model: ModelConfig) -> Traits:
    """Return the traits of a model's family; Llama's for a family that lists its operations without traits.

    Raises KeyError for an unknown family.
    """
    family = FAMILIES[model.family]
    return family.traits if isinstance(family, Transformer) else llama.TRAITS


def as_read(model: ModelConfig) -> ModelConfig:
    """Set every field without effect to its default, so that models that compute the same function are equal.

    Fields without effect: those that the family does not read, RoPE's settings without a factor, and a head width or an
    attention scale that equals the default formula.
    """
    default = ModelConfig()
    unread = set(traits_of(model).unread)
    if model.rope_factor == default.rope_factor:
        unread |= {"rope_low", "rope_high", "rope_original"}
    if model.head_width * model.heads == model.hidden:
        unread.add("head_width")
    # Implementations round 1/√E differently.
    if math.isclose(model.attention_scale, model.head_dim**-0.5, rel_tol=1e-15):
        unread.add("attention_scale")
    return model.model_copy(update={name: getattr(default, name) for name in unread})
