"""Rotary positions in config.json: `rope_parameters` (transformers 5), `rope_theta` and `rope_scaling` (before)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.core.config.file import shortened
from lockstep.core.errors import UserError
from lockstep.core.hub.family import HubFamily

# Rotations that our models compute, by `rope_type`.
TYPES = ("default",)


def rope_settings(config: Mapping[str, Any], family: HubFamily, origin: str) -> dict[str, Any]:
    """The fields of `ModelConfig` that a config.json gives to rotary positions. Raises UserError for another rotation.

    origin: names the file in errors.
    """
    if family.theta is None:
        return {}
    scaling, parameters = (config.get(key) for key in ("rope_scaling", "rope_parameters"))
    if scaling and parameters and scaling != parameters:
        raise UserError(f"{origin}: rope_scaling and rope_parameters differ: which of them holds?")
    found = scaling or parameters or {}
    if not isinstance(found, dict):
        raise UserError(f"{origin}: rope_parameters = {shortened(found)}: must be an object")
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in TYPES:
        raise UserError(
            f"{origin}: rope_type = {shortened(kind)}: no rotation that is computed here ({', '.join(TYPES)})"
        )
    share = found.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise UserError(f"{origin}: partial_rotary_factor = {shortened(share)}: heads are rotated whole here")
    if others := sorted(found.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}):
        raise UserError(f"{origin}: rope_parameters.{others[0]} is nothing that the rotation {kind!r} has")
    theta = found.get("rope_theta", config.get("rope_theta"))
    return {"rope_theta": family.theta if theta is None else theta}


def rope_keys(theta: float) -> dict[str, Any]:
    """The keys of config.json that say so, for transformers before version 5 and since."""
    return {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
