"""Configurations that differ only in how the program is compiled, and bitwise comparison of what it gives."""

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
    """Return the same run by another program."""
    return config.model_copy(update={"compile": program})


def same_gradients(a: Gradients, b: Gradients) -> bool:
    """Return whether loss, per-token NLL and every gradient are equal in every bit."""
    return (
        a.loss == b.loss
        and a.nll.tobytes() == b.nll.tobytes()
        and set(a.grads) == set(b.grads)
        and all(a.grads[name].tobytes() == b.grads[name].tobytes() for name in a.grads)
    )


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled yet in this process, and code for two threads whatever the machine.

    Code for one thread needs no atomic operation, and has none to find. The same setting everywhere lets tests share
    what Inductor keeps on disk.
    """
    torch._dynamo.reset()
    with torch._inductor.config.patch("cpp.threads", 2):
        yield
    torch._dynamo.reset()
