"""At exit a command does not search for cycles of objects, which takes a second once torch and JAX are loaded."""

from __future__ import annotations

import os
import subprocess
import sys

from lockstep.parity_tests.repository import REPO

# Python calls the functions of `atexit` in reverse order.
ASK = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0)); import lockstep.scripts.cli"


def test_a_command_leaves_its_objects_out_of_the_last_collection():
    environment = os.environ | {"PYTHONPATH": str(REPO / "src")}
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
