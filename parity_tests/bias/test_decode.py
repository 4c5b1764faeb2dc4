"""The scalar-fault decoder: each number that a step knows is named, and a random ratio is not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lockstep.core.backend import Batch, StepRecord
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.evidence.sketch import sketch
from lockstep.core.parity.judge.lengths import with_typical_lengths
from lockstep.core.parity.measures.decode import (
    chance_of_a_match,
    decode,
    decode_typical,
    direction,
    explain,
    known_scalars,
    scalars_of_rule,
)
from lockstep.core.parity.measures.verdict import Finding, Measure
from lockstep.core.train.schedule import learning_rate
from lockstep.parity_tests.tiny import text_batch, tiny_config

STEP = 3
CONFIG = tiny_config(train={"ranks": 2, "batch_size": 12, "micro_batch_size": 2, "sequence_length": 60})
# Step 3 lies in the warm-up, where every learning rate is another number.
CONFIG = CONFIG.model_copy(update={"optim": CONFIG.optim.model_copy(update={"warmup_steps": 5})})
BATCH = uneven_weights(text_batch(CONFIG), 7)
TOTAL = float(BATCH.weights.sum(dtype=np.float64))
RECORD = StepRecord(STEP, 5.5, TOTAL, 1e-3, 1.7312, 0.25 / 1.7312, BATCH.digest(), BATCH.tokens.size)
KNOWN = known_scalars(CONFIG, BATCH, RECORD, STEP) | scalars_of_rule(CONFIG, "final_norm.weight", STEP)
LR = [learning_rate(CONFIG.optim, s, CONFIG.train.steps) for s in (2, 3, 4)]
FIRST = float(BATCH.weights[:2].sum(dtype=np.float64)) / TOTAL

FAULTS = {
    "accumulated and not averaged": (3.0, "the accumulation steps (×3)"),
    "averaged twice": (1 / 3, "the accumulation steps (÷3)"),
    "summed over ranks": (2.0, "the world size"),
    "averaged over ranks and micro-batches": (1 / 6, "world size × accumulation steps (÷6)"),
    "not clipped": (1.7312 / 0.25, "the clip coefficient (÷"),
    "clipped twice": (0.25 / 1.7312, "the clip coefficient (×"),
    "normalised": (1 / 1.7312, "the gradient norm (÷"),
    "summed, not averaged": (TOTAL, "the loss weight of the batch (×"),
    "averaged over all tokens": (TOTAL / BATCH.weights.size, "loss weight / tokens (×"),
    "weights taken for a mask": (np.count_nonzero(BATCH.weights) / TOTAL, "loss weight / tokens with weight (÷"),
    "mean of the batch's sequences": (1 / 12, "the sequences of the batch (÷12)"),
    "divided by the sequence length": (1 / 60, "the sequence length (÷60)"),
    "only the first micro-batch": (FIRST, "the first micro-batch's share of the loss weight (×"),
    "last step's learning rate": (LR[0] / LR[1], "the learning rate of the step before (×"),
    "next step's learning rate": (LR[2] / LR[1], "the learning rate of the next step (×"),
    "no schedule": (CONFIG.optim.peak_lr / LR[1], "the peak learning rate for this step's (×"),
    "no learning rate": (1 / LR[1], "the learning rate (÷"),
    "β₁'s correction of step t−1": ((1 - 0.9**3) / (1 - 0.9**2), "the bias correction 1 − β₁ᵗ of the step before (×"),
    "β₁'s correction of step t+1": ((1 - 0.9**3) / (1 - 0.9**4), "the bias correction 1 − β₁ᵗ of the next step (×"),
    "β₂'s correction of step t+1": (
        math.sqrt((1 - 0.95**4) / (1 - 0.95**3)),
        "the bias correction 1 − β₂ᵗ of the next step (×",
    ),
    "no correction of β₁": (1 - 0.9**3, "the bias correction 1 − β₁ᵗ (×"),
    "no correction of β₂": (1 / math.sqrt(1 - 0.95**3), "the bias correction √(1 − β₂ᵗ) (÷"),
    "no dampening": (1 / (1 - 0.95), "1 − β₂ (÷"),
    "√head_dim missing": (4.0, "√head_dim"),
    "a power of two": (1 / 32, "a power of two (÷32)"),
    "a loss scale": (2.0**16, "a power of two, as a loss scale is (×65536)"),
    "sign": (-1.0, "sign flipped (×−1)"),
    "sign and accumulation": (-3.0, "sign flipped, and length off by the accumulation steps (×3)"),
    "nothing came": (0.0, "missing: the length is zero (×0)"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("error", "sketched"), [(1e-6, False), (1e-6, True), (2e-3, False), (2e-3, True)])
def test_a_scalar_fault_is_named_from_arrays_and_from_sketches(fault, error, sketched):
    ratio, words = FAULTS[fault]
    rng = np.random.default_rng(0)
    t = rng.standard_normal(20_000)
    c = ratio * (t + error * rng.standard_normal(t.size))
    c, t = (sketch(c), sketch(t)) if sketched else (c, t)
    # The gain bound of a large tensor: 0.1 of the twin's error (core/parity/measures/calibrated_bounds.py).
    sentences = explain(direction(c, t, sketched), KNOWN, error, gain_bound=0.1)
    assert sentences and words in sentences[0], sentences


def test_a_factor_equal_to_several_numbers_lists_them_together():
    assert decode(4.0, {"a": 4.0, "b": 4.0, "c": 0.25, "d": 5.0}, 1e-6) == [
        "length off by a or b or a power of two (×4)",
        "length off by c (÷0.25)",
    ]


def test_what_fits_about_equally_well_is_ordered_by_simplicity_and_what_fits_better_comes_first():
    near = {"simple": 3.0, "odd": 3.0003}
    assert [s.split(" (")[0] for s in decode(3.0001, near, 1e-2)] == ["length off by simple", "length off by odd"]
    assert decode(3.0003, near, 2e-4)[0].startswith("length off by odd")
    assert decode(3.0003, near, 5e-5) == ["length off by odd (×3.0003)"]


def test_a_right_length_a_wrong_direction_and_what_is_not_finite_have_no_name():
    rng = np.random.default_rng(1)
    t = rng.standard_normal(5_000)
    off = 4 * (t + 0.1 * rng.standard_normal(t.size))
    assert explain(direction(t, t), KNOWN, 1e-3) == []
    assert explain(direction(t * 1.0004, t), KNOWN, 1e-3) == []
    assert explain(direction(off, t), KNOWN, 1e-3) == [] and explain(direction(off, t), KNOWN, 0.1)
    assert explain(direction(t * np.nan, t), KNOWN, 1e-3) == [] == explain(direction(t, 0 * t), KNOWN, 1e-3)
    assert decode(math.nan, KNOWN, 1e-3) == decode(math.inf, KNOWN, 1e-3) == decode(3.0, KNOWN, math.inf) == []


def test_a_number_that_is_no_factor_is_an_error():
    with pytest.raises(ValueError, match="positive"):
        decode(3.0, {"a": 0.0}, 1e-3)
    with pytest.raises(ValueError, match="shape"):
        direction(np.ones(3), np.ones(4))


def test_sketches_give_the_ratio_within_their_stated_uncertainty():
    """Only what is not along t disturbs the ratio: ρ/√K, not |r|/√K."""
    deviations = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        t, e = rng.standard_normal((2, 8192))
        c = 3.0 * t + 0.3 * e
        exact, found = direction(c, t), direction(sketch(c), sketch(t), sketched=True)
        assert exact.uncertainty == 0 and found.cosine == pytest.approx(exact.cosine, abs=1e-2)
        deviations.append((found.ratio - exact.ratio) / found.uncertainty)
    # 200 draws: the standard deviation is known to 5 %.
    assert np.std(deviations) == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("tolerance", [1e-5, 1e-4, 1e-3])
def test_a_random_ratio_is_named_as_often_as_derived(tolerance):
    low, high, draws = 1e-3, 1e3, 20_000
    rng = np.random.default_rng(2)
    ratios = np.exp(rng.uniform(math.log(low), math.log(high), draws))
    rate = sum(bool(decode(float(r), KNOWN, tolerance)) for r in ratios) / draws
    chance = chance_of_a_match(KNOWN, tolerance, low, high)
    bound = 2 * (2 * len(KNOWN) + 48) * tolerance / math.log(high / low)
    print(f"tolerance {tolerance:g}: {len(KNOWN)} known, measured {rate:.2e}, derived {chance:.2e}, bound {bound:.2e}")
    assert chance <= bound * (1 + tolerance)
    assert abs(rate - chance) <= 5 * math.sqrt(chance / draws) + 1 / draws


def test_numbers_that_are_one_or_undefined_are_left_out():
    config = tiny_config(train={"batch_size": 2, "micro_batch_size": 2, "ranks": 1})
    batch = text_batch(config)
    record = StepRecord(1, 5.5, 128.0, 1e-3, 0.1, 1.0, batch.digest(), batch.tokens.size)
    known = known_scalars(config, batch, record, 1)
    assert all(v > 0 and v != 1 and math.isfinite(v) for v in known.values())
    assert not {n for n in known if "world" in n or "accumulation" in n or "clip" in n or "step before" in n}
    empty = Batch(batch.tokens, batch.targets, np.zeros_like(batch.weights))
    assert "the loss weight of the batch" not in known_scalars(config, empty, record, 1)


def test_a_rule_knows_its_own_numbers_and_none_of_another_rule():
    muon = CONFIG.model_copy(update={"optim": CONFIG.optim.model_copy(update={"name": "muon"})})
    wide, tall, gain = (f"blocks.0.{name}.weight" for name in ("mlp.down_proj", "mlp.gate_proj", "attn_norm"))
    of_wide, of_tall = (scalars_of_rule(muon, name, STEP) for name in (wide, tall))
    for found in (of_wide, of_tall):
        assert all(v > 0 and v != 1 for v in found.values())
        assert not [name for name in found if "β" in name or "bias" in name]
    own = 0.2 * math.sqrt(128)
    jordan = "the length √max(1, rows/columns) for 0.2·√max(rows, columns)"
    assert of_wide[jordan] == pytest.approx(1 / own) and of_tall[jordan] == pytest.approx(math.sqrt(2) / own)
    assert decode(1 / math.sqrt(2), of_wide, 1e-3) == ["length off by √(the longer side / the shorter side) (÷1.41421)"]
    assert "1 − the momentum" in of_wide
    of_gain = scalars_of_rule(muon, gain, STEP)
    assert of_gain == scalars_of_rule(CONFIG, wide, STEP)
    assert of_gain["1 − β₂"] == pytest.approx(0.05)
    assert not [name for name in known_scalars(muon, BATCH, RECORD, STEP) if "β" in name]


def test_a_count_is_named_by_the_median_of_ratios_that_scatter():
    known = {"the accumulation steps": 4.0, "world size × accumulation steps": 4.0, "the learning rate": 3e-4}
    rng = np.random.default_rng(0)
    about_four = 3.97 + 0.15 * rng.standard_normal(38)
    said = decode_typical(about_four, known)
    assert said.startswith("length off by the accumulation steps or world size × accumulation steps (×4) in the median")
    assert "of 38 tensors: ×3.9" in said
    assert "(÷4)" in decode_typical(about_four / 16, known)
    # Too wide for the chance of a match, another factor, too near to 1, too few, none of the step's counts.
    for ratios in (4 + 1.5 * rng.standard_normal(38), about_four / 2, about_four / 3.9, about_four[:4]):
        assert decode_typical(ratios, known) == ""
    assert decode_typical(about_four, {"the learning rate": 3e-4}) == ""


def test_a_named_median_ends_in_the_first_broken_finding_of_its_stage():
    def gradient(name, ratio, note=""):
        gain = Measure("gain_difference", ratio - 1, -0.01, 0.01, "")
        return Finding("gradients", name, "backward", None, "end_to_end", (gain,), 10, note=note)

    known = {"the accumulation steps": 4.0}
    findings = [gradient("fine", 1.0), *(gradient(f"p{n}", 4 + 0.02 * n) for n in range(-3, 4))]
    named = with_typical_lengths(findings, known)
    assert [bool(one.note) for one in named] == [False, True, *[False] * 6]
    assert "the accumulation steps (×4)" in named[1].note
    told = [*findings, gradient("q", 4.0, "length off by the accumulation steps (×4)")]
    assert with_typical_lengths(told, known) == told
