"""Find the modules that a package imports, by importing all of its submodules in a new process."""

import json
import os
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import importlib, json, pkgutil, sys

def walk(name):
    try:
        package = importlib.import_module(name)
    except ModuleNotFoundError as missing:
        # A module of kernels for a GPU, on a machine whose torch brings no Triton.
        if missing.name != "triton":
            raise
        return
    for module in pkgutil.iter_modules(getattr(package, "__path__", []), name + "."):
        if not module.name.endswith(".__main__"):
            walk(module.name)

walk(sys.argv[1])
print(json.dumps(sorted(sys.modules)))
"""


def loaded_modules(package: str, root: Path) -> set[str]:
    """Return the names in `sys.modules` after all submodules of `package` in folder `root` were imported."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, package],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise AssertionError(f"importing {package} failed:\n{done.stderr}")
    return set(json.loads(done.stdout.splitlines()[-1]))
