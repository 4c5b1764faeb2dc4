"""The incident at a size for tests: a suspect with the signature, one without, and the bounds that the page states."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from lockstep.scripts.studies import incident
from lockstep.scripts.studies.incident import BY_KEY, FOLDER, PLUMMETED, RUNS, rounded, signature, suspects, train
from lockstep.torch_backend.loss import negative_log_likelihood


@pytest.fixture(scope="module")
def frozen():
    return train(replace(BY_KEY["frozen"], steps=200), onset=20, every=20)["curves"]


def test_frozen_buffers_give_the_signature_under_both_metrics(frozen):
    honest = frozen["fp32"][1]
    assert frozen["step"][1] == 20 and frozen["reported"][1] == pytest.approx(honest, rel=1e-2)
    assert signature(frozen, "fp32", honest) and signature(frozen, "own", honest)


def test_bf16_logits_stay_within_their_bound():
    run = replace(BY_KEY["bf16_logits"], steps=60)
    config = incident.config_of(run)
    session = run.backend().open(config)
    for step in range(1, run.steps + 1):
        batch = incident.batch_of(config, incident.text()[0], (0, step))
        # `evaluate` does not round: the model's own bf16 trunk, FP32 logits.
        unrounded = session.evaluate(batch)["nll"].mean(dtype=np.float64)
        bound = incident.largest_logit(session, batch) / 128
        reported = session.step(batch).loss
        assert 0 < abs(reported - unrounded) <= bound
        assert reported > PLUMMETED


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_rounded_logits_move_a_loss_by_at_most_a_128th_of_the_largest(scale):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 64, 256, generator=generator, dtype=torch.float64) * scale
    targets = torch.randint(0, 256, (4, 64), generator=generator)
    moved = negative_log_likelihood(suspects().bf16(logits), targets) - negative_log_likelihood(logits, targets)
    assert 0 < moved.abs().max() <= logits.abs().max() / 128


def test_a_loss_all_in_bf16_is_blind_to_everything_at_a_large_offset():
    logits = 2048 + torch.randn(1, 8, 256, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(8)[None]
    assert negative_log_likelihood(logits, targets).min() > 1
    assert not suspects().bf16_nll(logits, targets).any()


def test_the_bf16_accumulator_rounds_as_torch_does():
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32) * np.float32(300)
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    assert [suspects().bf16_of(v) for v in values] == expected.tolist()


def test_the_signature_needs_both_halves_at_the_same_step():
    def of(reported, fp32):
        return signature({"step": [1, 2, 3], "reported": reported, "fp32": fp32}, "fp32", 1.6)

    assert of([5.0, 9e-3, 9e-3], [5.0, 2.0, 4.0]) == 3
    assert of([5.0, 9e-3, 1.0], [5.0, 2.0, 4.0]) is None
    assert of([5.0, 2e-2, 2e-2], [5.0, 4.0, 4.0]) is None
    assert of([5.0, None, 9e-3], [5.0, 4.0, None]) is None
    assert rounded(math.nan) is None and rounded(1.234567) == 1.2346


def test_every_suspect_has_a_run_a_curve_and_a_line():
    module = suspects()
    planted = {name for name in vars(module) if not name.startswith("_") and hasattr(getattr(module, name), "open")}
    assert planted - {"TorchBackend", "FromAStepOn"} == {run.suspect for run in RUNS} - {""}
    runs, checks = (json.loads((FOLDER / f"{name}.json").read_text()) for name in ("runs", "checks"))
    assert set(runs) == {"about", *BY_KEY}
    assert {BY_KEY[key].suspect for key in checks} == {run.suspect for run in RUNS}


def test_lockstep_names_the_frozen_buffer():
    line = incident.first_disagreement(BY_KEY["frozen"], steps=2)
    assert line.startswith("step 2: parity disagreed; origin: embed (forward")
