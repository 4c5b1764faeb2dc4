"""Every link of README, CONTRIBUTING, CHANGELOG and docs/ that stays in the repository leads to something."""

import re
from pathlib import Path

import pytest

from lockstep.parity_tests.repository import REPO
from lockstep.scripts.docs.pages import without_fences

# In the line, or by a name whose target stands elsewhere on the page.
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.M)
BY_NAME = re.compile(r"\]\[([^\]]+)\]")
PAGES = [*sorted(REPO.glob("*.md")), *sorted((REPO / "docs").rglob("*.md"))]


def broken(page: Path, text: str) -> list[str]:
    """Targets of relative links in `text` that are not there, as seen from `page`; an anchor must be a heading."""
    found = []
    for target in targets(text):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        place = page.parent / path if path else page
        if not place.exists() or (anchor and anchor not in anchors(place.read_text())):
            found.append(target)
    return found


def targets(text: str) -> list[str]:
    """Targets of the links of a page; of a name without a target, the name."""
    by_name = [name for name in BY_NAME.findall(without_fences(text)) if f"\n[{name}]: " not in text]
    return [in_line or named for in_line, named in LINK.findall(text)] + by_name


def anchors(text: str) -> set[str]:
    """Headings as GitHub turns them into anchors."""
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert not broken(page, page.read_text())


def test_a_broken_link_by_name_is_seen() -> None:
    text = "see [it][a], [that][b] and [more][c]\n\n[a]: nowhere.md\n[b]: LICENSE\n"
    assert broken(REPO / "README.md", text) == ["nowhere.md", "c"]


@pytest.mark.parametrize("target", ["nowhere.md", "docs/nowhere/page.md", "README.md#no-such-heading"])
def test_a_broken_link_is_seen(target: str) -> None:
    assert broken(REPO / "README.md", f"see [it]({target})") == [target]


def test_speed_in_pictures_has_each_picture_of_a_bench() -> None:
    """Its page is for those who look at pictures only: a picture and the page with its table, side by side."""
    pictures = sorted((REPO / "docs/results").glob("bench_*.svg"))
    found = targets((REPO / "docs/guide/speed.md").read_text())
    for picture in pictures:
        assert f"../results/{picture.name}" in found and f"../results/{picture.stem}.md" in found, picture.name
    assert pictures
