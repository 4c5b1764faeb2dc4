"""A plan of casts is read from text or a table, and refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.core.components.cast_plan import LOCKSTEP, PLANS, VALUES, CastPlan, plan_text, read_plan
from lockstep.core.config.file import dump_config, load_config
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.model.graph import OUTPUT


def config_of(tmp_path: Path, text: str, **overrides: str) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load_config(path, {f"precision.{key}": value for key, value in overrides.items()})


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("", LOCKSTEP),
        ("lockstep", LOCKSTEP),
        ("autocast", PLANS["autocast"]),
        ("residual=bf16", CastPlan(residual="bf16")),
        (" residual = bf16 , act = after silu and product", CastPlan(residual="bf16", act="after silu and product")),
        ("residual=fp16", CastPlan(residual="bf16")),
        ("autocast, rope=fp32, residual=bf16", CastPlan("bf16", "fp32", "bf16", "bf16", "fp32", PLANS["autocast"].act,
                                                       "bf16", "fp32")),
    ],
)  # fmt: skip
def test_text_is_read(text: str, plan: CastPlan) -> None:
    assert read_plan(text) == plan
    assert read_plan(plan_text(plan)) == plan


@pytest.mark.parametrize("key", VALUES)
def test_every_choice_is_written_as_it_is_read(key: str) -> None:
    for value in VALUES[key]:
        plan = CastPlan(**{key: value})
        assert read_plan(plan_text(plan)) == plan
        assert plan.rounds(key) == (value != VALUES[key][0])


def test_a_table_is_a_plan(tmp_path: Path) -> None:
    config = config_of(tmp_path, '[precision]\ncasts = {act = "after silu and product", logits = "bf16"}')
    assert config.precision.plan == CastPlan(act="after silu and product", logits="bf16")
    path = tmp_path / "again.toml"
    path.write_text(dump_config(config))
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("casts", "policy", "said"),
    [
        ("autocats", "bf16", "'autocats' is no plan of casts; the plans are lockstep, autocast"),
        ("residual=fp8", "bf16", "residual = 'fp8': must be 'fp32' or 'bf16'"),
        ("resid=bf16", "bf16", "'resid' is nothing that a plan of casts names"),
        ("residual=bf16, autocast", "bf16", "a plan's name comes first"),
        ("residual=bf16", "fp16", "names another format"),
        ("residual=bf16", "fp32", "no narrower format"),
        ("angles=fp32", "fp64", "in FP64 nothing is rounded"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path: Path, casts: str, policy: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        config_of(tmp_path, "", casts=casts, policy=policy)


def test_what_a_library_s_head_rounds_is_its_own(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="casts of its own"):
        config_of(tmp_path, '[loss]\nhead = "torch"', casts="logits=bf16")
    config_of(tmp_path, '[loss]\nhead = "torch"', casts="residual=bf16")


@pytest.mark.parametrize(
    ("kind", "role", "choice"),
    [
        ("sum", OUTPUT, "residual=bf16"),
        ("norm", "x", "residual=bf16"),
        ("norm", OUTPUT, ""),
        ("sum", "y", "linear=bf16"),
        ("gated", "up", "linear=bf16"),
        ("rope", OUTPUT, ""),
        ("rope", "x", "rope=promoted"),
        ("linear", "x", ""),
        ("attention", "v", "linear"),
        ("attention", "k", ""),
    ],
)
def test_a_plan_says_which_results_it_rounds(kind: str, role: str, choice: str) -> None:
    plan = CastPlan(residual="bf16", linear="bf16", rope="promoted")
    assert plan.option(kind, role) == choice
