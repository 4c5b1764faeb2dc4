"""The version and the licence stand in several files; all hold pyproject.toml's."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from lockstep.parity_tests.repository import REPO

PROJECT: dict[str, Any] = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CITATION = (REPO / "CITATION.cff").read_text(encoding="utf-8")
# Keys that the schema of version 1.2.0 requires, and those of its others that stand here.
REQUIRED = {"cff-version", "message", "title", "authors"}
ALLOWED = REQUIRED | {"abstract", "type", "version", "license", "keywords"}


def test_the_changelog_begins_with_the_version() -> None:
    first = re.search(r"^## (\S+)$", (REPO / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert first and first[1] == PROJECT["version"]


def test_the_citation_has_what_its_schema_requires_and_the_projects_own_version() -> None:
    found = dict(re.findall(r"^([a-z-]+): *(.*)$", CITATION, re.M))
    assert REQUIRED <= found.keys() <= ALLOWED
    assert (found["cff-version"], found["type"]) == ("1.2.0", "software")
    assert (found["version"], found["license"]) == (PROJECT["version"], PROJECT["license"])
    assert re.search(r"^authors:\n  - name: \S", CITATION, re.M)


def test_the_page_of_installing_names_the_wheel() -> None:
    text = (REPO / "docs/guide/install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"lockstep-(\d[\d.]*)-py3", text)) == {PROJECT["version"]}
