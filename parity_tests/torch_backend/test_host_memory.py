"""A session on the CPU keeps freed memory in its process after its first step, without holes between live blocks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lockstep.parity_tests.repository import REPO
from lockstep.torch_backend import host_memory
from lockstep.torch_backend.host_memory import (
    ENVIRONMENT,
    KEPT,
    M_MMAP_THRESHOLD,
    M_TRIM_THRESHOLD,
    MAPPED_ABOVE,
    MAPPED_AT_FIRST,
    HostMemory,
)

# Page faults of 10 rounds of eight blocks of 8 MiB, which are written and freed: 8 · 2,048 pages each.
FAULTS = """
import resource
import torch
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend

torch.set_num_threads(1)
config = tiny_config('fp32')
session = TorchBackend().open(config)
{step}
def work():
    return [torch.ones(2**21) for _ in range(8)]

work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
STEP = "session.step(text_batch(config))"
EVERY_BLOCK = 10 * 8 * 2048


def faults(step: str, **environment: str) -> int:
    kept = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(step=step)],
        env=kept | {"PYTHONPATH": str(REPO / "src")} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux" or os.confstr("CS_GNU_LIBC_VERSION") is None, reason="needs glibc")
def test_after_the_first_step_freed_memory_is_not_faulted_in_again():
    assert faults(STEP) < EVERY_BLOCK / 10
    # Before it, large blocks are mappings of their own: none lies in the heap for the rest of the run.
    assert faults("") > EVERY_BLOCK / 2
    # A user's own threshold stays, and below it each block is mapped anew.
    assert faults(STEP, MALLOC_MMAP_THRESHOLD_="1000000") > EVERY_BLOCK / 2


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record the calls of mallopt, which does nothing."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    made: list[tuple[int, int]] = []

    class Library:
        @staticmethod
        def mallopt(key: int, value: int) -> int:
            made.append((key, value))
            return 1

    monkeypatch.setattr(host_memory, "CDLL", lambda name: Library)
    return made


def test_each_phase_sets_malloc_once(settings):
    memory = HostMemory()
    memory.keep()
    assert not settings
    assert memory.begin() and not memory.begin()
    assert settings == [(M_MMAP_THRESHOLD, MAPPED_AT_FIRST)]
    memory.keep()
    memory.keep()
    assert not memory.begin()
    assert settings[1:] == [(M_MMAP_THRESHOLD, MAPPED_ABOVE), (M_TRIM_THRESHOLD, KEPT)]


def test_nothing_is_changed_where_the_environment_sets_thresholds(settings, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT[0], "1000000")
    memory = HostMemory()
    assert not memory.begin()
    memory.keep()
    assert not settings
