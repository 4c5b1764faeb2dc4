"""Every link of the README and of docs/ that stays in the repository leads to something."""

import re
from pathlib import Path

import pytest

from lockstep.parity_tests.repository import REPO

LINK = re.compile(r"\]\(([^)\s]+)\)")
PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]


def broken(page: Path, text: str) -> list[str]:
    """Targets of relative links in `text` that are not there, as seen from `page`; an anchor must be a heading."""
    found = []
    for target in LINK.findall(text):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        place = page.parent / path if path else page
        if not place.exists() or (anchor and anchor not in anchors(place.read_text())):
            found.append(target)
    return found


def anchors(text: str) -> set[str]:
    """Headings as GitHub turns them into anchors."""
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert not broken(page, page.read_text())


@pytest.mark.parametrize("target", ["nowhere.md", "docs/nowhere/page.md", "README.md#no-such-heading"])
def test_a_broken_link_is_seen(target: str) -> None:
    assert broken(REPO / "README.md", f"see [it]({target})") == [target]


def test_speed_in_pictures_has_each_picture_of_a_bench() -> None:
    """Its page is for those who look at pictures only: a picture and the page with its table, side by side."""
    pictures = sorted((REPO / "docs/results").glob("bench_*.svg"))
    targets = LINK.findall((REPO / "docs/guide/speed.md").read_text())
    for picture in pictures:
        assert f"../results/{picture.name}" in targets and f"../results/{picture.stem}.md" in targets, picture.name
    assert pictures
