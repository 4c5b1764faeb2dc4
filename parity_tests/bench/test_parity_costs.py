"""Bytes by formula are those of what is written and handed over."""

from __future__ import annotations

import math

import pytest

from lockstep.core.bench.parity_costs import (
    array_bytes,
    evidence_bytes,
    observation_bytes,
    observation_names,
    page,
    sketch_bytes,
)
from lockstep.core.config.file import load_config
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.recorded import observe, probe_of, save_observations
from lockstep.parity_tests.repository import REPO
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_by_formula_are_the_bytes(tied, tmp_path):
    config = tiny_config("bf16", tied=tied)
    session, batch = TorchBackend().open(config), text_batch(config)
    probe = probe_of(batch, config)
    evidence = gather(session, config, batch, probe)
    others = sum(array_bytes(b.arrays) for b in (evidence.batch, evidence.tapped))
    losses = array_bytes([evidence.stepped.nll, evidence.probed.nll])
    assert array_bytes(evidence) == pytest.approx(evidence_bytes(config) + others + losses, rel=1e-3)
    found = observe(session, config, probe)
    assert set(found) == set(observation_names(config))
    written = save_observations(tmp_path, 1, batch, probe, found).stat().st_size
    # The rest describes the file itself.
    assert observation_bytes(config) <= written < observation_bytes(config) + 4096


def test_an_array_that_stands_twice_counts_once():
    array = text_batch(tiny_config()).tokens
    assert array_bytes({"a": array, "b": [array, array.copy()]}) == 2 * array.nbytes


def test_the_whole_model():
    config = load_config(REPO / "configs/llama-1b.toml")
    assert sketch_bytes(config) == len(observation_names(config)) * 4084
    assert evidence_bytes(config) > 10 * 4 * 1_241_581_568
    assert math.isclose(observation_bytes(config), 2_648_585, rel_tol=0.05)


def test_the_page_says_what_was_not_measured():
    row = {"seconds": 0.1, "more": 0.0, "bytes": 0, "bytes_whole": 0}
    modes = {"taps off": row, "full check every N": {**row, "seconds": None, "more": None}}
    model = {"name": "one", "scaled": "Measured small.", "modes": modes, "remarks": ["so"]}
    found = {
        "machine": {"processor": "x86_64", "cores": 4, "threads": 3},
        "versions": {"torch": "2.13.0+cpu", "jax": "0.10.2"},
        "every": 100,
        "config": "quickstart.toml",
        "models": [model],
        "medians": {"training step": 0.1},
        "steps": {"training step": 1.0},
    }
    written = page(found)
    assert "| full check every N | not measured | | 0 | 0 |" in written and "| taps off | 0.1 | +0.0 % |" in written
