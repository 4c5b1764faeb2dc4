"""Set environment variables before torch and jax are imported: pytest imports this file first."""

import gc
import logging
import os
import sys
from collections.abc import Iterator

import hypothesis
import pytest

from lockstep.parity_tests.repository import REPO

_DEFAULTS = {
    # By default OpenMP's threads busy-wait, which slows down two workers on the same cores several times.
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "2",
    "MKL_NUM_THREADS": "2",
    "OPENBLAS_NUM_THREADS": "2",
    "TOKENIZERS_PARALLELISM": "false",
    # The reference runs on the CPU in tests, even if there is a GPU.
    "JAX_PLATFORMS": "cpu",
    # Tests use the bounds of the package, not those calibrated on this machine.
    "LOCKSTEP_CALIBRATION": "off",
    "TORCHINDUCTOR_CACHE_DIR": str(REPO / ".cache" / "inductor"),
    # Tests and their worker processes share the reference's compiled programs through this cache.
    "JAX_COMPILATION_CACHE_DIR": str(REPO / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

for _name, _value in _DEFAULTS.items():
    os.environ.setdefault(_name, _value)

_late = sorted({"torch", "jax"} & set(sys.modules))
if _late:
    raise RuntimeError(f"{' and '.join(_late)} loaded before parity_tests/conftest.py could set the environment")

# torch.distributed.checkpoint logs every tensor, which would hide the output of a failing test.
logging.getLogger("c10d-NullHandler-dcp_logger").propagate = False

# JAX's traces are millions of long-lived objects. A full garbage collection visits all of them, which takes seconds,
# so the threshold makes full collections rare.
gc.set_threshold(10_000, 10, 100)

# No deadline: a test must not fail on a slow machine. Benchmarks measure speed.
hypothesis.settings.register_profile("lockstep", deadline=None)
hypothesis.settings.load_profile("lockstep")


@pytest.fixture(scope="module")
def in_one_process() -> Iterator[None]:
    """Open sessions of several ranks from this process (parity_tests/ranks/harness.py)."""
    from lockstep.parity_tests.ranks.harness import in_this_process

    with in_this_process():
        yield


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """Exclude the objects of earlier tests from garbage collection during a test, which saves time."""
    gc.freeze()
    yield
    gc.unfreeze()
