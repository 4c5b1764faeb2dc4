"""Properties of a framework's fused optimizer kernels that no hyperparameter shows. No framework is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# A probe returns whether the fused Adam on the device of a parameter takes hyperparameters in FP32.
Probe = Callable[[Any], bool]

_probes: list[Probe] = []


def offer(probe: Probe) -> None:
    """Register a probe, which is called with parameters of every framework, not only of its own."""
    if probe not in _probes:
        _probes.append(probe)


def adam_in_fp32(parameter: Any) -> bool:
    """Return whether a framework's fused Adam takes hyperparameters in FP32 on the device of this parameter."""
    return any(probe(parameter) for probe in _probes)
