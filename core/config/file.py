"""Run files: TOML with `base`, and overrides from the command line. All errors are reported together."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from lockstep.core.config.rules import broken_rules
from lockstep.core.config.schema import RunConfig, flatten
from lockstep.core.errors import UserError
from lockstep.core.files.paths import path_problem

COMMAND_LINE = "command line"
# The description of the schema's only regular expression.
NAME = "must begin with a letter from A to Z or a digit; '.', '_' and '-' are also allowed after it"
# Bytes: ten times the size of a file with every setting and its description.
_LARGEST_FILE = 1 << 20
# Validators by the id of a setting's field. The field is kept too, because the id of a freed object may be reused.
_ADAPTERS: dict[int, tuple[FieldInfo, TypeAdapter[Any]]] = {}
# Maximum number of characters of a wrong value in a message.
_SHOWN = 60


def settings() -> dict[str, FieldInfo]:
    """Return every setting by its dotted key."""
    return _fields(RunConfig, "")


def _fields(model: type[BaseModel], prefix: str) -> dict[str, FieldInfo]:
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= _fields(kind, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = field
    return found


def load_config(path: Path | None, overrides: Mapping[str, str] | None = None) -> RunConfig:
    """Read a run file and its `base`, apply overrides, and check all values.

    path: the run file; None takes the defaults. overrides: dotted key → text. Raises one UserError that lists all
    errors, one per line, each with the file (or `command line`) and the key.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    errors: list[str] = []
    known = settings()
    places = [""]
    for file, tree in reversed(_chain(path) if path else []):
        places.append(str(file))
        for key, value in flatten(tree, whole=known).items():
            values[key], origin[key] = value, str(file)
    sections = _sections(known)
    values = {key: value for key, value in values.items() if value != {} or key not in sections}
    for key, text in (overrides or {}).items():
        origin[key] = COMMAND_LINE
        values.pop(key, None)
        if key in known:
            try:
                values[key] = adapter(known[key]).validate_strings(text)
            except ValidationError as error:
                errors.append(complaint(COMMAND_LINE, key, text, error))
        else:
            values[key] = text
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            errors.append(f"{origin[key]}: {unknown_key(key, value, known)}")
            continue
        try:
            checked[key] = adapter(known[key]).validate_python(value, strict=True)
        except ValidationError as error:
            errors.append(complaint(origin[key], key, value, error))
    places.append(COMMAND_LINE)
    # Rules use the defaults of missing settings. A rule with an invalid setting is skipped.
    wrong = (set(values) | set(overrides or {})) - set(checked)
    flat = {key: field.get_default(call_default_factory=True) for key, field in known.items()} | checked
    for keys, message in broken_rules({key: value for key, value in flat.items() if key not in wrong}):
        # Name the last source of the conflict: the command line, else the nearest file.
        set_here = [key for key in keys if key in origin] or [keys[0]]
        blamed = max(set_here, key=lambda key: places.index(origin.get(key, "")))
        errors.append(f"{origin.get(blamed, str(path or COMMAND_LINE))}: {blamed}: {message}")
    if errors:
        raise UserError(*errors)
    return RunConfig.model_validate(_nest(checked))


def dump_config(config: RunConfig) -> str:
    """Return the resolved configuration as TOML, from which `load_config` gives an equal object."""
    import tomli_w

    return tomli_w.dumps(config.model_dump())


def unknown_key(key: str, value: Any, known: Mapping[str, Any]) -> str:
    """Describe a key that is not a setting, with the most similar setting: by the whole key, or by its last part.

    value: the given value, or None.
    """
    if key in _sections(known):
        return f"{key} is a section, not a value" + ("" if value is None else f" ({shortened(value)})")
    if len(key) > _SHOWN or not key.strip():
        return f"{shortened(key)} is not a setting"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not near:
        last = key.rsplit(".", 1)[-1]
        tails: dict[str, str] = {}
        for k in known:
            tails.setdefault(k.rsplit(".", 1)[-1], k)
        near = [tails[t] for t in difflib.get_close_matches(last, tails, n=1, cutoff=0.7)]
    return f"{key} is not a setting" + (f"; did you mean {near[0]}?" if near else "")


def _sections(known: Mapping[str, Any]) -> set[str]:
    return {key.rsplit(".", 1)[0] for key in known if "." in key}


def adapter(field: FieldInfo) -> TypeAdapter[Any]:
    """Return the validator of one setting. Building it takes milliseconds, so it is cached."""
    from typing import Annotated

    made = _ADAPTERS.get(id(field))
    if made is None or made[0] is not field:
        kind: Any = Annotated[field.annotation, field]
        checks: TypeAdapter[Any] = TypeAdapter(kind, config={"allow_inf_nan": False})
        made = _ADAPTERS[id(field)] = field, checks
    return made[1]


def complaint(origin: str, key: str, value: Any, error: ValidationError) -> str:
    """Return a message of one line for an invalid value. origin: the file or `command line`."""
    said = (NAME if e["type"] == "string_pattern_mismatch" else _in_our_words(e["msg"]) for e in error.errors())
    return f"{origin}: {key} = {shortened(value)}: {'; '.join(said)}"


def _in_our_words(reason: str) -> str:
    """Rewrite pydantic's message in our style: `Input should be a valid number, unable to …` → `must be a number`."""
    reason = re.sub("^Value error, |, unable to (parse|interpret) .*", "", reason)
    reason = re.sub("^Input should be a valid boolean", "must be true or false", reason)
    reason = re.sub("^Input should (be an? valid |)", lambda found: "must be a " if found[1] else "must ", reason)
    return re.sub("^must be a (?=integer)", "must be an ", reason[:1].lower() + reason[1:])


def shortened(value: Any) -> str:
    """Return the repr of a value, without its middle part if it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python converts
        text = "a very large number"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 20]}…{text[-10:]}"


def _chain(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return (path, contents without `base`) of the file, its base, the base's base, …, in this order."""
    chain: list[tuple[Path, dict[str, Any]]] = []
    seen: set[Path] = set()
    current: Path | None = path
    named_by: Path | None = None
    while current is not None:
        where = f"{named_by}: base: " if named_by else ""
        tree = _parse(current, where)
        if (resolved := current.resolve()) in seen:
            raise UserError(f"{where}{current} is its own base")
        seen.add(resolved)
        base = tree.pop("base", None)
        if base is not None and (not isinstance(base, str) or not base or path_problem(base)):
            raise UserError(f"{current}: base = {shortened(base)}: must be the path of another run file")
        chain.append((current, tree))
        named_by, current = current, (current.parent / base if base is not None else None)
    return chain


def _parse(path: Path, where: str) -> dict[str, Any]:
    """Parse the file's TOML. where: prefix of error messages, which names the file with this `base`."""
    try:
        if not path.is_file():
            # Do not read pipes and devices, which may have no end.
            what = "it is not a regular file" if path.exists() else None
            raise UserError(f"{where}cannot read {path}: {what}" if what else f"{where}no such run file: {path}")
        with path.open("rb") as file:
            raw = file.read(_LARGEST_FILE + 1)
        if len(raw) > _LARGEST_FILE:
            raise UserError(f"{where}{path} is larger than {_LARGEST_FILE:,} bytes: too large for a run file")
        tree = tomllib.loads(raw.decode("utf-8-sig"))
        flatten(tree)
        return tree
    except OSError as error:
        raise UserError(f"{where}cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{where}cannot read {path}: not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not TOML: {error}") from None
    except UserError:
        raise
    except (ValueError, RecursionError):
        # tomllib does not catch errors of numbers with thousands of digits and of thousands of nested brackets.
        raise UserError(f"{path}: not readable TOML: a number is too long, or brackets are nested too deeply") from None


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return tree
