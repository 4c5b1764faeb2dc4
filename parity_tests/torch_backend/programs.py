"""Configurations that differ only in compilation, and bitwise comparison of their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lockstep.core.backend import Gradients
from lockstep.core.config.schema import CompileConfig, RunConfig

EAGER = CompileConfig(enabled=False)
TRACED = CompileConfig(enabled=True, backend="aot_eager")
GENERATED = CompileConfig(enabled=True, backend="inductor")
PROGRAMS = {"eager": EAGER, "aot_eager": TRACED, "inductor": GENERATED}


def under(config: RunConfig, program: CompileConfig) -> RunConfig:
    """Return the configuration with other compile settings."""
    return config.model_copy(update={"compile": program})


def same_gradients(a: Gradients, b: Gradients) -> bool:
    """Return whether loss, per-token NLL and all gradients are equal bit for bit."""
    return (
        a.loss == b.loss
        and a.nll.tobytes() == b.nll.tobytes()
        and set(a.grads) == set(b.grads)
        and all(a.grads[name].tobytes() == b.grads[name].tobytes() for name in a.grads)
    )


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Clear dynamo's compiled programs before and after a `with` block, and let Inductor generate code for two threads.

    Code for one thread has no atomic operations, so a test could not find a fault in them. With the same setting on all
    machines, tests share Inductor's cache on disk.
    """
    torch._dynamo.reset()
    with torch._inductor.config.patch("cpp.threads", 2):
        yield
    torch._dynamo.reset()
