"""Locate the pages of the documentation, and read their code fences."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
DOCS = REPO / "docs"
GUIDE = DOCS / "guide"
PICTURES = DOCS / "pictures"
# Pages at the top of the repository that are written by hand, as the guide is.
TOP = (REPO / "README.md", REPO / "CONTRIBUTING.md", REPO / "CHANGELOG.md")

_FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```", re.M | re.S)


def written_by_hand() -> list[Path]:
    """Return README, CONTRIBUTING, CHANGELOG, the index and the guide."""
    return [*TOP, DOCS / "index.md", *sorted(GUIDE.glob("*.md"))]


def fences(text: str) -> list[tuple[str, str]]:
    """Return language and content of each code fence of a page."""
    return [(language, body) for _, language, body in _FENCE.findall(text)]


def without_fences(text: str) -> str:
    """Return a page without its code fences, which are not prose."""
    return _FENCE.sub("", text)
