"""The transformers model of a run's family as a candidate: `lockstep parity CONFIG --candidate hf`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.nn.functional as F
from torch import nn

from lockstep.core.config.schema import RunConfig
from lockstep.core.config.sections import ModelConfig
from lockstep.core.errors import UserError
from lockstep.core.hub.families import HUB
from lockstep.core.hub.family import HubFamily
from lockstep.core.hub.tensors import stored_tensors
from lockstep.core.model.families import traits_of
from lockstep.torch_backend.candidate.layout import Layout, layout_of_stored
from lockstep.torch_backend.candidate.module import ModuleCandidate
from lockstep.torch_backend.candidate.taps import Where
from lockstep.torch_backend.tools.hugging_face import architecture_of, default_dtype, their_arguments, widened


class HuggingFaceCandidate(ModuleCandidate):
    """The transformers model of the run's family, with all taps. core/hub/families has its names and shapes.

    attention: transformers' `attn_implementation`. None is `sdpa`, or `eager` for capped scores: sdpa has no cap.
    """

    name = "hf"
    taps_keep_bits = True
    attention: str | None = None

    def build(self, config: RunConfig) -> nn.Module:
        """Build the model of the run's settings. Raises UserError if its architecture cannot express them."""
        kind = architecture_of(_family(config))
        arguments = their_arguments(config.model, config.train.longest)
        attention = self.attention or ("eager" if config.model.attention_cap else "sdpa")
        with default_dtype(config.precision.exact):
            # The model has no special tokens here, and transformers' defaults may lie outside the vocabulary.
            none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
            made = kind.config_class(**arguments, **none, attn_implementation=attention, use_cache=False)
            model: nn.Module = kind(made)
        return model

    def precision(self, config: RunConfig) -> AbstractContextManager[Any]:
        """Return the context of the base class; in FP64, one that widens transformers' own casts to FP32.

        Raises UserError for autocast of a model whose casts `precision.casts` cannot declare: no check of it could
        agree.
        """
        if config.precision.exact:
            return widened(architecture_of(_family(config)))
        if config.precision.chosen.rounds and (config.model.window or not traits_of(config.model).as_llama):
            raise UserError(
                f"precision.policy = {config.precision.policy!r}: transformers' {config.model.family} rounds under "
                "torch.autocast where no precision.casts can declare it yet (docs/guide/casts.md); take fp32"
            )
        return super().precision(config)

    def layout(self, config: RunConfig) -> Layout:
        """Return the place of each parameter, from the table of the family."""
        family = _family(config)
        return layout_of_stored(stored_tensors(family, config.model), family.head, config.model)

    def taps_of(self, config: RunConfig) -> Mapping[str, Where]:
        """Return `taps`, and a scaled embedding's place, if one module of transformers does look-up and scaling."""
        return {**taps_there(config.model, _family(config)), **self.taps}

    def calls_of(self, config: RunConfig) -> Mapping[Callable[..., Any], Sequence[str]]:
        """Return `calls`, RoPE, and the look-up inside a scaled embedding."""
        return {**calls_there(config.model, architecture_of(_family(config))), **self.calls}

    def describe(self, config: RunConfig) -> Mapping[str, Any]:
        """Extend the base class's description with transformers' version."""
        architecture_of(_family(config))
        import transformers

        found = super().describe(config)
        return {**found, "versions": {**found["versions"], "transformers": transformers.__version__}}


def _family(config: RunConfig) -> HubFamily:
    if (family := HUB.get(config.model.family)) is None:
        raise UserError(f"model.family = {config.model.family!r}: transformers computes {', '.join(HUB)}")
    return family


def taps_there(model: ModelConfig, family: HubFamily) -> dict[str, Where]:
    """Return the places in transformers' model of taps that no canonical module writes.

    A scaled embedding is one module of transformers, and two taps of the canonical model.
    """
    return {"embed_scale": f"{family.prefix}embed_tokens"} if traits_of(model).scaled_embedding else {}


def calls_there(model: ModelConfig, kind: type) -> dict[Callable[..., Any], Sequence[str]]:
    """Return the functions whose results are taps: RoPE, and the look-up of a scaled embedding.

    kind: the class of the transformers model.
    """
    traits = traits_of(model)
    module: Any = sys.modules[kind.__module__]
    rope = {module.apply_rotary_pos_emb: ("attn.q_rope", "attn.k_rope")} if traits.rotary else {}
    return {**rope, **({F.embedding: ("embed",)} if traits.scaled_embedding else {})}
