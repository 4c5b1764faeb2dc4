"""Convert between config.json and `ModelConfig`, by the table of a family."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from lockstep.core.config.file import shortened
from lockstep.core.config.rules import broken_rules
from lockstep.core.config.sections import ModelConfig
from lockstep.core.errors import UserError
from lockstep.core.hub.families import HUB, by_architecture
from lockstep.core.hub.family import AS_ABSENT, COMMON, REQUIRED, Fixed, HubFamily, Key, Setting
from lockstep.core.hub.rope import STRETCH, rope_keys, rope_settings
from lockstep.core.model.families import as_read

# Two ways to round 1/√n.
AN_ULP = 1e-15


def family_of(config: Mapping[str, Any], origin: str) -> HubFamily:
    """Return the family of a config.json. Raises UserError for an architecture that is not known here.

    origin: names the file in errors.
    """
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and len(named) == 1 else named
    family = by_architecture(name) if isinstance(name, str) else None
    known = ", ".join(one.architecture for one in HUB.values())
    if family is None:
        raise UserError(f"{origin}: architectures = {shortened(named)}: known architectures are {known}")
    if config.get("model_type") != family.model_type:
        raise UserError(
            f"{origin}: model_type = {shortened(config.get('model_type'))}: {family.architecture} is a "
            f"{family.model_type!r}"
        )
    return family


def model_of(config: Mapping[str, Any], origin: str) -> tuple[HubFamily, ModelConfig, list[str]]:
    """Return the model that a config.json describes: its family, its settings, and a list of ignored keys.

    Raises UserError that names the key: another architecture, activation or rotation, or an impossible value.
    """
    family = family_of(config, origin)
    for fixed in (*COMMON, *family.fixed):
        _require(config, fixed, family, origin)
    values: dict[str, Any] = {"family": family.name, **family.given}
    theirs: dict[str, str] = {}
    for setting in family.settings:
        is_null = setting.null is not AS_ABSENT and config.get(setting.theirs, ...) is None
        found = setting.null if is_null else _value(config, setting.theirs, setting.absent, origin)
        values[setting.ours] = _inverse_root(found, setting, origin) if setting.inverse_root else found
        theirs[setting.ours] = setting.theirs
    values |= rope_settings(config, family, origin)
    model = _checked(values, theirs | {"rope_theta": "rope_theta"} | STRETCH, origin)
    if (types := config.get("layer_types")) is not None and family.layers and types != _layer_types(model, family):
        raise UserError(f"{origin}: layer_types: {family.architecture} has {', '.join(family.layers)} in turns")
    for derived in family.derived:
        found, due = config.get(derived.theirs), getattr(model, derived.ours)
        if found is not None and not _same(found, due):
            raise UserError(f"{origin}: {derived.theirs} = {shortened(found)}: of these sizes it can only be {due}")
    return family, model, list(_left_out(config, family))


def config_of(model: ModelConfig, family: HubFamily, longest: int) -> dict[str, Any]:
    """Return the keys of config.json that describe a model. longest: tokens of its longest sequence.

    Raises UserError that names the setting that the architecture cannot express.
    """
    if family.layers and not model.window:
        raise UserError(
            f"model.window = 0: {family.architecture} has a window; one as long as all sequences changes nothing"
        )
    model, default = as_read(model), ModelConfig()
    for name in ModelConfig.model_fields:
        value = getattr(model, name)
        due = family.given.get(name, getattr(default, name))
        if (name not in family.known or name in family.given) and value != due:
            raise UserError(f"model.{name} = {shortened(value)}: {family.architecture} has it at {due!r} alone")
    keys: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for setting in family.settings:
        value = getattr(model, setting.written or setting.ours)
        if setting.inverse_root:
            value = _inverse_square(value, setting, family)
        value = None if setting.null is not AS_ABSENT and value == setting.null else value
        if keys.setdefault(setting.theirs, value) != value:
            others = " and ".join(f"model.{s.ours}" for s in family.settings if s.theirs == setting.theirs)
            raise UserError(f"{others} differ: {family.architecture} has one {setting.theirs} for them")
    keys |= {fixed.theirs: fixed.value for fixed in family.fixed if not fixed.each}
    keys |= {derived.theirs: getattr(model, derived.ours) for derived in family.derived}
    keys |= {key: 0.0 for key in family.dropout}
    keys |= {family.longest: longest} if family.longest else {}
    keys |= {"layer_types": _layer_types(model, family)} if family.layers else {}
    return keys | (rope_keys(model) if family.theta is not None else {})


def _layer_types(model: ModelConfig, family: HubFamily) -> list[str]:
    return [family.layers[layer % len(family.layers)] for layer in range(model.layers)]


def _inverse_root(found: Any, setting: Setting, origin: str) -> float:
    if type(found) not in (int, float) or found <= 0:
        raise UserError(f"{origin}: {setting.theirs} = {shortened(found)}: must be a positive number")
    return float(found**-0.5)


def _inverse_square(value: float, setting: Setting, family: HubFamily) -> int:
    found = round(value**-2)
    if found < 1 or not math.isclose(found**-0.5, value, rel_tol=AN_ULP):
        raise UserError(
            f"model.{setting.ours} = {value!r}: {family.architecture} has 1/√n of a whole number n alone "
            f"({setting.theirs})"
        )
    return found


def _require(config: Mapping[str, Any], fixed: Fixed, family: HubFamily, origin: str) -> None:
    found = _value(config, fixed.theirs, fixed.absent, origin)
    elements = found if fixed.each and isinstance(found, list) else [found]
    if not all(any(_same(one, value) for value in (fixed.value, *fixed.or_any)) for one in elements):
        raise UserError(
            f"{origin}: {fixed.theirs} = {shortened(found)}: {family.architecture} is known at {fixed.value!r} alone"
        )


def _value(config: Mapping[str, Any], key: str, absent: Any, origin: str) -> Any:
    found = config.get(key)
    if found is not None:
        return found
    if isinstance(absent, Key):
        found = config.get(absent.name)
        # A value of another type is reported when that key is read.
        return found * absent.times if type(found) is int else found
    if absent is REQUIRED:
        raise UserError(f"{origin}: {key} is missing")
    return absent


def _same(found: Any, due: Any) -> bool:
    """Return whether two values of JSON are equal: true is not 1."""
    return isinstance(found, bool) == isinstance(due, bool) and bool(found == due)


def _checked(values: Mapping[str, Any], theirs: Mapping[str, str], origin: str) -> ModelConfig:
    try:
        model = ModelConfig.model_validate(values, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        ours = str(first["loc"][0])
        said = f"{theirs.get(ours, ours)} = {shortened(first['input'])}: {first['msg'][:1].lower()}{first['msg'][1:]}"
        raise UserError(f"{origin}: {said}") from None
    for keys, message in broken_rules({f"model.{name}": value for name, value in model.model_dump().items()}):
        ours = keys[0].removeprefix("model.")
        raise UserError(f"{origin}: {theirs.get(ours, ours)}: {message}")
    return model


def _left_out(config: Mapping[str, Any], family: HubFamily) -> Iterator[str]:
    for key in family.dropout:
        if config.get(key):
            yield f"{key} = {shortened(config[key])} is left out: there is no dropout in training here"
