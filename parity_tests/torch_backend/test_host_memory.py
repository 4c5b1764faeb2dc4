"""A session on the CPU keeps freed memory in its process, unless the environment sets malloc's thresholds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lockstep.parity_tests.repository import REPO
from lockstep.torch_backend.host_memory import ENVIRONMENT, keep_freed_memory

# Page faults of 10 rounds of eight blocks of 8 MiB, which are written and freed: 8 · 2,048 pages each.
FAULTS = """
import resource
import torch
from lockstep.parity_tests.tiny import tiny_config
from lockstep.torch_backend.backend import TorchBackend

torch.set_num_threads(1)
{session}
def work():
    return [torch.ones(2**21) for _ in range(8)]

work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
OPENED = "TorchBackend().open(tiny_config('fp32'))"


def faults(session: str, **environment: str) -> int:
    kept = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(session=session)],
        env=kept | {"PYTHONPATH": str(REPO / "src")} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux" or os.confstr("CS_GNU_LIBC_VERSION") is None, reason="needs glibc")
def test_freed_memory_is_not_faulted_in_again():
    every_block = 10 * 8 * 2048
    assert faults(OPENED) < every_block / 10
    # A user's own threshold stays, and below it each block is mapped anew.
    assert faults(OPENED, MALLOC_MMAP_THRESHOLD_="1000000") > every_block / 2


def test_nothing_is_changed_where_the_environment_sets_thresholds(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT[0], "1000000")
    assert not keep_freed_memory()
