"""Each rank of a large check gives the system back what it frees, though small blocks lie between."""

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

train = {"ranks": int(sys.argv[2]), "batch_size": 4, "micro_batch_size": 2}
place.return_large_blocks(tiny_config(train=train, vocab_size=int(sys.argv[1])))
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
@pytest.mark.parametrize("vocabulary, ranks, left", [(256, 2, True), (400_000, 2, False), (400_000, 1, True)])
def test_holes_between_small_blocks_go_back(vocabulary: int, ranks: int, left: bool) -> None:
    command = [sys.executable, "-c", HOLES, str(vocabulary), str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 100 << 20) == left
