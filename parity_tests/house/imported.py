"""Read the imports of source files from their syntax trees, including those inside functions."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from lockstep.parity_tests.repository import parsed

OWN = "lockstep"


def file_of(root: Path, module: str) -> Path | None:
    """Return the file of a module of the repository, or None if `module` is not one."""
    path = root.joinpath(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()), None)


def imports_of(path: Path) -> tuple[tuple[str, bool], ...]:
    """Return (module, whether the import is inside a function) for every import that runs.

    Imports under TYPE_CHECKING are left out. `from a import b` gives both a and a.b, since b may be a module.
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
    """Return whether a module belongs neither to Lockstep nor to the standard library."""
    return module.partition(".")[0] not in {OWN, *sys.stdlib_module_names}


def third_party(root: Path, folders: Iterable[str]) -> dict[str, str]:
    """Return the third-party packages imported in these folders: top-level name → one file that imports it."""
    found: dict[str, str] = {}
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            for module, _ in imports_of(path):
                if is_third_party(module):
                    found.setdefault(module.partition(".")[0], str(path.relative_to(root)))
    return found


def loaded_late(root: Path, module: str) -> set[str]:
    """Return the third-party packages that a module, or a module that it imports, imports only inside functions.

    Packages that are imported together with the module are left out.
    """
    late: dict[str, bool] = {}
    seen: dict[str, bool] = {}
    todo = [(module, False)]
    while todo:
        module, is_late = todo.pop()
        path = file_of(root, module)
        # Visited before as an immediate import, or as a late one like now.
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
