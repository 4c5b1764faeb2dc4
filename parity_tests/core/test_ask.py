"""Capabilities of a session: one way to ask for them, and one outcome where one is missing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.core import backend, capabilities
from lockstep.core.backend import NotSupported
from lockstep.core.capabilities import Candidate, HasRandomState, Loads, UsesMemory, ask
from lockstep.parity_tests.repository import REPO, parsed

ASKED = {"session", "own", "candidate", "reference", "backend"}


class Bare:
    """Has one capability, and one that somebody took away."""

    load = None

    def memory(self) -> dict[str, float]:
        return {"allocated": 1.0}

    def random_state(self) -> dict[str, float]:
        return {}


def test_a_capability_is_the_object_itself():
    bare = Bare()
    assert ask(bare, UsesMemory) is bare and ask(bare, UsesMemory).memory() == {"allocated": 1.0}


@pytest.mark.parametrize("capability, lacking", [
    (Loads, "load"), (HasRandomState, "set_random_state"), (Candidate, "state, step, gradients, observe, close"),
])  # fmt: skip
def test_what_is_missing_is_named(capability, lacking):
    with pytest.raises(NotSupported, match=f"^the session has no {lacking}$"):
        ask(Bare(), capability)
    with pytest.raises(NotSupported):
        ask(None, capability)


def other_ways(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that look for a method of a session or backend without `ask`."""
    protocols = {
        name: found
        for name, found in (vars(backend) | vars(capabilities)).items()
        if getattr(found, "_is_protocol", False)
    }
    methods = {name for found in protocols.values() for name in vars(found)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1):
            continue
        of, what = node.args[:2]
        name = of.attr.lstrip("_") if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
        looked = node.func.id in ("getattr", "hasattr") and name in ASKED and getattr(what, "value", None) in methods
        typed = node.func.id == "isinstance" and isinstance(what, ast.Name) and what.id in protocols
        if looked or typed:
            yield node.lineno


def test_nobody_asks_in_another_way():
    found = [
        f"{path.relative_to(REPO)}:{line}"
        for folder in ("core", "scripts", "torch_backend", "jax_backend")
        for path in sorted(Path(REPO / folder).rglob("*.py"))
        for line in other_ways(parsed(path.read_text(encoding="utf-8")))
    ]
    # The module of a candidate's file is searched for what can open sessions, before there is a backend.
    assert [place for place in found if not place.startswith("core/load_backend.py")] == []


@pytest.mark.parametrize("line", [
    'getattr(session, "load", None)', 'hasattr(self._session, "memory")', "isinstance(session, Timed)",
])  # fmt: skip
def test_other_ways_are_found(line):
    assert list(other_ways(ast.parse(line))) == [1]
