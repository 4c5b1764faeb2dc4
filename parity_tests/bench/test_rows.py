"""Every row is a configuration of the 1.24B model that the rules allow, at the published size."""

from __future__ import annotations

import pytest

from lockstep.core.bench.page import page
from lockstep.core.bench.results import load_results
from lockstep.core.bench.rows import BY_NAME, LEVERS, ROWS, chosen
from lockstep.core.config.file import load_config, settings
from lockstep.core.errors import UserError
from lockstep.parity_tests.repository import REPO

PUBLISHED = {
    "fp32-eager": ((3, 2048), 1.234, 72.3),
    "fp32-compile": ((4, 2048), 1.480, 82.9),
    "bf16": ((16, 2048), 0.525, 78.6),
    "fused": ((16, 2048), 0.504, 73.6),
    "checkpoint-2": ((16, 2048), 0.567, 49.7),
    "checkpoint-1": ((16, 2048), 0.600, 29.7),
    "checkpoint-1-64": ((64, 2048), 2.36, 73.8),
    "head-full-32": ((32, 2048), 0.610, 29.6),
    "head-chunked-32": ((32, 2048), 0.654, 66.2),
    "attention-fa3-eager": ((8, 2048), 0.406, None),
    "attention-flash-eager": ((8, 2048), 0.427, None),
    "attention-fa3": ((8, 2048), 0.358, 38.3),
    "attention-flash": ((8, 2048), 0.305, 18.2),
    "fp8-delayed": ((4, 2048), 0.141, 42.3),
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_is_a_configuration(row):
    config = load_config(REPO / "configs/llama-1b.toml", row.overrides("cuda"))
    assert config.train.micro_batch_size == row.sequences and config.train.accumulation == row.accumulation
    assert set(row.settings) <= set(LEVERS) | {"loss.chunk"}
    assert row.name == BY_NAME[row.name].name


def test_names_are_unique():
    assert len(BY_NAME) == len(ROWS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_table_is_there(name):
    row, (tokens, seconds, reserved) = BY_NAME[name], PUBLISHED[name]
    assert (row.sequences * row.accumulation, 2048) == tokens
    assert (row.published.seconds, row.published.reserved) == (seconds, reserved)


def test_derived_figures_follow_from_what_was_published():
    def share(name, base, kind):
        return getattr(BY_NAME[name].published, kind) / getattr(BY_NAME[base].published, kind) - 1

    for name, base, seconds, reserved in [
        ("fp8-tensorwise", "checkpoint-1-64", -0.10, -0.20),
        ("fp8-rowwise", "checkpoint-1-64", 0.02, -0.20),
        ("recompute-attention", "fused", 0.06, -0.11),
        ("recompute-mlp", "fused", 0.06, -0.40),
    ]:
        assert share(name, base, "seconds") == pytest.approx(seconds, abs=0.003)
        assert share(name, base, "reserved") == pytest.approx(reserved, abs=0.003)
    assert BY_NAME["adamw8bit"].published.reserved == pytest.approx(BY_NAME["fused"].published.reserved - 10)


def test_every_lever_is_a_setting():
    assert set(LEVERS) <= set(settings())


def test_rows_are_chosen_in_the_table_s_order():
    assert [row.name for row in chosen(["muon", "bf16"])] == ["bf16", "muon"]
    assert chosen([]) == list(ROWS)
    with pytest.raises(UserError, match="bf17 is not a row; did you mean bf16"):
        chosen(["bf17"])


def test_the_page_in_docs_is_what_its_json_says():
    """Else: lockstep bench step --json docs/results/bench_step.json --page docs/results/bench_step.md."""
    assert (REPO / "docs/results/bench_step.md").read_text() == page(
        load_results(REPO / "docs/results/bench_step.json")
    )
