"""The tables of families: held to transformers' own models, and their transforms to arrays that were made by hand."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.core.config.sections import ModelConfig
from lockstep.core.errors import UserError
from lockstep.core.hub.config import config_of, model_of
from lockstep.core.hub.families import HUB, by_architecture
from lockstep.core.hub.families.llama import FAMILY as LLAMA
from lockstep.core.hub.family import Fixed, HubFamily, Key, Setting, Stored, conv1d, same
from lockstep.core.hub.tensors import stored_tensors, their_shape, to_ours, to_theirs
from lockstep.core.model.names import parameter_shapes

NAMES = ("llama", "gpt2", "qwen2", "qwen3", "mistral", "gemma2")
SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}
GPT2 = {"vocab_size": 40, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 16}


def family_named(name: str) -> HubFamily:
    family = importlib.import_module(f"lockstep.core.hub.families.{name}").FAMILY
    assert isinstance(family, HubFamily)
    return family


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_and_setting_of_transformers_has_its_place(name: str) -> None:
    import transformers

    family = family_named(name)
    kind = getattr(transformers, family.architecture)
    config = kind.config_class(**(GPT2 if name == "gpt2" else SMALL), tie_word_embeddings=False)
    model = kind(config)
    named = [one.theirs.format(i=i) for one in family.tensors for i in range(2 if "{i}" in one.theirs else 1)]
    assert len(named) == len(set(named)) and set(model.state_dict()) <= set(named)
    assert family.head in named
    # A tensor that the table calls transposed has its outputs last.
    for one in family.tensors:
        if one.transposed:
            found = model.state_dict()[one.theirs.format(i=0)]
            assert type(model.get_submodule(one.theirs.format(i=0).removesuffix(".weight"))).__name__ == "Conv1D"
            assert found.shape[-1] % len(one.ours) == 0
    # Keys of another name would be read as absent.
    assert config.model_type == family.model_type
    keys = {*(one.theirs for one in family.settings), *family.dropout, *([family.longest] if family.longest else [])}
    keys |= {one.theirs for one in family.fixed if not one.each} | {one.theirs for one in family.derived}
    written = config.to_dict()
    assert keys <= written.keys()
    # A missing key stands for the value that transformers takes.
    default = kind.config_class().to_dict()
    usual = {one.theirs: one.absent for one in family.settings}
    usual |= {one.theirs: one.absent for one in family.fixed if not one.each}
    for key, value in usual.items():
        # transformers puts hidden / heads in the place of a width that is not there.
        follows = key == "head_dim" and value == 0
        if isinstance(value, int | float | str) and not follows:
            assert default[key] in (value, None), key
    for fixed in family.fixed:
        assert fixed.each or written[fixed.theirs] in (fixed.value, None)


def test_the_wrong_key_of_a_table_is_seen() -> None:
    """The test above would pass over a table whose keys are nobody's."""
    import transformers

    assert "rms_norm_epsilon" not in transformers.LlamaConfig().to_dict()
    assert "model.layers.0.attn.q_proj.weight" not in {one.theirs.format(i=0) for one in LLAMA.tensors}


def test_every_family_is_found_by_its_architecture() -> None:
    assert all(by_architecture(family.architecture) is family for family in HUB.values())
    assert by_architecture("nothing") is None


FUSED = replace(
    LLAMA,
    tensors=(
        *(one for one in LLAMA.tensors if not any(f"{x}_proj" in one.theirs for x in ("q", "k", "v", "o", "down"))),
        *conv1d("model.layers.{i}.attn.c_attn", *(f"blocks.{{i}}.attn.{one}_proj" for one in "qkv")),
        *conv1d("model.layers.{i}.attn.c_proj", "blocks.{i}.attn.o_proj"),
        *conv1d("model.layers.{i}.mlp.c_proj", "blocks.{i}.mlp.down_proj"),
    ),
)
BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}


@pytest.mark.parametrize("biases", [{}, BIASES], ids=["", "biases"])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_fused_and_transposed_tensors_are_taken_apart_and_put_together(kv_heads: int, biases: dict[str, bool]) -> None:
    """As GPT-2 keeps them, with as many outputs of k and v as grouped heads leave: held to arrays made by hand."""
    sizes = {"vocab_size": 11, "hidden": 24, "layers": 2, "heads": 6, "kv_heads": kv_heads, "ffn_hidden": 20}
    model = ModelConfig(**sizes, **biases)
    shapes = parameter_shapes(model)
    random = np.random.default_rng(0)
    params = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    theirs = {one.theirs: to_theirs(one, params.__getitem__) for one in stored_tensors(FUSED, model)}
    # x · c_attn + b is q, k and v side by side.
    x = random.standard_normal((3, model.hidden)).astype(np.float32)
    at = "blocks.1.attn"
    whole = x @ theirs["model.layers.1.attn.c_attn.weight"]
    parts = [x @ params[f"{at}.{one}_proj.weight"].T for one in "qkv"]
    if biases:
        whole = whole + theirs["model.layers.1.attn.c_attn.bias"]
        parts = [y + params[f"{at}.{one}_proj.bias"] for y, one in zip(parts, "qkv", strict=True)]
    assert np.allclose(whole, np.concatenate(parts, axis=1), rtol=1e-5, atol=1e-5)
    assert theirs["model.layers.0.mlp.c_proj.weight"].tolist() == params["blocks.0.mlp.down_proj.weight"].T.tolist()
    back: dict[str, np.ndarray] = {}
    for one in stored_tensors(FUSED, model):
        assert theirs[one.theirs].shape == their_shape(one, shapes) and theirs[one.theirs].flags.c_contiguous
        back |= dict(to_ours(one, theirs[one.theirs], shapes))
    assert list(back) and back.keys() == params.keys()
    assert all(back[name].tobytes() == params[name].tobytes() and back[name].flags.c_contiguous for name in params)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (LLAMA.tensors[1:], "embed.weight"),
        ((*LLAMA.tensors, Stored("model.twice", ("embed.weight",))), "embed.weight"),
        (tuple(one for one in LLAMA.tensors if "q_proj" not in one.theirs), "q_proj"),
        (
            (*LLAMA.tensors, Stored("model.fused", ("embed.weight", "nobody.weight"))),
            "the model has embed.weight alone",
        ),
    ],
    ids=["missing", "twice", "missing in blocks", "half of a fused one"],
)
def test_a_table_that_does_not_cover_the_model_is_an_error(tensors: tuple[Stored, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        stored_tensors(replace(LLAMA, tensors=tensors), ModelConfig())


def test_settings_there_and_back() -> None:
    model = ModelConfig(
        vocab_size=50, hidden=48, layers=3, heads=6, kv_heads=3, ffn_hidden=10, norm_eps=3e-6, rope_theta=123.5,
        tied=False, qkv_bias=True, o_bias=True, mlp_bias=True,
    )  # fmt: skip
    written = config_of(model, LLAMA, 77)
    assert written["max_position_embeddings"] == 77 and written["head_dim"] == 8
    family, found, left_out = model_of(written, "config.json")
    assert (family, found, left_out) == (LLAMA, model, [])
    # As it was written before transformers 5.
    old = {key: value for key, value in written.items() if key not in ("rope_parameters", "head_dim")}
    assert model_of(old | {"rope_scaling": None}, "config.json")[1] == model
    assert model_of(written | {"attention_dropout": 0.1}, "config.json")[2] == [
        "attention_dropout = 0.1 is left out: there is no dropout in training here"
    ]


def test_defaults_are_those_of_transformers() -> None:
    """A config.json that has no more than the sizes."""
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    said = {key: SMALL[key] for key in sizes} | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    found = model_of(said, "config.json")[1]
    from transformers import LlamaConfig

    theirs = LlamaConfig(**{key: SMALL[key] for key in sizes})
    assert (found.kv_heads, found.norm_eps, found.tied) == (4, theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert found.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (found.qkv_bias, found.o_bias, found.mlp_bias) == (False, False, False)


MADE_UP = replace(
    LLAMA,
    settings=(
        *(
            one
            for one in LLAMA.settings
            if one.ours not in ("ffn_hidden", "kv_heads", "qkv_bias", "o_bias", "mlp_bias")
        ),
        Setting("ffn_hidden", "n_inner", Key("hidden_size", times=4)),
        Setting("kv_heads", "num_attention_heads"),
    ),
    given={"qkv_bias": True, "o_bias": False, "mlp_bias": False},
    fixed=(*LLAMA.fixed, Fixed("layer_types", "full", "full", each=True)),
    derived=(),
)


def test_a_key_that_follows_from_another_and_values_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HUB, "llama", MADE_UP)
    said = {key: SMALL[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    said |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "layer_types": ["full", "full"]}
    found = model_of(said, "config.json")[1]
    assert (found.ffn_hidden, found.kv_heads, found.qkv_bias, found.o_bias) == (96, 4, True, False)
    with pytest.raises(UserError, match="layer_types"):
        model_of(said | {"layer_types": ["full", "sliding"]}, "config.json")
    assert config_of(found, MADE_UP, 8)["n_inner"] == 96
    with pytest.raises(UserError, match=r"model\.o_bias = True: LlamaForCausalLM has it at False alone"):
        config_of(found.model_copy(update={"o_bias": True}), MADE_UP, 8)
    with pytest.raises(UserError, match=r"model\.heads and model\.kv_heads differ: .* one num_attention_heads"):
        config_of(found.model_copy(update={"kv_heads": 2}), MADE_UP, 8)
    # A setting that the table does not know must be at its default.
    with pytest.raises(UserError, match=r"model\.norm_eps = 0\.5: LlamaForCausalLM has it at 1e-05 alone"):
        bare = tuple(one for one in MADE_UP.settings if one.ours != "norm_eps")
        config_of(found.model_copy(update={"norm_eps": 0.5}), replace(MADE_UP, settings=bare), 8)


def test_null_is_a_value_where_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Mistral's sliding_window, where a missing key is 4096 and null no window."""
    table = tuple(one for one in LLAMA.settings if one.ours != "ffn_hidden")
    monkeypatch.setitem(HUB, "llama", replace(LLAMA, settings=(*table, Setting("ffn_hidden", "width", 4096, null=7))))
    said = config_of(ModelConfig(ffn_hidden=7), HUB["llama"], 8)
    assert said["width"] is None and model_of(said, "config.json")[1].ffn_hidden == 7
    del said["width"]
    assert model_of(said, "config.json")[1].ffn_hidden == 4096
    assert [one.theirs for one in same("a", "b")] == ["a.weight", "a.bias"]
