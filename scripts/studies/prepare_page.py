"""docs/results/prepare.md, from what scripts/studies/prepare.py measured."""

from __future__ import annotations

from typing import Any


def page(results: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    return ""
