"""A large check's process gives the system back what it frees, though small blocks lie between."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Blocks of 6 MiB, each followed by a small one that stays; the first makes glibc raise what it gives back.
HOLES = """
import sys
from pathlib import Path
import numpy as np
from lockstep.core.parity.evidence import place
from lockstep.parity_tests.tiny import tiny_config

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

place.return_large_blocks(tiny_config(vocab_size=int(sys.argv[1])), trains=sys.argv[2] == "trains")
np.ones(30 << 20, np.uint8)
blocks, between = [], []
start = resident()
for _ in range(30):
    blocks.append(np.ones(6 << 20, np.uint8))
    between.append(np.ones(100_000, np.uint8))
assert resident() - start > 150 << 20
blocks.clear()
print(resident() - start)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory by rules of its own")
@pytest.mark.parametrize(
    "vocabulary, process, left",
    [(256, "judges", True), (100_000, "judges", False), (100_000, "trains", True), (400_000, "trains", False)],
)
def test_holes_between_small_blocks_go_back(vocabulary: int, process: str, left: bool) -> None:
    command = [sys.executable, "-c", HOLES, str(vocabulary), process]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 100 << 20) == left
