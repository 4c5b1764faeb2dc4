"""The published run, planned: parameters, steady memory, the checkpointing table. Nothing is fitted to it."""

from dataclasses import replace

import pytest

from lockstep.core.bench.results import load_results
from lockstep.core.bench.rows import BY_NAME
from lockstep.core.config.file import load_config
from lockstep.core.plan import GPUS, fits
from lockstep.core.plan.published import PARAMETERS, STEADY, beside, savings
from lockstep.core.plan.words import model_rows, peak_words
from lockstep.parity_tests.repository import REPO


@pytest.fixture(scope="module")
def config():
    return load_config(REPO / "configs/llama-1b.toml")


def test_parameters_and_steady_memory(config):
    estimate = fits(config, "h100")
    assert ["parameters", f"{PARAMETERS:,}"] in model_rows(estimate)
    assert PARAMETERS == 1_241_581_568
    assert estimate.memory.steady == 12 * PARAMETERS
    assert round(estimate.memory.steady / 1e9, 2) == STEADY / 1e9 == 14.90


def test_each_saving_within_eight_points_and_in_their_order(config):
    found = savings(config)
    for saving in found:
        assert abs(saving.ours - saving.theirs) <= 0.08, saving
    ours = {saving.name: saving.ours for saving in found}
    # Nothing of note for embedding and norms, as published; then attention, SwiGLU, the whole block.
    assert abs(ours["recompute-embedding"]) < 0.01 and abs(ours["recompute-norms"]) < 0.01
    assert -0.01 > ours["recompute-attention"] > ours["recompute-mlp"] > ours["checkpoint-1"]


def test_savings_see_what_attention_keeps(config, monkeypatch):
    from lockstep.core.plan import memory

    honest = memory.block
    monkeypatch.setattr(memory, "block", lambda config, z, chosen: honest(config, z, chosen - {"mlp"}))
    with pytest.raises(AssertionError):
        test_each_saving_within_eight_points_and_in_their_order(config)


def test_the_run_without_checkpointing_and_with(config):
    rows = {row.name: row for row in beside(config)}
    for name in ("fused", "checkpoint-1", "recompute-mlp", "recompute-attention", "fp32-eager"):
        assert rows[name].ours == pytest.approx(rows[name].theirs, rel=0.08), name


def test_steps_are_near_the_published(config):
    """None of these figures is in the plan, which has its rates from Lockstep's own rows of an H200 and an H100."""
    rows = {row.name: row for row in beside(config)}
    for name in ("bf16", "fused", "checkpoint-1", "checkpoint-2", "recompute-mlp", "checkpoint-1-64", "fp8-tensorwise"):
        assert rows[name].our_seconds == pytest.approx(rows[name].their_seconds, rel=0.15), name


def measured_steps():
    """Row, GPU and median seconds of every step of the 1.24B model in docs/results/bench_step.json."""
    names = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200"}
    for series in load_results(REPO / "docs/results/bench_step.json")["series"]:
        for row in series["rows"]:
            if row["status"] == "measured":
                yield row["row"], names[series["device"]["name"]], row["median"]


@pytest.mark.parametrize(("row", "gpu", "median"), list(measured_steps()))
def test_steps_are_near_those_that_were_measured(row, gpu, median):
    run = load_config(REPO / "configs/llama-1b.toml", BY_NAME[row].overrides("cuda"))
    assert fits(run, gpu).step_seconds == pytest.approx(median, rel=0.05)


def test_rates_of_products_alone_would_promise_a_step_that_is_too_short():
    run = load_config(REPO / "configs/llama-1b.toml", BY_NAME["kept-fp8-one-kernel-64"].overrides("cuda"))
    alone = fits(run, replace(GPUS["h100"], in_a_step={})).step_seconds
    assert alone == pytest.approx(0.744 * fits(run, "h100").step_seconds, rel=0.01)


@pytest.mark.parametrize("policy", ["fp8_tensorwise", "fp8_rowwise"])
def test_what_is_read_for_scales_of_the_numbers_themselves(policy):
    """Inputs of q, k, v, of o, of gate and up, and of down; gradients of all outputs; FP32 weights a micro-batch."""
    row = BY_NAME["kept-fp8-delayed-one-kernel-64"].overrides("cuda")
    delayed, own = (
        fits(load_config(REPO / "configs/llama-1b.toml", row | {"precision.policy": name}), "h100").step_seconds
        for name in ("fp8_delayed", policy)
    )
    inputs, outputs = 3 * 2048 + 8192, 2048 + 2 * 512 + 2048 + 2 * 8192 + 2048
    weights = 2048 * (2048 + 2 * 512 + 2048 + 3 * 8192)
    read = 16 * (2 * 64 * 2048 * (inputs + outputs) + 4 * 4 * weights)
    assert own - delayed == pytest.approx(read / (0.9 * GPUS["h100"].bandwidth), rel=1e-6)


def test_the_peak_is_the_dense_one(config):
    assert peak_words(fits(config, "h100")) == "989.4 TFLOP/s, dense (1979 is the sparse one)"


def test_mfu_is_of_all_devices():
    config = load_config(REPO / "configs/llama-1b.toml", {"train.ranks": "8", "train.micro_batch_size": "8"})
    one, eight = fits(config.model_copy(update={"train": config.train.model_copy(update={"ranks": 1})})), fits(config)
    assert eight.mfu["6N"] == pytest.approx(one.mfu["6N"], rel=0.02)
    assert eight.tokens_per_second == pytest.approx(8 * one.tokens_per_second, rel=0.02)


def test_sharding_divides_the_state():
    config = load_config(REPO / "configs/llama-1b.toml", {"train.ranks": "8", "train.micro_batch_size": "8"})
    whole, sharded = fits(config, "h100", sharded=False).memory, fits(config, "h100", sharded=True).memory
    assert sharded.steady == pytest.approx(whole.steady / 8)
    assert sharded.peak < whole.peak


@pytest.mark.parametrize("gpu", GPUS)
def test_every_device_has_sources(gpu):
    assert GPUS[gpu].sources
