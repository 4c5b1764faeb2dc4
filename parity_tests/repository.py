"""Locate the repository, and parse its sources."""

import ast
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


@cache
def parsed(source: str) -> ast.Module:
    """Parse the text of a source file, once for all the checks of a process. Callers leave the tree as it is."""
    return ast.parse(source)
