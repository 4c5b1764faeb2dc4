"""The picture of mutants: each has one outcome, and stands in the cell of its place, operator and condition."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from lockstep.core.files.jsonl import scan_lines
from lockstep.core.mutate.conditions import CONDITIONS
from lockstep.core.mutate.operators import OPERATORS
from lockstep.core.mutate.picture import CELL, OUTCOMES, picture
from lockstep.core.mutate.places import KINDS
from lockstep.core.mutate.rows import Row
from lockstep.parity_tests.repository import REPO

ONE = Row("grad_norm:scalar*drop@always", "bf16/eager", (("grad_norm", "update", None),), 1, effect=0.5)
MADE = {
    "found and named": replace(ONE, found=True, exact=True),
    "found, misnamed": replace(ONE, found=True),
    "missed, moves up to 1 %": replace(ONE, effect=1e-3),
    "missed, moves more": ONE,
    "moved no bit": replace(ONE, equivalent=True),
    "ended the trainer": replace(ONE, stopped=True, equivalent=False),
    "no verdict": replace(ONE, error="KeyError"),
}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("words", MADE)
def test_a_row_has_one_outcome(words: str) -> None:
    assert [outcome.words for outcome in OUTCOMES if outcome.holds(MADE[words])] == [words]


def test_the_rows_that_are_kept_have_one_outcome_each() -> None:
    lines = scan_lines(REPO / "docs" / "results" / "mutants.jsonl")
    rows = [Row.from_json(line.value) for line in lines if line.value and "id" in line.value]
    assert len(rows) > 1000
    assert all(sum(outcome.holds(row) for outcome in OUTCOMES) == 1 for row in rows)


def test_a_cell_is_divided_by_the_outcomes_of_its_mutants() -> None:
    rows = [*3 * [MADE["found and named"]], ONE, replace(ONE, id="loss:forward*twice@ones", recipe="a & b")]
    tree = ElementTree.fromstring(picture(rows))
    cells = {cell.findtext(f"{SVG}title"): cell.findall(f"{SVG}rect") for cell in tree.iter(f"{SVG}g")}
    assert list(cells) == [
        "scalar, drop, always: 3 found and named; 1 missed, moves more",
        "forward, twice, ones: 1 missed, moves more",
    ]
    named, missed = cells["scalar, drop, always: 3 found and named; 1 missed, moves more"]
    assert float(named.attrib["width"]) == 3 * float(missed.attrib["width"]) == 0.75 * (CELL - 2)
    assert named.attrib["fill"] != missed.attrib["fill"]


def test_every_label_is_inside() -> None:
    """Every kind, operator and condition there is: no word is longer than its room."""
    every = [
        replace(ONE, id=f"x:{kind}*{operator}@{condition}")
        for kind in KINDS
        for operator in OPERATORS
        for condition in CONDITIONS
    ]
    tree = ElementTree.fromstring(picture(every))
    width, height = float(tree.attrib["width"]), float(tree.attrib["height"])
    texts = list(tree.iter(f"{SVG}text"))
    said = [text.text for text in texts]
    assert {*KINDS, *OPERATORS, *CONDITIONS} <= set(said)
    for text in texts:
        x, y, long = float(text.attrib["x"]), float(text.attrib["y"]), 6.6 * len(text.text or "")
        if "rotate" in text.attrib.get("transform", ""):
            assert y + long <= height
        else:
            left = x - long if text.attrib.get("text-anchor") == "end" else x
            assert left >= 0 and left + long <= width and y <= height
