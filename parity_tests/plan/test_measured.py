"""The estimated peak of a forward and backward pass is within 10 % of what the CPU's allocator reports.

10 % is what was promised; scripts/studies/plan_check.py measures many more cases, eager and compiled
(docs/results/plan_cpu.md).
"""

from dataclasses import replace

import pytest

from lockstep.core.config.file import load_config
from lockstep.core.plan import GPUS, head, memory
from lockstep.core.plan.phase import Tape
from lockstep.core.plan.products import multiply
from lockstep.core.plan.sizes import sizes_of
from lockstep.scripts.studies.plan_check import BASE, BLOCKS
from lockstep.torch_backend import loss
from lockstep.torch_backend.tools.plan import measured_peak

SMALL = BASE | {"model.vocab_size": "600", "model.layers": "2", "compile.enabled": "false"}
LOGITS = {"loss.head": "full", "model.vocab_size": "2400"}
CASES = [
    LOGITS,
    {"loss.head": "full"},
    {"loss.head": "full", "train.micro_batch_size": "2"},
    {"loss.head": "full", "recompute.parts": "block", "precision.policy": "fp32"},
    {"recompute.parts": "mlp", "train.sequence_length": "256"},
    {"recompute.parts": "attention,norms", "precision.policy": "fp32"},
    {"recompute.parts": "block", "recompute.every": "2", "model.layers": "4"},
    {"recompute.parts": "block", "recompute.keep_products": "true"},
    {"recompute.parts": "block", "recompute.keep_products": "true", "precision.policy": "fp32"},
    {"recompute.parts": "attention", "recompute.keep_products": "true", "attention.kernel": "math"},
    {"precision.casts": "autocast", "train.sequence_length": "256"},
    {"precision.casts": "norm=bf16, act=after silu and product", "recompute.parts": "attention,mlp"},
    {"precision.casts": "logits=bf16", **LOGITS},
    {"loss.head": "torch"},
    {"loss.head": "torch", "precision.policy": "fp32"},
    {"model.family": "gemma2", "model.logits_cap": "30"},
    {"model.family": "gemma2", "model.logits_cap": "30", "loss.head": "full"},
    {"model.family": "gpt2", "model.positions": "512", "model.kv_heads": "4", "model.vocab_size": "4000"},
    # FP16's products are computed from FP32 copies on every CPU.
    {
        "precision.policy": "fp16",
        "precision.casts": "norm=fp16, act=after silu and product",
        "recompute.parts": "attention,mlp",
    },
]


def off(settings):
    config = load_config(None, SMALL | settings)
    return memory.memory(config, GPUS["cpu"]).activation_peak / measured_peak(config)["peak"] - 1


@pytest.mark.parametrize(("device", "peak"), [("cpu", 4 * (2 * 3 + 3 * 5 + 2 * 5)), ("h100", 2 * 2 * 5)])
def test_the_cpu_computes_fp16_products_from_copies(device, peak):
    tape = Tape()
    z = sizes_of(load_config(None, SMALL | {"precision.policy": "fp16"}), GPUS[device])
    multiply(tape, z, 2, 3, 5, product=2.0 * 2 * 5)
    assert tape.phase.peak == peak and tape.there == {"product": 20.0}


def test_the_cpu_widens_as_many_logits_at_a_time():
    assert head.AT_A_TIME == loss.AT_A_TIME


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_peak_within_ten_percent(settings):
    assert abs(off(settings)) < 0.10


def test_the_gradient_that_a_block_is_given_counts_once():
    # Twice, and the peak is 1.5 % too high.
    assert abs(off({**BLOCKS, "model.layers": "3", "precision.policy": "fp32"})) < 0.005


def test_after_the_pass_only_gradients_are_left():
    config = load_config(None, SMALL)
    found = measured_peak(config)["after"]
    gradients = memory.memory(config, GPUS["cpu"]).gradients
    # The losses a token, and the loss, are what the step still holds.
    assert 0 <= found - gradients < 1e4


def test_half_of_the_logits_forgotten_is_seen(monkeypatch):
    honest = memory.head

    def forgetful(z, loss, tied):
        return honest(replace(z, vocab=z.vocab // 2), loss, tied)

    monkeypatch.setattr(memory, "head", forgetful)
    assert abs(off(LOGITS)) > 0.10


def test_a_part_that_is_computed_again_but_counted_as_kept_is_seen(monkeypatch):
    honest = memory.block
    monkeypatch.setattr(memory, "block", lambda config, z, chosen: honest(config, z, frozenset()))
    assert abs(off({"recompute.parts": "mlp", "train.sequence_length": "256"})) > 0.10
