"""Mutants as data: ids, places, operators, the draw."""

from __future__ import annotations

import pytest

from lockstep.core.config.schema import LossConfig, RunConfig
from lockstep.core.errors import UserError
from lockstep.core.model.names import edge_names, parameter_shapes, tap_names
from lockstep.core.mutate import draw as drawing
from lockstep.core.mutate.conditions import CONDITIONS, ONE_RANK
from lockstep.core.mutate.draw import draw, mutants, place_of
from lockstep.core.mutate.mutant import Mutant, Operator
from lockstep.core.mutate.operators import OPERATORS
from lockstep.core.mutate.places import ANY, KINDS, names, places
from lockstep.core.parity.reference.stages import chain
from lockstep.parity_tests.tiny import tiny_config


def whole_logits(**train: int) -> RunConfig:
    return tiny_config("fp32", train=train).model_copy(update={"loss": LossConfig(head="full")})


def test_ids_are_read_back() -> None:
    config = whole_logits(batch_size=8)
    every = list(mutants(config))
    assert len({str(one) for one in every}) == len(every) > 10_000
    for one in every[::97]:
        assert Mutant.parse(str(one)) == one
        assert place_of(config, one).name == one.place


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("blocks.0.mlp.act", "is not a mutant"),
        ("blocks.0.mlp.act:forward*drop@always; x", "is not a mutant"),
        ("blocks.0.mlp.akt:forward*drop@always", "did you mean blocks.0.mlp.act:forward?"),
        ("blocks.0.mlp.act:forward*scale(+2^-60)@always", "is not an operator at this place"),
        ("blocks.0.mlp.act:forward*drop@compiled", "is not a condition at this place"),
    ],
)
def test_what_is_no_mutant_is_refused(text: str, told: str) -> None:
    with pytest.raises(UserError) as refused:
        place_of(whole_logits(), Mutant.parse(text))
    assert told in str(refused.value)


def test_every_place_of_the_step_is_there() -> None:
    config = whole_logits(batch_size=8)
    found = {(place.name, place.kind) for place in places(config)}
    taps, parameters = set(tap_names(config.model)), set(parameter_shapes(config.model))
    for kind in ("forward", "backward"):
        assert taps <= {name for name, of in found if of == kind}
    for kind in ("gradient", "part", "update"):
        assert parameters == {name for name, of in found if of == kind}
    at = {place.at for place in places(config) if place.kind == "input"}
    assert set(edge_names(config.model)) <= at
    assert {kind for _, kind in found} == set(KINDS) - {"reduced"}


def test_over_ranks_one_rank_is_wrong_or_their_sum() -> None:
    """Checkpoints and validation of one rank alone are not drawn; each rank has a part of its own."""
    of_one, of_two = places(whole_logits()), places(whole_logits(ranks=2))
    left_out = {"written", "read", "validation"}
    assert {place.kind for place in of_two} == set(KINDS) - left_out
    assert {(place.name, place.kind) for place in of_one if place.kind not in left_out} <= {
        (place.name, place.kind) for place in of_two
    }
    for place in of_two:
        assert place.conditions == (("always", ONE_RANK) if place.kind == "reduced" else (ONE_RANK,))
    assert all(ONE_RANK not in place.conditions for place in of_one)
    own = place_of(whole_logits(ranks=2), Mutant.parse("blocks.1.mlp.up_proj.weight:reduced*own@one-rank"))
    assert own.origins(ONE_RANK)[0] == ("reduction", "backward", 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_origin_is_a_link_of_the_chain(ranks: int) -> None:
    config = tiny_config("bf16", compiled=True, train={"batch_size": 8, "ranks": ranks})
    phases = set(chain().phases.values())
    for place in places(config):
        for condition in place.conditions:
            for stage, phase, layer in place.origins(condition):
                assert stage in chain().order and phase in phases
                assert layer in (None, ANY, *range(config.model.layers))


def test_a_fused_head_has_no_logits_to_change() -> None:
    inside = {place.name for place in places(tiny_config("fp32"))} & {"logits", "logits.x"}
    assert not inside and {"logits", "logits.x"} <= {place.name for place in places(whole_logits())}


def test_origins_with_any_layer_are_named_by_each() -> None:
    assert names(("update", "update", ANY), ("update", "update", 1))
    assert not names(("q", "forward", 0), ("q", "forward", 1))
    assert not names(("q", "forward", 0), ("k", "forward", 0))


def test_the_first_of_a_draw_are_the_same_for_every_number() -> None:
    config = whole_logits()
    few, many = draw(config, 20, 5), draw(config, 500, 5)
    assert few == many[:20] and len(set(many)) == 500
    assert few != draw(config, 20, 6)


def test_a_draw_has_every_kind_operator_and_condition() -> None:
    found = [
        one
        for ranks in (1, 2)
        for one in draw(tiny_config("bf16", compiled=True, train={"batch_size": 8, "ranks": ranks}), 1000, 20261124)
    ]
    assert {one.kind for one in found} == set(KINDS)
    assert {one.operator.name for one in found} == set(OPERATORS)
    assert {one.condition for one in found} == set(CONDITIONS)


def test_without_places_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "places", lambda config: [])
    assert draw(whole_logits(), 10, 0) == []


def test_the_factor_of_a_scale() -> None:
    assert Operator.parse("scale(+2^-6)").factor == 1 + 2**-6
    assert Operator.parse("scale(-2^-1)").factor == 0.5
    with pytest.raises(ValueError, match="is written"):
        _ = Operator.parse("scale(6)").factor
