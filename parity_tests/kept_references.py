"""Share the JAX reference's sessions among the tests of a process.

Tracing and compiling their programs is most of a check. A check loads the candidate's state into the reference first,
so sessions can be shared, as `Kept` of scripts/shared/planting.py shares them. Here two runs share a session even if
their names, folders, logs and numbers of micro-batches differ. Only `JaxBackend` itself is shared: a test that plants a
fault in a reference uses a class of its own, another process, or `check_reference`, which opens new sessions. This is a
pytest plugin, loaded by pyproject.toml.
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
MOST = 64
# The sections of a configuration from which a session computes nothing.
NOT_READ = ("name", "data", "eval", "checkpoint", "log")
# The settings of the training section that a judge's session does not read, since its programs are those of a
# micro-batch and it makes no steps; and the section's properties and methods that depend on neither.
OF_THE_RUN, OF_ANY_RUN = ("batch_size", "steps"), ("lengths", "longest", "micro_batch_of")


class NotRead:
    """Raise where a shared session reads this section, which may be another run's. `read`: what it may read."""

    def __init__(self, section: str, **read: Any) -> None:
        self._section = section
        self.__dict__.update(read)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a session of the reference reads {self._section}.{name}: parity_tests/kept_references.py"
        )


def reads_the_run(config: RunConfig) -> bool:
    """Return whether a session computes from OF_THE_RUN all the same."""
    return bool(config.optim.base_batch) or config.precision.fp8 == "delayed"


def what_is_read(config: RunConfig) -> str:
    """Return the part of a configuration that decides what a session of the reference computes, as JSON."""
    from lockstep.core.config.auto import settled

    device = "cuda" if config.device == "cuda" else "cpu"
    # A run that was made has its settings `auto` resolved, as a session resolves them.
    config = settled(config, device).model_copy(update={"device": device})
    left_out: dict[str, Any] = {section: True for section in (*NOT_READ, "parity")}
    if not reads_the_run(config):
        left_out["train"] = {*OF_THE_RUN}
    others = config.model_dump_json(exclude=left_out)
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
        """Return the session of this configuration; open it the first time, without what no session reads."""
        return _session(self._backend, config)


def _opened(backend: Any, config: RunConfig) -> Any:
    read = {name: getattr(config.parity, name) for name in ("reference_device", "reference_devices")}
    parity = NotRead("parity", **read)
    others: dict[str, Any] = {section: NotRead(section) for section in NOT_READ}
    if not reads_the_run(config):
        known = (*type(config.train).model_fields.keys() - {*OF_THE_RUN}, *OF_ANY_RUN)
        others["train"] = NotRead("train", **{name: getattr(config.train, name) for name in known})
    return backend.open(config.model_copy(update={**others, "parity": parity}))


_session = kept(_opened, what_is_read)


def _checked(config: RunConfig) -> str:
    """Return what the reference's check of itself computes from: a small model, and the name of the policy."""
    from lockstep.core.config.schema import PrecisionConfig
    from lockstep.core.parity.reference import self_check

    precision = PrecisionConfig.model_validate({"policy": config.precision.policy})
    return what_is_read(self_check.small(config).model_copy(update={"precision": precision}))


@pytest.fixture(scope="session", autouse=True)
def _shared_references() -> Iterator[None]:
    from lockstep.core.parity.measures.compare import Reference
    from lockstep.core.parity.reference import self_check

    opened, with_twin_of = Reference._opened, Reference.with_twin_of

    def shared(backend: Any) -> Any:
        return Shared(backend) if is_jax(backend) else backend

    def with_shared_sessions(backend: Any, config: RunConfig) -> Reference:
        return opened(shared(backend), config)

    def with_shared_twin(reference: Reference, backend: Any, config: RunConfig) -> Reference:
        return with_twin_of(reference, shared(backend), config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reference, "_opened", staticmethod(with_shared_sessions))
        patch.setattr(Reference, "with_twin_of", with_shared_twin)
        checked = self_check.require_sound

        def with_shared_models(backend: Any, config: RunConfig) -> Any:
            # The small model in FP64 is the same under each policy.
            return checked(shared(backend), config)

        patch.setattr(self_check, "require_sound", kept(with_shared_models, _checked))
        yield
