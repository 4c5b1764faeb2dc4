"""Read the imports of source files from their syntax, those inside functions too: `sys.modules` shows them too late."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from lockstep.parity_tests.repository import parsed

OWN = "lockstep"


def file_of(root: Path, module: str) -> Path | None:
    """Return the file of one of the repository's modules."""
    path = root.joinpath(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()), None)


def imports_of(path: Path) -> tuple[tuple[str, bool], ...]:
    """Return (module, whether it is imported inside a function) of every import that runs.

    Imports that only a type checker sees are left out. `from a import b` gives both a and a.b: b may be a module.
    """
    return _imports_in(path.read_text(encoding="utf-8"))


@cache
def _imports_in(source: str) -> tuple[tuple[str, bool], ...]:
    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                yield child.module, inside
                yield from ((f"{child.module}.{alias.name}", inside) for alias in child.names)
            yield from walk(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    return tuple(walk(parsed(source), False))


def is_third_party(module: str) -> bool:
    """Return whether a module is neither ours nor Python's."""
    return module.partition(".")[0] not in {OWN, *sys.stdlib_module_names}


def third_party(root: Path, folders: Iterable[str]) -> dict[str, str]:
    """Top-level name of every third-party package imported under some folders → one file that imports it."""
    found: dict[str, str] = {}
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            for module, _ in imports_of(path):
                if is_third_party(module):
                    found.setdefault(module.partition(".")[0], str(path.relative_to(root)))
    return found


def loaded_late(root: Path, module: str) -> set[str]:
    """Top-level names of third-party packages that are imported when a function runs, in a module or what it imports.

    Imports that run as soon as the module is imported are not among them.
    """
    late: dict[str, bool] = {}
    seen: dict[str, bool] = {}
    todo = [(module, False)]
    while todo:
        module, is_late = todo.pop()
        path = file_of(root, module)
        # Seen as it is imported at once, or late as now.
        if path is None or seen.get(module) in (False, is_late):
            continue
        seen[module] = is_late
        for name, inside in imports_of(path):
            if is_third_party(name):
                top = name.partition(".")[0]
                late[top] = late.get(top, True) and (is_late or inside)
            else:
                todo.append((name, is_late or inside))
    return {name for name, is_late in late.items() if is_late}
