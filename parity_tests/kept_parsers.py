"""Share the parsers of command lines among the tests of a process.

tyro takes a tenth of a second to build a parser of some 150 flags. A user's process builds one; a process of the tests
builds a thousand, of few shapes (scripts/shared/arguments.py). A parser of another shape, or with another description,
is built anew. This is a pytest plugin, loaded by pyproject.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

# The number of parsers that are kept: commands, each with its flags and without.
MOST = 64


def kept(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap tyro's `from_callable_or_type`: cache the parsers of whole command lines, the MOST last used."""
    found: dict[Any, Any] = {}

    def remembered(f: Any, **settings: Any) -> Any:
        # Parsers of a shape's parts are called for with a prefix or a parent, and belong to their whole.
        if settings["parent_classes"] or settings["intern_prefix"]:
            return build(f, **settings)
        key = f, settings["description"]
        found[key] = found.pop(key) if key in found else build(f, **settings)
        if len(found) > MOST:
            del found[next(iter(found))]
        return found[key]

    return remembered


@pytest.fixture(scope="session", autouse=True)
def _shared_parsers() -> Iterator[None]:
    from tyro._parsers import ParserSpecification

    with pytest.MonkeyPatch.context() as patch:
        shared = staticmethod(kept(ParserSpecification.from_callable_or_type))
        patch.setattr(ParserSpecification, "from_callable_or_type", shared)
        yield
