"""A setting whose value is a name in a registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True)
class OneOf:
    """Annotation of a text setting: one of the names that `registry` holds when the value is checked.

    Unlike `Literal`, it sees what was registered after the setting was defined.
    """

    registry: Mapping[str, object]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Check the text after pydantic has."""
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def check(self, name: str) -> str:
        """Return the name. Raises ValueError with the names that there are."""
        if name not in self.registry:
            *others, last = (repr(known) for known in self.registry)
            raise ValueError(f"Input should be {', '.join(others)} or {last}" if others else f"Input should be {last}")
        return name

    @property
    def names(self) -> tuple[str, ...]:
        """The names that there are now."""
        return tuple(self.registry)
