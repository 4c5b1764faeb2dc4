"""The pairwise design is one: every two values of two levers meet, and every cell is a run."""

from __future__ import annotations

import itertools

import pytest

from lockstep.core.config.file import load_config
from lockstep.parity_tests.repository import REPO
from lockstep.scripts.studies.parity_matrix import CONFIG, LEVERS, design, page, pairs, settings


def test_every_pair_of_values_meets():
    cells = design(LEVERS)
    levers = list(LEVERS.values())
    for (i, ours), (j, theirs) in itertools.combinations(enumerate(levers), 2):
        for pair in itertools.product(ours, theirs):
            assert any((cell[i], cell[j]) == pair for cell in cells), pair
    # Five precisions by three optimizers: no design is smaller than that.
    assert len(cells) == 18


def test_a_cell_fewer_is_a_pair_fewer():
    """The negative twin: no cell of the design is there in vain."""
    cells = design(LEVERS)
    whole = set().union(*map(pairs, cells))
    for left_out in cells:
        assert set().union(*(pairs(cell) for cell in cells if cell != left_out)) < whole


@pytest.mark.parametrize("cell", design(LEVERS), ids=" ".join)
def test_every_cell_is_a_run(cell):
    config = load_config(REPO / CONFIG, settings(cell))
    assert (config.train.accumulation, config.train.ranks) == (int(cell[4]), int(cell[5][0]))
    assert cell[5] == "1" or config.parallel.strategy == cell[5].split(", ")[1].lower()
    assert (config.precision.policy, config.optim.name) == (cell[1], cell[6])
    # Several chunks, or the chunked head is the whole one.
    assert config.train.micro_batch_size * config.train.sequence_length > config.loss.chunk


def test_the_page_says_what_was_not_run():
    cells = design(LEVERS)
    rows = [{"cell": list(cells[0]), "verdict": "agreed", "why": "", "seconds": 1.0, "comparisons": 9, "nearest": 0.5}]
    text = page(rows, cells)
    assert "1 of 18 cells agree" in text
    assert text.count("not run") == 17
