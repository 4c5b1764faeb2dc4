"""README, CONTRIBUTING, CHANGELOG and the guide are read once: short lines, short paragraphs, verb and object first.

The list of words is short on purpose: it names habits that made sentences hard to read here, not all that can be wrong.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.parity_tests.repository import REPO
from lockstep.scripts.docs.pages import GUIDE, fences, without_fences, written_by_hand

LONGEST = 160
PAGES = written_by_hand()
README = (REPO / "README.md").read_text(encoding="utf-8")

# A sentence that begins so makes its reader wait for the subject.
_FIRST = re.compile(r"(?:^|[.!?:]\s+)\**((?:Of|What|Whose|Whether|Who)\b(?![^.|?]*\?)[^.|]{0,60})")
# Code prints, computes, ends, lists; it is no person.
_PERSON = re.compile(r"\b(?:says|is told|are told|gives way|is asked|are asked|waits for nobody)\b")


def paragraphs(text: str) -> list[str]:
    """Return the prose of a page: a paragraph, an item or a cell of a table each; no headings."""
    found: list[str] = []
    begins = True
    for line in without_fences(text).splitlines():
        stripped = line.strip()
        if line.startswith("#") or not stripped:
            begins = True
        elif stripped.startswith("|"):
            found += [cell.strip() for cell in stripped.strip("|").split("|")]
            begins = True
        elif begins or re.match(r"([-*]|\d+\.) ", stripped):
            found.append(re.sub(r"^([-*]|\d+\.) ", "", stripped))
            begins = False
        else:
            found[-1] += " " + stripped
    return found


def hard_to_read(text: str) -> list[str]:
    """Return the beginnings of sentences, and the words, that the list forbids. Code and quotations are left out."""
    found = []
    for paragraph in paragraphs(text):
        plain = re.sub(r"`[^`]*`|“[^”]*”|\"[^\"]*\"|\]\([^)]*\)", "x", paragraph)
        found += [match[1] for match in _FIRST.finditer(plain)]
        found += [plain[max(match.start() - 40, 0) : match.end()] for match in _PERSON.finditer(plain)]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_is_long(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    long = [n for n, line in enumerate(lines, 1) if len(line) > LONGEST and not line.startswith("|")]
    assert long == [], f"{page.name}: lines of more than {LONGEST} characters"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_are_read_once(page: Path) -> None:
    if page.name != "settings.md":  # its words are the configuration's, held by test_prose.py
        assert hard_to_read(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "planted"),
    [
        ("Of 3e-7, a few times more is no fault.", "Of 3e-7"),
        ("It is so. What hides is not found.", "What hides is not found"),
        ("- Whether it is so, a check finds.", "Whether it is so"),
        ("| a | Who made it |", "Who made it"),
        ("The check says so.", "The check says"),
        ("A session\nis told of it.", "A session is told"),
    ],
)
def test_a_planted_sentence_is_seen(text: str, planted: str) -> None:
    assert any(planted in found for found in hard_to_read(text))


@pytest.mark.parametrize("text", ["# What it is", "What is it? A name.", "The word `What it says` is code."])
def test_headings_questions_and_code_are_left_alone(text: str) -> None:
    assert hard_to_read(text) == []


def test_no_line_of_the_readme_is_long_not_even_in_a_table() -> None:
    assert [line for line in README.splitlines() if len(line) > LONGEST] == []


def test_no_paragraph_of_the_readme_has_more_than_five_lines() -> None:
    blocks = [block.splitlines() for block in re.split(r"\n\s*\n", without_fences(README))]
    assert [b for b in blocks if len(b) > 5 and not b[0].startswith(("|", "-", "["))] == []


def test_the_first_screen_has_a_command_a_picture_and_what_is_not_measured() -> None:
    screen = README[: README.index("## Two commands")]
    assert len(screen.splitlines()) <= 30
    assert fences(screen) and "![" in screen and "not measured" in screen


@pytest.mark.parametrize("page", sorted(GUIDE.glob("*.md")), ids=lambda page: page.name)
def test_a_page_of_the_guide_begins_with_a_command_or_code(page: Path) -> None:
    """A command, or what it prints, stands before the first section."""
    text = page.read_text(encoding="utf-8")
    beginning = text[: text.find("\n## ")] if "\n## " in text else text
    assert fences(beginning) or re.search(r"^ {4}\S", beginning, re.M)
