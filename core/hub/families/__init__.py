"""Families by `model.family`. A new one is a file here and an entry in HUB."""

from __future__ import annotations

from lockstep.core.hub.families import gemma2, gpt2, llama, mistral, qwen2, qwen3
from lockstep.core.hub.family import HubFamily

HUB: dict[str, HubFamily] = {
    family.name: family
    for family in (llama.FAMILY, gpt2.FAMILY, qwen2.FAMILY, qwen3.FAMILY, mistral.FAMILY, gemma2.FAMILY)
}


def by_architecture(name: str) -> HubFamily | None:
    """Return the family of an architecture as config.json names it; None if there is none."""
    return next((family for family in HUB.values() if family.architecture == name), None)
