"""Verdicts: nothing compared is never agreement, and what is out of bounds is never within them."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.parity.measures.verdict import Check, Finding, Measure, overall, verdict_json


def measure(value: float, low: float | None = 0.5, high: float | None = 2.0, name: str = "excess") -> Measure:
    return Measure(name, value, low, high, "a test")


def finding(*values: float, stage: str = "act", scope="end_to_end", size: int = 10) -> Finding:
    tap = f"blocks.0.mlp.{stage}"
    return Finding(stage, tap, "forward", 0, scope, tuple(measure(value) for value in values), size)


def check(*findings: Finding, step: int = 1) -> Check:
    return Check(step, tuple(findings), ())


@pytest.mark.parametrize(
    "value, low, high, ok",
    [
        (1.0, 0.5, 2.0, True),
        (0.5, 0.5, 2.0, True),
        (2.0, 0.5, 2.0, True),
        (2.0001, 0.5, 2.0, False),
        (0.4999, 0.5, 2.0, False),
        (1e30, 0.5, None, True),
        (-1e30, None, 2.0, True),
        (math.inf, None, 2.0, False),
        (math.nan, None, None, False),
        (0.0, None, 0.0, True),
        (1.0, None, 0.0, False),
    ],
)
def test_interval(value, low, high, ok):
    assert measure(value, low, high).ok is ok


sizes = st.floats(0, 1e9)


@given(value=sizes, low=st.none() | st.floats(1e-9, 1e9), high=st.none() | st.floats(0, 1e9))
def test_strain_is_above_one_exactly_when_a_bound_is_broken(value, low, high):
    m = measure(value, low, high)
    if m.ok:
        assert m.strain <= 1
    else:
        assert m.strain >= 1  # equality only where the quotient rounds to it
        assert m.strain > 1 or math.isclose(value, low or high) or math.isclose(value, high or low)


@pytest.mark.parametrize("name", ["gain_difference", "row_gain"])
@given(value=st.floats(-1, 1), low=st.none() | st.floats(-1, 0), high=st.none() | st.floats(0, 1))
def test_strain_of_a_gain_uses_the_bound_on_its_own_side(name, value, low, high):
    m = measure(value, low, high, name)
    assert m.strain <= 1 if m.ok else m.strain >= 1


def test_the_worst_measure_of_what_is_out_of_bounds_is_the_one_that_is():
    """A length below its bound: its distance, within bounds, is no reason to accuse."""
    measures = measure(0.86, None, 0.9, "twin_distance"), measure(-0.3636, -0.3587, 0.3587, "row_gain")
    found = Finding("compiler", "blocks.3.attn.k_proj.weight", "backward", 3, "local", measures, 4096)
    assert not found.ok and found.worst.name == "row_gain"


def test_strain_of_nan_is_the_worst():
    assert measure(math.nan).strain == math.inf
    assert finding(1.0, math.nan, 3.0).worst.value is math.nan or math.isnan(finding(1.0, math.nan, 3.0).worst.value)


def test_a_finding_that_compared_nothing_does_not_hold():
    assert finding(1.0).ok
    assert not finding().ok
    assert not finding(1.0, size=0).ok
    assert not finding(1.0, 3.0).ok


def test_nothing_compared_is_could_not():
    assert check().verdict == "could_not"
    assert check(finding(1.0)).verdict == "agreed"
    assert check(finding(1.0), finding(3.0)).verdict == "disagreed"
    assert check(finding()).verdict == "disagreed"


def test_origin_is_the_first_broken_link_of_the_chain():
    early, late = finding(3.0, stage="gate"), finding(9.0, stage="down_proj")
    assert check(finding(1.0)).origin is None
    assert check(finding(1.0), early, late).origin is early
    assert check(early, late).worst is late


def test_overall():
    good, bad, none = check(finding(1.0)), check(finding(3.0)), check()
    assert overall([good, good]) == "agreed"
    assert overall([good, none, bad]) == "disagreed"
    assert overall([good, none]) == "could_not"
    assert overall([]) == "could_not"


def test_json_has_the_promised_keys_and_is_strict():
    tree = verdict_json([check(finding(1.0), step=3), check(finding(math.nan, math.inf), step=5)], candidate="torch")
    text = json.dumps(tree, allow_nan=False)
    assert json.loads(text) == tree
    assert {"schema", "verdict", "first_bad_step", "origin", "cause", "stages", "not_covered"} <= set(tree)
    assert (tree["verdict"], tree["first_bad_step"], tree["candidate"]) == ("disagreed", 5, "torch")
    assert tree["origin"] == {"stage": "act", "tap": "blocks.0.mlp.act", "phase": "forward", "layer": 0}
    assert [stage["step"] for stage in tree["stages"]] == [3, 5]
    assert [m["value"] for m in tree["stages"][1]["measures"]] == ["nan", "inf"]
    line = check(finding(1.0)).to_json()
    assert json.loads(json.dumps(line, allow_nan=False)) == line
    assert line["origin"] is None and line["verdict"] == "agreed"
