"""Share one JAX reference per configuration among the tests of a process.

Tracing and compiling its programs is most of a check. A check loads the candidate's state into the reference first, so
sessions can be shared, as `Kept` of scripts/shared/planting.py shares them. Only `JaxBackend` itself is shared: a test
that plants a fault in a reference uses a class of its own, another process, or `check_reference`, which opens new
sessions. This is a pytest plugin, loaded by pyproject.toml.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
# The number of configurations that are kept: a session holds weights, moments and programs.
MOST = 8


def kept(make: Callable[[Any, Any], T], key: Callable[[Any], str]) -> Callable[[Any, Any], T]:
    """Wrap `make(backend, config)`: cache its results for the JAX reference, for the last MOST configurations."""
    found: dict[str, T] = {}

    def remembered(backend: Any, config: Any) -> T:
        jax_backend = sys.modules.get("lockstep.jax_backend.backend")
        if jax_backend is None or type(backend) is not jax_backend.JaxBackend:
            return make(backend, config)
        name = key(config)
        if name not in found:
            found[name] = make(backend, config)
            if len(found) > MOST:
                del found[next(iter(found))]
        return found[name]

    return remembered


@pytest.fixture(scope="session", autouse=True)
def _one_reference_a_configuration() -> Iterator[None]:
    from lockstep.core.parity.measures.compare import Reference
    from lockstep.core.parity.reference import self_check

    with pytest.MonkeyPatch.context() as patch:
        opened = kept(Reference._opened, lambda config: config.model_dump_json())
        patch.setattr(Reference, "_opened", staticmethod(opened))
        sound = kept(self_check.require_sound, lambda config: self_check.small(config).model_dump_json())
        patch.setattr(self_check, "require_sound", sound)
        yield
