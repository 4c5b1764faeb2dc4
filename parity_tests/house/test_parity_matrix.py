"""The pairwise design is one: every two values of two levers meet, and every cell is a run."""

from __future__ import annotations

import itertools

import pytest

from lockstep.core.config.file import load_config
from lockstep.parity_tests.repository import REPO
from lockstep.scripts.studies.parity_matrix import CONFIG, LEVERS, design, is_allowed, page, pairs, settings


def test_every_pair_of_values_meets():
    cells = design(LEVERS)
    every = set(itertools.product(*LEVERS.values()))
    allowed = {cell for cell in every if is_allowed(cell, tuple(LEVERS))}
    assert set().union(*map(pairs, cells)) == set().union(*map(pairs, allowed))
    # Five precisions by three optimizers or casts: no design is smaller than 15.
    assert len(cells) == 21


def test_what_no_run_may_have_is_left_out():
    """Two pairs: casts of their own under FP32, and autocast beside a library's head."""
    every = set().union(*map(pairs, itertools.product(*LEVERS.values())))
    met = set().union(*map(pairs, design(LEVERS)))
    left = {(one[1], one[3]) for one in every - met}
    assert left == {("fp32", "autocast"), ("fp32", "residual"), ("autocast", "torch")}


def test_a_cell_fewer_is_a_pair_fewer():
    """The negative twin: no cell of the design is there in vain."""
    cells = design(LEVERS)
    whole = set().union(*map(pairs, cells))
    for left_out in cells:
        assert set().union(*(pairs(cell) for cell in cells if cell != left_out)) < whole


@pytest.mark.parametrize("cell", design(LEVERS), ids=" ".join)
def test_every_cell_is_a_run(cell):
    config, of = load_config(REPO / CONFIG, settings(cell)), dict(zip(LEVERS, cell, strict=True))
    assert (config.train.accumulation, config.train.ranks) == (int(of["micro-batches"]), int(of["ranks"][0]))
    assert of["ranks"] == "1" or config.parallel.strategy == of["ranks"].split(", ")[1].lower()
    assert (config.precision.policy, config.optim.name) == (of["precision"], of["optimizer"])
    assert bool(config.precision.plan.changed) == (of["casts"] != "lockstep")
    # Several chunks, or the chunked head is the whole one.
    assert config.train.micro_batch_size * config.train.sequence_length > config.loss.chunk


def test_the_page_says_what_was_not_run():
    cells = design(LEVERS)
    rows = [{"cell": list(cells[0]), "verdict": "agreed", "why": "", "seconds": 1.0, "comparisons": 9, "nearest": 0.5}]
    text = page(rows, cells)
    assert "1 of 21 cells agree" in text
    assert text.count("not run") == 20
