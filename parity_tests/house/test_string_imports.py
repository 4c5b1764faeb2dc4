"""No string names a module that the import contracts forbid: import-linter reads import statements alone."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from lockstep.parity_tests.repository import REPO, parsed

# Names like `lockstep.core.errors` and `lockstep.torch_backend.session:TorchBackend`; a sentence is not one.
NAME = re.compile(r"lockstep\.(\w+)(\.\w+)*\.?(:\w*)?")
FORBIDDEN = {
    "core": {"torch_backend", "jax_backend", "scripts", "parity_tests"},
    "torch_backend": {"jax_backend", "scripts", "parity_tests"},
    "jax_backend": {"torch_backend", "scripts", "parity_tests"},
    "scripts": {"parity_tests"},
}
# Tables of contenders, which scripts/shared/bench_peer.py and bench_loader.py import.
ALLOWED = {("core/bench/peers.py", "torch_backend"), ("core/bench/data.py", "torch_backend")}


def forbidden_names(root: Path) -> set[tuple[str, str]]:
    """(file, package) of every string, f-strings included, that is the name of a forbidden module."""
    found = set()
    for package, forbidden in FORBIDDEN.items():
        for path in sorted((root / package).rglob("*.py")):
            for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    name = NAME.fullmatch(node.value)
                    if name and name[1] in forbidden:
                        found.add((path.relative_to(root).as_posix(), name[1]))
    return found


def test_no_string_names_a_forbidden_module() -> None:
    assert forbidden_names(REPO) == ALLOWED


@pytest.mark.parametrize(
    "text",
    [
        'import_module("lockstep.parity_tests.faults")',
        'FUZZ = "lockstep.parity_tests.cli.fuzz"\nimport_module(f"{FUZZ}.cases")',
        'name = "cases"\nimport_module(f"lockstep.parity_tests.{name}")',
        'load_backend("lockstep.parity_tests.faults.forward:RopeInBf16")',
    ],
)
def test_a_planted_string_is_seen(text: str, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/planted.py").write_text(text)
    assert forbidden_names(tmp_path) == {("scripts/planted.py", "parity_tests")}


def test_the_contracts_allow_two_edges() -> None:
    """One that a wheel holds, and one of a study: a third belongs here and into pyproject.toml, or nowhere."""
    contracts = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {one["id"]: one["ignore_imports"] for one in contracts if "ignore_imports" in one} == {
        "scripts": [
            "lockstep.scripts.shared.planting -> lockstep.parity_tests.faults",
            "lockstep.scripts.studies.fuzz -> lockstep.parity_tests.cli.fuzz.*",
        ]
    }
