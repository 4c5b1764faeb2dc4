"""Lockstep: a language model pretrains in PyTorch while an independent JAX implementation checks the step.

This package is the one import name. In a checkout it holds links to the folders of the repository; installed, the
folders themselves. `watch` is its public function; the command line is `lockstep`, or `python -m lockstep`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.core.parity import watch as watch

__all__ = ["watch"]


def __getattr__(name: str) -> Any:
    """Import `watch` when it is asked for: whoever imports one part of Lockstep need not wait for the others."""
    if name == "watch":
        from lockstep.core.parity import watch

        return watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
