"""Facts of a framework's fused optimizer kernels that no hyperparameter shows; no framework is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# A probe: it takes a parameter, and returns whether its device's fused Adam takes hyperparameters in FP32.
Probe = Callable[[Any], bool]

_probes: list[Probe] = []


def offer(probe: Probe) -> None:
    """Register a probe; it is called with parameters of its own framework and of others."""
    if probe not in _probes:
        _probes.append(probe)


def adam_in_fp32(parameter: Any) -> bool:
    """Return whether some framework's fused Adam takes its hyperparameters in FP32 on this parameter's device."""
    return any(probe(parameter) for probe in _probes)
