"""The chain: its ids, its order, and that its stages read and write what the model's taps say."""

from __future__ import annotations

import pytest

from lockstep.core.components.loss_heads import LOSS_HEADS
from lockstep.core.config.schema import LossConfig
from lockstep.core.model.families import FAMILIES
from lockstep.core.model.names import parameter_shapes, tap_names
from lockstep.core.parity.reference.stages import chain, forward_stages, library_heads, stages_of
from lockstep.parity_tests.tiny import tiny_config

BIASED = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}


@pytest.mark.parametrize("options", [{}, {"tied": False}, BIASED])
def test_every_tap_is_written_once_and_only_earlier_taps_are_read(options):
    model = tiny_config(**options).model
    written: list[str] = []
    for stage in forward_stages(model):
        assert set(stage.reads.values()) <= set(written)
        written.append(stage.tap)
    assert written == tap_names(model)


@pytest.mark.parametrize("options", [{}, {"tied": False}, BIASED])
def test_every_parameter_is_read(options):
    model = tiny_config(**options).model
    assert {p for s in forward_stages(model) for p in s.params.values()} == set(parameter_shapes(model))


def test_ids_stand_in_the_order_of_the_chain():
    found = set()
    for family in FAMILIES:
        for more in ({}, {"window": 8, "logits_cap": 1.0}):
            model = tiny_config(layers=1).model.model_copy(update={"family": family, **more})
            ids = [stage.id for stage in forward_stages(model)]
            assert ids == sorted(ids, key=chain().order.__getitem__), family
            found |= set(ids)
    assert found == {stage for stage, phase in chain().phases.items() if phase == "forward"} - {
        "loss",
        "evaluation",
        "sampling",
        *library_heads(),
    }


@pytest.mark.parametrize("library", [head.name for head in LOSS_HEADS.values() if head.library])
@pytest.mark.parametrize("tied", [True, False])
def test_a_library_s_head_is_one_stage_in_the_place_of_two(library, tied):
    config = tiny_config(tied=tied)
    own, other = stages_of(config), stages_of(config.model_copy(update={"loss": LossConfig(head=library)}))
    assert other[:-1] == own[:-2]
    assert (other[-1].id, other[-1].tap, other[-1].reads) == (f"{library}_head", "nll", {"x": "final_norm"})
    assert (other[-1].params, other[-1].edges, other[-1].batch) == (own[-2].params, own[-2].edges, ("targets",))
