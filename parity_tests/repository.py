"""Locate the repository, and parse its sources."""

import ast
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


@cache
def parsed(source: str) -> ast.Module:
    """Return the syntax tree of a source text, cached for all checks of the process. Callers must not change it."""
    return ast.parse(source)
