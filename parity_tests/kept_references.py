"""Share the JAX reference's sessions among the tests of a process.

Tracing and compiling their programs is most of a check. A check loads the candidate's state into the reference first,
so sessions can be shared, as `Kept` of scripts/shared/planting.py shares them. Here two runs share a session even if
their names, folders and logs differ. Only `JaxBackend` itself is shared: a test that plants a fault in a reference uses
a class of its own, another process, or `check_reference`, which opens new sessions. This is a pytest plugin, loaded by
pyproject.toml.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from lockstep.core.config.schema import RunConfig

T = TypeVar("T")
# The number of sessions that are kept: each holds weights, moments and programs.
MOST = 16
# The sections of a configuration from which a session computes nothing.
NOT_READ = ("name", "data", "eval", "checkpoint", "log")


class NotRead:
    """Raise where a shared session reads this section, which may be another run's. `read`: what it may read."""

    def __init__(self, section: str, **read: Any) -> None:
        self._section = section
        self.__dict__.update(read)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a session of the reference reads {self._section}.{name}: parity_tests/kept_references.py"
        )


def what_is_read(config: RunConfig) -> str:
    """Return the part of a configuration that decides what a session of the reference computes, as JSON."""
    others = config.model_dump_json(exclude={*NOT_READ, "parity"})
    return f"{config.parity.reference_device} {config.parity.reference_devices} {others}"


def is_jax(backend: Any) -> bool:
    """Return whether this is the JAX reference itself, and not a class made of it."""
    jax_backend = sys.modules.get("lockstep.jax_backend.backend")
    return jax_backend is not None and type(backend) is jax_backend.JaxBackend


def kept(make: Callable[[Any, Any], T], key: Callable[[Any], str]) -> Callable[[Any, Any], T]:
    """Wrap `make(backend, config)`: cache its results for the JAX reference, those of the MOST last used."""
    found: dict[str, T] = {}

    def remembered(backend: Any, config: Any) -> T:
        if not is_jax(backend):
            return make(backend, config)
        name = key(config)
        found[name] = found.pop(name) if name in found else make(backend, config)
        if len(found) > MOST:
            del found[next(iter(found))]
        return found[name]

    return remembered


class Shared:
    """The JAX reference, whose sessions are shared."""

    threads = True

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def open(self, config: RunConfig) -> Any:
        """Return the session of this configuration; open it the first time, without the sections that are NOT_READ."""
        return _session(self._backend, config)


def _opened(backend: Any, config: RunConfig) -> Any:
    read = {name: getattr(config.parity, name) for name in ("reference_device", "reference_devices")}
    parity = NotRead("parity", **read)
    others = {section: NotRead(section) for section in NOT_READ}
    return backend.open(config.model_copy(update={**others, "parity": parity}))


_session = kept(_opened, what_is_read)


@pytest.fixture(scope="session", autouse=True)
def _shared_references() -> Iterator[None]:
    from lockstep.core.parity.measures.compare import Reference
    from lockstep.core.parity.reference import self_check

    opened = Reference._opened

    def with_shared_sessions(backend: Any, config: RunConfig) -> Reference:
        shared: Any = Shared(backend) if is_jax(backend) else backend
        return opened(shared, config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reference, "_opened", staticmethod(with_shared_sessions))
        sound = kept(self_check.require_sound, lambda config: what_is_read(self_check.small(config)))
        patch.setattr(self_check, "require_sound", sound)
        yield
