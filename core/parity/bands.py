"""The bounds that tensor comparisons are held to: measured extremes of clean runs, by recipe and kind of comparison.

`bands.json` is made by `python -m scripts.calibrate`: for each recipe (precision policy, eager or compiled) and kind
(a forward stage judged locally, NLL end to end, gradients by kind of parameter, moments, update) it holds the
extremes over clean draws. Bounds are those extremes widened by a stated margin on the logarithm; the same script
checks them on separate draws (docs/calibration.md).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from core.config import RunConfig
from core.errors import UserError
from core.names import group_of
from core.parity.excess import Distances
from core.parity.verdict import Measure

# Bounds are the calibration's extremes times this (on log-excess, distance and gain).
MARGIN = 2.0
# No band is narrower than this: other machines' libraries round a few elements otherwise than the one that was
# measured.
LEAST_EXCESS, LEAST_DISTANCE, LEAST_GAIN = 1.1, 0.3, 0.1
# FP64 has no truth above it; two orders of summation of some thousand terms differ by about 1e-15 a step of the chain.
FP64_LIMIT = 1e-12
# FP32 gradients of two libraries are a few ulp off, and the ratio of such errors scatters: this limit, 80 ulp, stands
# beside it.
FP32_LIMIT = 1e-5


@dataclass(frozen=True)
class Extremes:
    """What clean runs showed: max |log excess|, max twin distance, max |gain difference| / twin's error."""

    log_excess: float
    distance: float
    gain: float
    draws: int


def recipe(config: RunConfig) -> str:
    """The recipe whose clean runs set the bounds; compiled programs round elsewhere than eager ones and stand apart."""
    return f"{config.precision.policy}/{'compiled' if config.compile.enabled else 'eager'}"


def gradient_kind(parameter: str) -> str:
    """Gradients of one kind share bounds: by parameter group, queries and keys apart, whose gradients cancel most."""
    if ".q_proj." in parameter or ".k_proj." in parameter:
        return "gradients/qk"
    group = group_of(parameter)
    return f"gradients/{'vocabulary' if group in ('embedding', 'head') else group}"


@cache
def table() -> dict[str, dict[str, Extremes]]:
    """Recipe → kind → extremes, from bands.json."""
    raw: dict[str, Any] = json.loads(resources.files("core.parity").joinpath("bands.json").read_text())
    return {recipe: {kind: Extremes(**row) for kind, row in kinds.items()} for recipe, kinds in raw["recipes"].items()}


def measures(recipe: str, kind: str, d: Distances) -> tuple[Measure, ...]:
    """The measures of one comparison with their bounds. Raises UserError for a recipe that was never calibrated."""
    if recipe.startswith("fp64/"):
        basis = f"FP64 has no truth above it: relative error at most {FP64_LIMIT:.0e}"
        return (Measure("relative_error", d.relative_error, None, FP64_LIMIT, basis),)
    try:
        clean = table()[recipe][kind]
    except KeyError:
        raise UserError(f"no clean runs of {recipe} ({kind}) were measured; run python -m scripts.calibrate") from None
    high = max(math.exp(MARGIN * clean.log_excess), LEAST_EXCESS)
    distance = max(MARGIN * clean.distance, LEAST_DISTANCE)
    gain = max(MARGIN * clean.gain, LEAST_GAIN) * d.twin_relative_error
    basis = (
        f"{clean.draws} clean {recipe} comparisons of {kind} reached excess ×/÷ {math.exp(clean.log_excess):.3g}, "
        f"distance {clean.distance:.2g}, gain {clean.gain:.2g} of the twin's error {d.twin_relative_error:.1e}; "
        f"margin {MARGIN} on the logarithm"
    )
    found = [
        Measure("excess", d.excess, 1 / high, high, basis),
        Measure("gain_difference", d.gain_difference, -gain, gain, basis),
        Measure("twin_distance", d.twin_distance, None, distance, basis),
    ]
    if recipe.startswith("fp32/") and kind.startswith("gradients/"):
        limit = max(FP32_LIMIT, high * d.twin_relative_error)
        basis = f"FP32 gradients: {FP32_LIMIT:.0e}, or the bound on excess where the twin's own error makes that more"
        found.append(Measure("relative_error", d.relative_error, None, limit, basis))
    return tuple(found)
