"""Named ranges for the parts of a step in a profiler, opened around compiled programs and never inside them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch

from lockstep.core.config.schema import RunConfig
from lockstep.core.profile.trace import PART

Trace = Callable[[str], AbstractContextManager[Any]]
Method = TypeVar("Method", bound=Callable[..., Any])


def no_range(name: str) -> AbstractContextManager[Any]:
    """Return an empty context."""
    return nullcontext()


def nvtx(name: str) -> AbstractContextManager[Any]:
    """Open an NVTX range, for Nsight Systems."""
    return torch.cuda.nvtx.range(PART + name)


def recorded(name: str) -> AbstractContextManager[Any]:
    """Open a range in PyTorch's profiler."""
    return torch.profiler.record_function(PART + name)


def trace_of(config: RunConfig, device: torch.device) -> Trace:
    """Return the function that opens ranges for a session: NVTX if configured and on CUDA, else none."""
    return nvtx if config.log.nvtx and device.type == "cuda" else no_range


def in_force(config: RunConfig, device: torch.device) -> dict[str, str]:
    """Describe the ranges for the table at start; {} if they are not configured."""
    if not config.log.nvtx:
        return {}
    said = "step, micro-batch, forward, backward, reduction, clip, optimizer, checkpoint"
    return {"NVTX ranges": said if device.type == "cuda" else "none: they are CUDA's, and this run is on the CPU"}


def part(name: str) -> Callable[[Method], Method]:
    """Return a decorator that opens a range `name` around a method of a session."""

    def named(method: Method) -> Method:
        @wraps(method)
        def inside(session: Any, *arguments: Any, **options: Any) -> Any:
            with session.trace(name):
                return method(session, *arguments, **options)

        return inside  # type: ignore[return-value]

    return named
