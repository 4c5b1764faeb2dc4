"""Where canonical parameters lie in a module: fused, transposed, in turns, turned; and names that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.core.errors import UserError
from lockstep.core.hub.families import HUB
from lockstep.core.hub.tensors import stored_tensors, to_theirs
from lockstep.core.model.names import parameter_shapes
from lockstep.parity_tests.tiny import tiny_config
from lockstep.torch_backend.candidate.layout import fused, layout_of, layout_of_stored

MODEL = tiny_config(tied=False).model
QKV = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
REST = {
    "wte": "embed",
    "ln_f": "final_norm",
    "head": "lm_head",
    "h.{i}.ln_1": "attn_norm",
    "h.{i}.proj": "attn.o_proj",
    "h.{i}.ln_2": "mlp_norm",
    "h.{i}.mlp": fused("mlp.gate_proj", "mlp.up_proj"),
    "h.{i}.down": fused("mlp.down_proj", transposed=True),
}
LAYOUTS = {
    "side by side": fused(*QKV),
    "in turns": fused(*QKV, by_group=True),
    "turned": fused(*QKV, neighbours=True),
    "in turns, turned": fused(*QKV, by_group=True, neighbours=True),
}


def numbered():
    """Each parameter's elements by a number of their own."""
    found, begin = {}, 0
    for name, shape in parameter_shapes(MODEL).items():
        found[name] = np.arange(begin, begin + np.prod(shape)).reshape(shape)
        begin += found[name].size
    return found


@pytest.mark.parametrize("how", LAYOUTS)
def test_what_goes_in_comes_out(how):
    ours = numbered()
    placed = layout_of({**REST, "h.{i}.qkv": LAYOUTS[how]}, MODEL).placed
    back = {}
    for one in placed:
        theirs = one.to_theirs(ours.__getitem__)
        assert theirs.shape == one.shape(parameter_shapes(MODEL))
        back |= one.to_ours(theirs)
    assert back.keys() == ours.keys()
    assert all(np.array_equal(back[name], ours[name]) for name in ours)


def test_heads_in_turns_and_neighbours_that_turn_together():
    """Two query heads of 16 for each of two key-value heads, whose first dimensions are 0 and 8 of ours."""
    ours = numbered()
    layout = layout_of({**REST, "h.{i}.qkv": fused(*QKV, by_group=True, neighbours=True)}, MODEL)
    (qkv,) = [one for one in layout.placed if one.theirs == "h.1.qkv.weight"]
    q, k, v = (ours[f"blocks.1.{name}.weight"].reshape(-1, 16, 64) for name in QKV)
    heads = qkv.to_theirs(ours.__getitem__).reshape(2, 4, 16, 64)
    for group in range(2):
        expected = [q[2 * group], q[2 * group + 1], k[group], v[group]]
        for found, due in zip(heads[group], expected[:3], strict=False):
            assert np.array_equal(found[0::2], due[:8]) and np.array_equal(found[1::2], due[8:])
        assert np.array_equal(heads[group][3], expected[3])


@pytest.mark.parametrize("family", HUB)
def test_a_familys_table_is_the_same_layout(family):
    """By core/hub's own transposes and fused tensors."""
    more = {"gpt2": {"kv_heads": 4, "positions": 32}}.get(family, {})
    model = tiny_config(family=family, **more).model
    ours = {name: np.random.default_rng(0).random(shape) for name, shape in parameter_shapes(model).items()}
    stored = stored_tensors(HUB[family], model)
    placed = layout_of_stored(stored, HUB[family].head, model).placed
    for one, other in zip(stored, placed, strict=True):
        assert np.array_equal(to_theirs(one, ours.__getitem__), other.to_theirs(ours.__getitem__))


WRONG = {
    "a block has no attn.qq_proj": (
        {"h.{i}.qkv": fused("attn.qq_proj", *QKV[1:])},
        "modules: 'h.0.qkv': a llama model has no blocks.0.attn.qq_proj; did you mean blocks.0.attn.q_proj?",
    ),
    "no such module": (
        {"h.{i}.qkv": fused(*QKV), "wpe": "position"},
        "modules: 'wpe': a llama model has no position",
    ),
    "nothing of queries": (
        {},
        "modules: each parameter of the model must be mapped exactly once, and blocks.0.attn.q_proj.weight",
    ),
    "queries twice": (
        {"h.{i}.qkv": fused(*QKV), "h.{i}.q": "attn.q_proj"},
        "blocks.0.attn.q_proj.weight is mapped 2 times",
    ),
    "two in turns": ({"h.{i}.qk": fused(*QKV[:2], by_group=True)}, "modules: by_group is for q, k and v, not for "),
}


@pytest.mark.parametrize("case", WRONG)
def test_names_that_do_not_fit_are_refused(case):
    given, said = WRONG[case]
    with pytest.raises(UserError) as error:
        layout_of({**REST, **given}, MODEL)
    assert said in str(error.value) and "\n" not in str(error.value)
