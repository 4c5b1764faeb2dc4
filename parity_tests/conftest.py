"""Set the environment before torch and jax are loaded: pytest reads this file first."""

import gc
import logging
import os
import sys
from collections.abc import Iterator

import hypothesis
import pytest

from lockstep.parity_tests.repository import REPO

_DEFAULTS = {
    # OpenMP's threads spin while they wait, by default; with two workers on the same cores that costs a factor.
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "2",
    "MKL_NUM_THREADS": "2",
    "OPENBLAS_NUM_THREADS": "2",
    "TOKENIZERS_PARALLELISM": "false",
    # The reference is a CPU program here, also where there is a GPU.
    "JAX_PLATFORMS": "cpu",
    # Tests judge by the bounds that are shipped.
    "LOCKSTEP_CALIBRATION": "off",
    "TORCHINDUCTOR_CACHE_DIR": str(REPO / ".cache" / "inductor"),
    # The reference's programs, which many tests and their worker processes share, are compiled once.
    "JAX_COMPILATION_CACHE_DIR": str(REPO / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

for _name, _value in _DEFAULTS.items():
    os.environ.setdefault(_name, _value)

_late = sorted({"torch", "jax"} & set(sys.modules))
if _late:
    raise RuntimeError(f"{' and '.join(_late)} loaded before parity_tests/conftest.py could set the environment")

# torch.distributed.checkpoint notes every tensor, which would bury what a failing test has to say.
logging.getLogger("c10d-NullHandler-dcp_logger").propagate = False

# JAX's traces are millions of objects that stay, and a full collection walks all of them, for seconds: few are made.
gc.set_threshold(10_000, 10, 100)

# A slow machine is no failure: speed is measured by benchmarks.
hypothesis.settings.register_profile("lockstep", deadline=None)
hypothesis.settings.load_profile("lockstep")


@pytest.fixture(scope="module")
def in_one_process() -> Iterator[None]:
    """Sessions of several ranks are opened from this process (parity_tests/ranks/harness.py)."""
    from lockstep.parity_tests.ranks.harness import in_this_process

    with in_this_process():
        yield


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """Keep what earlier tests left out of the full collections that a test or its subject makes."""
    gc.freeze()
    yield
    gc.unfreeze()
