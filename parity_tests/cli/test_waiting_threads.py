"""Threads of OpenMP spin for a while before they sleep, unless the user sets how they wait."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lockstep.parity_tests.repository import REPO

SAY = "import os, lockstep.scripts.cli; print(os.environ.get('OMP_WAIT_POLICY'), os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "None 4000"),
        ({"GOMP_SPINCOUNT": "7"}, "None 7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None"),
    ],
)
def test_a_command_says_how_threads_wait_unless_the_user_does(given, found):
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environment = kept | {"PYTHONPATH": str(REPO / "src")} | given
    done = subprocess.run([sys.executable, "-c", SAY], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == found
