"""Counts of the skipped records and the copies in a source, by kind and file, with the place of the first of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.core.report.text import plural

# Names of counts in index.json, with the reasons. Those in _ALWAYS are written even if they are 0.
_ALWAYS = ("skipped_files", "skipped_documents", "empty_documents")
LEFT_OUT = {
    "skipped_files": "not UTF-8 text",
    "skipped_documents": "not valid Unicode",
    "empty_documents": "empty",
    "null_documents": "no text (null)",
    "broken_documents": "broken",
    "overlong_documents": "longer than max_document_bytes",
    "duplicate_documents": "copies of an earlier document",
}
# The count of copies that are kept.
KEPT = "kept_duplicate_documents"


@dataclass
class RecordCounts:
    """Counts of a source's records.

    Attributes:
        by_file: name of a file → kind → count. A kind is a key of LEFT_OUT, or KEPT. Files without counts are absent.
        first: kind → place of the first record.
    """

    by_file: dict[str, dict[str, int]] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, file: str, place: str, count: int = 1) -> None:
        """Add `count` records of `kind` in `file`; the first of them is at `place`."""
        counts = self.by_file.setdefault(file, {})
        counts[kind] = counts.get(kind, 0) + count
        self.first.setdefault(kind, place)

    def extend(self, other: RecordCounts) -> None:
        """Add the counts of files that come after these in the listing."""
        self.by_file |= other.by_file
        self.first = other.first | self.first

    def total(self, kind: str) -> int:
        """Return the number of records of `kind` in all files."""
        return sum(counts.get(kind, 0) for counts in self.by_file.values())

    def content(self) -> dict[str, Any]:
        """Return the entries for plan.json and index.json."""
        totals = {kind: self.total(kind) for kind in (*LEFT_OUT, KEPT)}
        return {
            **{kind: total for kind, total in totals.items() if total or kind in _ALWAYS},
            "first_left_out": self.first,
            **({"left_out_by_file": self.by_file} if self.by_file else {}),
        }


def left_out_in_words(source: Mapping[str, Any]) -> list[str]:
    """List the skipped records of a source as text: `1 of 2 files: not UTF-8 text (b.txt)`.

    source: `source` of index.json. Data that older versions prepared has counts without first names.
    """
    return [_in_words(source, kind, why) for kind, why in LEFT_OUT.items() if source.get(kind, 0)]


def kept_copies_in_words(source: Mapping[str, Any]) -> list[str]:
    """List copies that are in the shards as text; data that older versions prepared has no count of them."""
    return [_in_words(source, KEPT, LEFT_OUT["duplicate_documents"])] if source.get(KEPT, 0) else []


def _in_words(source: Mapping[str, Any], kind: str, why: str) -> str:
    number = source[kind]
    of_files = f" of {plural(source['files'], 'file')}"
    many = f"{number:,}{of_files}" if kind == "skipped_files" else plural(number, "document")
    first = source.get("first_left_out", {}).get(kind)
    return f"{many}: {why}" + (f" ({first}{', …' if number > 1 else ''})" if first else "")
