"""The arrows of the design: parity_tests, scripts → backends → core, and the backends do not know each other.

import-linter reads the source, also what is imported inside functions. `sys.modules` shows what really gets loaded.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.parity_tests.house.loaded_modules import loaded_modules
from lockstep.parity_tests.repository import REPO

PACKAGES = ("core", "torch_backend", "jax_backend", "scripts", "parity_tests")
FRAMEWORKS = ("torch", "jax", "flax", "optax")
FORBIDDEN = {
    "core": (*FRAMEWORKS, "torch_backend", "jax_backend", "scripts", "parity_tests"),
    "torch_backend": ("jax", "flax", "optax", "jax_backend", "scripts", "parity_tests"),
    "jax_backend": ("torch", "torch_backend", "scripts", "parity_tests"),
}


def copy_packages(to: Path) -> Path:
    """Copy the source tree without data, runs and caches, for planting offences in."""
    for package in (*PACKAGES, "lockstep"):
        shutil.copytree(REPO / package, to / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "pyproject.toml", to)
    return to


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    program = "from importlinter.cli import lint_imports_command as run; run(['--no-cache', '--no-logo'])"
    return subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)


def test_contracts_are_kept():
    done = lint_imports(REPO)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "package, offence",
    [(package, module) for package, modules in FORBIDDEN.items() for module in modules] + [("scripts", "parity_tests")],
)
def test_a_planted_import_breaks_its_contract(package, offence, broken_contracts):
    assert f"lockstep.{package}.planted_{offence} -> {full_name(offence)}" in broken_contracts


def full_name(module: str) -> str:
    return f"lockstep.{module}" if module in PACKAGES else module


@pytest.fixture(scope="module")
def broken_contracts(tmp_path_factory):
    """Run import-linter on a copy in which every package imports, inside a function, all that it must not."""
    root = copy_packages(tmp_path_factory.mktemp("planted"))
    for package, modules in {**FORBIDDEN, "scripts": ("parity_tests",)}.items():
        for module in modules:
            (root / package / f"planted_{module}.py").write_text(f"def f():\n    import {full_name(module)}\n")
    done = lint_imports(root)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("package", FORBIDDEN)
def test_nothing_forbidden_is_loaded(package):
    assert not loaded_modules(f"lockstep.{package}", REPO) & set(map(full_name, FORBIDDEN[package]))


@pytest.mark.parametrize("package, offence", [("core", "torch"), ("torch_backend", "jax"), ("jax_backend", "torch")])
def test_a_planted_import_is_seen_in_sys_modules(package, offence, tmp_path):
    root = copy_packages(tmp_path)
    (root / package / "deep").mkdir()
    (root / package / "deep" / "__init__.py").touch()
    (root / package / "deep" / "planted.py").write_text(f"import {offence}\n")
    assert offence in loaded_modules(f"lockstep.{package}", root)
