"""The end of a command's process: no search for cycles of objects, and for a rank no finalization."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lockstep.parity_tests.repository import REPO

# Python calls the functions of `atexit` in reverse order.
ASK = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0)); import lockstep.scripts.cli"

# At its end Python deletes a module's objects, after it has called the functions of `atexit`.
END = """
import os, sys
from lockstep.scripts import cli

class Kept:
    def __del__(self, write=os.write):
        write(1, b"deleted\\n")

cli.kept = Kept()
cli.atexit.register(os.write, 1, b"exit handlers\\n")
sys.argv = ["lockstep", *sys.argv[1:]]
cli.main()
"""


@pytest.mark.parametrize(("ranks", "last"), [({}, "deleted"), ({"WORLD_SIZE": "2", "RANK": "0"}, "exit handlers")])
@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["trian"], 2)])
def test_a_rank_ends_after_its_exit_handlers(ranks, last, words, code):
    environment = {**os.environ, **ranks, "PYTHONPATH": str(REPO / "src")}
    done = subprocess.run([sys.executable, "-c", END, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == code and "exit handlers" in done.stdout
    assert done.stdout.splitlines()[-1] == last


def test_a_command_leaves_its_objects_out_of_the_last_collection():
    environment = os.environ | {"PYTHONPATH": str(REPO / "src")}
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
