"""What a resumed run may change, and how the rest is held to what it was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from core.config import RunConfig, flatten
from core.errors import UserError

# Neither the samples, nor their order, nor what a step computes from them depends on these; rounding may.
ELASTIC = frozenset(
    {
        "device",
        "data.path",
        "data.prefetch",
        "data.memory_limit_gib",
        "train.ranks",
        "train.micro_batch_size",
        "parallel.bucket_mb",
        "parallel.strategy",
        "parallel.reshard_after_forward",
        "parallel.reduce_every_micro_batch",
    }
)
SECTIONS = ("checkpoint.", "eval.", "log.", "parity.")


def is_elastic(key: str) -> bool:
    """Whether a resume may change this setting."""
    return key in ELASTIC or key.startswith(SECTIONS)


def differing(one: RunConfig, other: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Settings that are not the same in two configurations, with both values."""
    first, second = (flatten(config.model_dump(mode="json")) for config in (one, other))
    return {key: (first[key], second[key]) for key in first if first[key] != second[key]}


def changes(run: str, own: RunConfig, asked: RunConfig) -> dict[str, str]:
    """The settings, as text, by which a run is to go on otherwise than it was made.

    Raises UserError that lists those which a run keeps, with both values.
    """
    found = {key: values for key, values in differing(own, asked).items() if key != "name"}
    kept = {key: values for key, values in found.items() if not is_elastic(key)}
    if kept:
        said = [f"{key} is {was!r} in the run, and {now!r} was asked for" for key, (was, now) in kept.items()]
        raise UserError(*(f"{run}: {line}" for line in said), f"{run} keeps these settings; begin a new run for others")
    changed = {key: _text(now) for key, (_, now) in found.items()}
    # Validation reads as many sequences as before, a micro-batch at a time.
    if "train.micro_batch_size" in changed and "eval.batches" not in changed:
        sequences = own.eval.batches * own.train.micro_batch_size
        changed["eval.batches"] = str(math.ceil(sequences / asked.train.micro_batch_size))
    return changed


def other_data(made_with: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between the data that a run was made with and what is there now, each in a few words."""
    keys = [key for key in now if key in made_with and key != "path" and made_with[key] != now[key]]
    return [f"{key.replace('_', ' ')} {_short(made_with[key])}, now {_short(now[key])}" for key in keys]


def _short(value: Any) -> str:
    return value[:16] if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
