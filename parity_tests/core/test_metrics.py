"""Norms by group and block, from norms by parameter."""

from __future__ import annotations

import math

import pytest

from lockstep.core.config.schema import ModelConfig
from lockstep.core.model.names import groups_of, layer_of
from lockstep.core.train.metrics import attention_logits, group_norms, norms_by_group, outer_blocks

GROUPS = groups_of(ModelConfig(layers=4, tied=False))
NAMES = list(GROUPS)


def test_a_group_is_the_root_of_the_sum_of_squares() -> None:
    norms = {name: float(i + 1) for i, name in enumerate(NAMES)}
    found = group_norms(norms, GROUPS)
    assert list(found) == ["embedding", "head", "matrices", "gains", "blocks.0", "blocks.3"]
    for part, value in found.items():
        inside = [n for n in NAMES if part in (GROUPS[n], f"blocks.{layer_of(n)}")]
        assert len(inside) > (part not in ("embedding", "head"))
        assert value == pytest.approx(math.sqrt(sum(norms[n] ** 2 for n in inside)), rel=1e-15)


def test_one_block_is_first_and_last() -> None:
    assert outer_blocks(groups_of(ModelConfig(layers=1))) == ["blocks.0"]
    assert outer_blocks(groups_of(ModelConfig(layers=12))) == ["blocks.0", "blocks.11"]
    assert outer_blocks(["embed.weight"]) == []


def test_ratios_are_of_the_same_group() -> None:
    ones = dict.fromkeys(NAMES, 1.0)
    found = norms_by_group(GROUPS, ones, {n: 2.0 for n in NAMES} | {"lm_head.weight": 0.0}, ones)
    for group in ("embedding", "matrices", "gains", "blocks.0", "blocks.3"):
        assert found[f"update_ratio/{group}"] == pytest.approx(0.5)
    assert "update_ratio/head" not in found and found["param_norm/head"] == 0


def test_attention_logits_are_named_by_block() -> None:
    assert attention_logits([3.0, 7.0, 5.0]) == {
        "attention_logit/max": 7.0,
        "attention_logit/blocks.0": 3.0,
        "attention_logit/blocks.1": 7.0,
        "attention_logit/blocks.2": 5.0,
    }
    assert attention_logits([]) == {}
