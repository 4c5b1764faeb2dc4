"""Canonical names: complete, unique, grouped, and the same however they are asked for."""

import pytest

from lockstep.core.config.schema import ModelConfig
from lockstep.core.model.graph import GROUPS
from lockstep.core.model.names import (
    edge_names,
    groups_of,
    layer_of,
    parameter_shapes,
    probe_shapes,
    tap_names,
)

BARE = ModelConfig(layers=2)
FULL = ModelConfig(layers=2, tied=False, qkv_bias=True, o_bias=True, mlp_bias=True)


def test_names_of_a_block():
    names = [name.removeprefix("blocks.1.") for name in parameter_shapes(BARE) if name.startswith("blocks.1.")]
    assert names == [
        "attn_norm.weight",
        "attn.q_proj.weight",
        "attn.k_proj.weight",
        "attn.v_proj.weight",
        "attn.o_proj.weight",
        "mlp_norm.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    ]


def test_matrices_are_out_by_in():
    shapes = parameter_shapes(ModelConfig(hidden=64, heads=8, kv_heads=2, ffn_hidden=96, vocab_size=100))
    assert shapes["embed.weight"] == (100, 64)
    assert shapes["blocks.0.attn.k_proj.weight"] == (16, 64)
    assert shapes["blocks.0.mlp.down_proj.weight"] == (64, 96)
    assert shapes["blocks.0.mlp.up_proj.weight"] == (96, 64)


def test_a_tied_head_has_one_name():
    assert "lm_head.weight" not in parameter_shapes(BARE)
    assert parameter_shapes(FULL)["lm_head.weight"] == parameter_shapes(FULL)["embed.weight"]


def test_each_bias_follows_its_own_switch():
    extra = {}
    for switch in ("qkv_bias", "o_bias", "mlp_bias"):
        names = set(parameter_shapes(ModelConfig(layers=1, **{switch: True}))) - set(
            parameter_shapes(ModelConfig(layers=1))
        )
        extra[switch] = {name.split(".")[-2] for name in names}
    assert extra == {
        "qkv_bias": {"q_proj", "k_proj", "v_proj"},
        "o_bias": {"o_proj"},
        "mlp_bias": {"gate_proj", "up_proj", "down_proj"},
    }


@pytest.mark.parametrize(
    "name, group",
    [
        ("embed.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("blocks.3.attn.q_proj.weight", "matrices"),
        ("blocks.3.attn.q_proj.bias", "biases"),
        ("blocks.3.attn_norm.weight", "gains"),
        ("final_norm.weight", "gains"),
    ],
)
def test_groups(name, group):
    assert groups_of(ModelConfig(layers=4, tied=False, qkv_bias=True))[name] == group


def test_every_group_is_used_and_known():
    assert set(groups_of(FULL).values()) == set(GROUPS)


def test_layers():
    assert layer_of("blocks.12.mlp.up") == 12
    assert layer_of("embed") is None and layer_of("final_norm.weight") is None


def test_taps_are_unique_and_in_the_chain_s_order():
    taps = tap_names(BARE)
    assert len(set(taps)) == len(taps) == 4 + 2 * 15
    assert taps[0] == "embed" and taps[-3:] == ["final_norm", "logits", "nll"]
    assert taps.index("blocks.0.mlp_residual") + 1 == taps.index("blocks.1.attn_norm")


@pytest.mark.parametrize("model", [BARE, FULL], ids=["bare", "full"])
def test_every_tap_and_edge_has_a_shape_and_none_has_two_names(model):
    shapes = probe_shapes(model, 3, 5)
    assert set(shapes) == set(tap_names(model)) | set(edge_names(model))
    assert not set(shapes) & set(parameter_shapes(model))
    assert all(shape[:2] == (3, 5) for name, shape in shapes.items() if name != "logits.weight")


def test_a_layer_is_found_under_any_prefix():
    assert layer_of("grad/blocks.7.attn.q") == layer_of("exp_avg/blocks.7.attn.q_proj.weight") == 7
    assert layer_of("grad/embed") is None
