"""Group texts into lists of a given size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def grouped(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Yield `texts` in order, in lists; a list ends with the text that makes it at least `characters` long.

    Lists are large enough for an efficient call, and never longer than `characters` plus one text.
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
