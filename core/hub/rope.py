"""Rotary positions in config.json: `rope_parameters` (transformers 5), `rope_theta` and `rope_scaling` (before)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.core.config.file import shortened
from lockstep.core.config.sections import ModelConfig
from lockstep.core.errors import UserError
from lockstep.core.hub.family import HubFamily

# Rotations that our models compute, by `rope_type`.
TYPES = ("default", "llama3")
# Field of `ModelConfig` → its key where the rotation is `llama3`.
STRETCH = {
    "rope_factor": "factor",
    "rope_low": "low_freq_factor",
    "rope_high": "high_freq_factor",
    "rope_original": "original_max_position_embeddings",
}


def rope_settings(config: Mapping[str, Any], family: HubFamily, origin: str) -> dict[str, Any]:
    """Return the fields of `ModelConfig` for a config.json's rotary positions. Raises UserError for another rotation.

    origin: names the file in errors.
    """
    if family.theta is None:
        return {}
    scaling, parameters = (config.get(key) for key in ("rope_scaling", "rope_parameters"))
    plain = {k: v for k, v in parameters.items() if k != "rope_theta"} if isinstance(parameters, dict) else parameters
    if scaling and parameters and scaling not in (parameters, plain):
        raise UserError(f"{origin}: rope_scaling and rope_parameters differ; remove one of them")
    found = parameters or scaling or {}
    if not isinstance(found, dict):
        raise UserError(f"{origin}: rope_parameters = {shortened(found)}: must be an object")
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in TYPES:
        raise UserError(f"{origin}: rope_type = {shortened(kind)}: not a supported rotation ({', '.join(TYPES)})")
    share = found.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise UserError(f"{origin}: partial_rotary_factor = {shortened(share)}: only whole heads can be rotated")
    stretch = STRETCH if kind == "llama3" else {}
    if others := sorted(found.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor", *stretch.values()}):
        raise UserError(f"{origin}: rope_parameters.{others[0]} is nothing that the rotation {kind!r} has")
    if missing := [key for key in stretch.values() if found.get(key) is None]:
        raise UserError(f"{origin}: rope_parameters.{missing[0]} is missing")
    theta = found.get("rope_theta", config.get("rope_theta"))
    return {"rope_theta": family.theta if theta is None else theta, **{o: found[t] for o, t in stretch.items()}}


def rope_keys(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json for the model's RoPE, for transformers before version 5 and since."""
    theta: dict[str, Any] = {"rope_theta": model.rope_theta}
    if model.rope_factor == 1:
        return {**theta, "rope_parameters": {"rope_type": "default", **theta}}
    stretched = {"rope_type": "llama3", **{theirs: getattr(model, ours) for ours, theirs in STRETCH.items()}}
    return {**theta, "rope_scaling": stretched, "rope_parameters": {**stretched, **theta}}
