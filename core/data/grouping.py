"""Taking many texts some at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def grouped(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Yield `texts` in order, in lists that end with the text that brings them to `characters` or beyond.

    So a call per list is worth its while, and a list is never larger than `characters` and one text.
    """
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= characters:
            yield group
            group, size = [], 0
    if group:
        yield group
