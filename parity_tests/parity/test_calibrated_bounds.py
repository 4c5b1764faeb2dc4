"""Bounds: what they follow from, and which recipes have them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from lockstep.core.backend import Batch
from lockstep.core.components.cast_plan import PLANS, VALUES, CastPlan, plan_text
from lockstep.core.config.schema import LossConfig, OptimConfig, RunConfig
from lockstep.core.errors import UserError
from lockstep.core.model.families import FAMILIES
from lockstep.core.parity.judge.end_to_end import errors_of_loss
from lockstep.core.parity.measures import calibrated_bounds, peak_bounds
from lockstep.core.parity.measures.distances import Distances
from lockstep.core.parity.measures.scatter import SCATTER_SIZE, scatter
from lockstep.parity_tests.tiny import tiny_config

RECIPES = [f"{policy}/{program}" for policy in ("fp32", "bf16") for program in ("eager", "compiled")]


FULL = tiny_config("bf16", tied=False, qkv_bias=True, o_bias=True, mlp_bias=True)


def of_every_family(recipe):
    """Return a run, with window and cap, of each family measured under a recipe: all under FP32 and bf16."""
    more = {"window": 8, "logits_cap": 1.0}
    others = [FULL.model.model_copy(update={"family": name, **more}) for name in FAMILIES]
    models = [FULL.model, *(others if recipe.partition("/")[0] in ("fp32", "bf16") else [])]
    return [FULL.model_copy(update={"model": model}) for model in models]


def distances(excess: float = 1.0, gain: float = 0.0, distance: float = 0.0, relative: float = 1e-3) -> Distances:
    return Distances(excess, gain, distance, excess * relative, relative, 0.0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_comparison_of_every_recipe_was_measured(recipe):
    found = set(calibrated_bounds.table()[recipe])
    apart = ("adamw8bit/", "adamw8bit_bnb/", "muon/", "forward/torch_", "backward/torch_")
    of_casts = {kind for kind in found if calibrated_bounds.CAST in kind}
    of_layers = {kind for kind in found if kind.endswith(calibrated_bounds.OVER_LAYERS)}
    of_others = {kind for kind in found if kind.endswith(calibrated_bounds.OTHER_PLAN)}
    rest = found - of_casts - of_layers - of_others
    every = set().union(*map(calibrated_bounds.all_kinds, of_every_family(recipe)))
    here = {kind for kind in every if calibrated_bounds.measured_under(recipe, kind) == recipe}
    assert here == {kind for kind in rest if not kind.startswith(apart)}


@pytest.mark.parametrize(
    "recipe",
    [
        "bf16/eager",
        "fp32/eager",
        "fp32/compiled",
        "fp16/eager",
        "fp8_rowwise/eager",
        "fp8_tensorwise/eager",
    ],
)
def test_every_mean_over_layers_was_measured(recipe):
    outside = {"embed_scale", "position", "final_layer_norm", "final_centered_norm", "logits_cap"}
    of_many = {"embed", "final_norm", "logits", "nll", "together", "vocabulary", *outside}
    each = {
        kind
        for kind in set().union(*map(calibrated_bounds.all_kinds, of_every_family(recipe)))
        if kind.startswith(("gradients/", "end_to_end/")) and kind.rpartition("/")[2] not in of_many
    }
    measured = {kind for kind in calibrated_bounds.table()[recipe] if kind.endswith(calibrated_bounds.OVER_LAYERS)}
    assert measured == {kind + calibrated_bounds.OVER_LAYERS for kind in each}


@pytest.mark.parametrize("recipe", ["bf16/eager", "bf16/compiled", "fp16/eager", "fp8_rowwise/eager"])
def test_every_choice_of_a_plan_of_casts_was_measured(recipe):
    """Alone and beside autocast's, which makes other results narrow."""
    policy, _, program = recipe.partition("/")
    operand = FULL.precision.model_copy(update={"policy": policy}).operand
    for key, values in VALUES.items():
        for plan in (CastPlan(), PLANS["autocast"]):
            for value in values:
                casts = plan_text(replace(plan, **{key: value}), operand)
                precision = FULL.precision.model_copy(update={"policy": policy, "casts": casts})
                compiled = FULL.compile.model_copy(update={"enabled": program == "compiled"})
                calibrated_bounds.require(FULL.model_copy(update={"precision": precision, "compile": compiled}))


def test_a_whole_step_of_a_compiled_program_was_measured_under_other_casts():
    rows = calibrated_bounds.table()["bf16/compiled"]
    # Other families have Lockstep's own casts alone.
    every = set().union(*map(calibrated_bounds.all_kinds, of_every_family("bf16/compiled")))
    of_llama = calibrated_bounds.all_kinds(FULL)
    own = {kind for kind in rows if kind.removesuffix(calibrated_bounds.OVER_LAYERS) not in every - of_llama}
    of_a_step = {kind for kind in own if kind.startswith(calibrated_bounds.OF_A_STEP)}
    others = {kind for kind in of_a_step if kind.endswith(calibrated_bounds.OTHER_PLAN)}
    assert others == {kind + calibrated_bounds.OTHER_PLAN for kind in of_a_step - others}


def under(casts: str) -> RunConfig:
    return FULL.model_copy(update={"precision": FULL.precision.model_copy(update={"casts": casts})})


@pytest.mark.parametrize(
    ("kind", "apart"),
    [
        ("bridge/qk", True),
        ("gradients/together", True),
        ("end_to_end/forward/q/layers", True),
        ("forward/q", False),
        ("backward/q/x with norm=bf16", False),
        ("update", False),
    ],
)
def test_a_whole_step_alone_has_kinds_of_its_own_under_other_casts(kind, apart):
    assert calibrated_bounds.under_plan(under("lockstep"), kind) == kind
    other = calibrated_bounds.under_plan(under("autocast"), kind)
    assert (other != kind) is apart and calibrated_bounds.under_own_plan(other) == kind


def test_what_clean_runs_reach_under_other_casts_widens_no_bound_of_lockstep_s_own(monkeypatch):
    kind, recipe = "bridge/qk", "bf16/compiled"
    other = kind + calibrated_bounds.OTHER_PLAN
    own = calibrated_bounds.limits(recipe, kind, 4096)
    rows = dict(calibrated_bounds.table()[recipe])
    wide = replace(rows[kind], gain=2 * rows[kind].gain, sharp=None)
    monkeypatch.setattr(calibrated_bounds, "table", lambda: {recipe: {**rows, other: wide}})
    assert calibrated_bounds.limits(recipe, kind, 4096) == own
    assert calibrated_bounds.limits(recipe, other, 4096).gain > own.gain
    monkeypatch.setattr(calibrated_bounds, "table", lambda: {recipe: {**rows, other: replace(wide, gain=0.0)}})
    assert calibrated_bounds.limits(recipe, other, 4096) == own
    rows.pop(other, None)
    monkeypatch.setattr(calibrated_bounds, "table", lambda: {recipe: rows})
    assert calibrated_bounds.limits(recipe, other, 4096) == own


def test_each_optimizer_needs_its_own_kinds():
    def kinds(**optim) -> set[str]:
        return calibrated_bounds.all_kinds(FULL.model_copy(update={"optim": OptimConfig(**optim)}))

    needed = {name: kinds(name=name) for name in ("adamw", "adamw8bit", "muon")}
    eight = {"adamw8bit/exp_avg", "adamw8bit/exp_avg_sq", "adamw8bit/update"}
    assert needed["adamw8bit"] - needed["adamw"] == eight
    library = kinds(name="adamw8bit", eight_bit="bitsandbytes")
    assert library - needed["adamw"] == {kind.replace("8bit/", "8bit_bnb/") for kind in eight}
    assert needed["muon"] - needed["adamw"] == {"muon/momentum_buffer", "muon/update"}
    single = kinds(name="muon", ns_dtype="fp32")
    assert single - needed["muon"] == {"muon/update_fp32"}
    assert needed["adamw"] <= needed["adamw8bit"] & needed["muon"]


def test_an_optimizer_that_was_never_measured_is_refused(monkeypatch):
    known = calibrated_bounds.all_kinds(FULL)
    monkeypatch.setattr(calibrated_bounds, "table", lambda: {"bf16/eager": dict.fromkeys(known)})
    config = tiny_config("bf16")
    calibrated_bounds.require(config)
    with pytest.raises(UserError, match=r"muon/momentum_buffer, muon/update"):
        calibrated_bounds.require(config.model_copy(update={"optim": OptimConfig(name="muon")}))


@pytest.mark.parametrize("head", ["liger", "cce"])
def test_a_library_s_head_that_was_never_measured_is_refused(head):
    config = tiny_config("bf16").model_copy(update={"loss": LossConfig(head=head)})
    with pytest.raises(UserError, match=rf"backward/{head}_head/weight, .* were measured"):
        calibrated_bounds.require(config)


def test_bitsandbytes_on_cuda_is_refused_and_on_the_cpu_measured():
    optim = OptimConfig(name="adamw8bit", eight_bit="bitsandbytes")
    config = tiny_config("bf16").model_copy(update={"optim": optim, "device": "cpu"})
    calibrated_bounds.require(config)
    with pytest.raises(UserError, match="CUDA's rounds otherwise"):
        calibrated_bounds.require(config.model_copy(update={"device": "cuda"}))


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "fp8_tensorwise", "fp8_rowwise"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_head_of_torch_was_measured_under_every_policy(policy, compiled):
    calibrated_bounds.require(
        tiny_config(policy, compiled=compiled).model_copy(update={"loss": LossConfig(head="torch")})
    )


@pytest.mark.parametrize("kind, margin", [("gradients/matrices", 5.0), ("forward/attn", 2.0), ("backward/attn/k", 2.0)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_bound_is_the_clean_extreme_with_its_margin(recipe, kind, margin):
    clean = calibrated_bounds.table()[recipe][kind]
    excess, gain, distance = calibrated_bounds.measures(recipe, kind, distances(), 10**9)[:3]
    least_excess, least_distance = calibrated_bounds.least(recipe, kind)
    reached = math.exp(clean.log_excess)
    high = max(reached * margin if margin == 5.0 else reached**margin, least_excess)
    gain_bound = max(margin * clean.gain, calibrated_bounds.LEAST_GAIN, distance.high / 2 if margin == 2.0 else 0.0)
    assert excess.high == pytest.approx(high)
    assert excess.low == (pytest.approx(1 / high) if calibrated_bounds.too_good(recipe, kind) else None)
    assert gain.high == -gain.low == pytest.approx(gain_bound * 1e-3)
    due = max(margin * clean.distance, least_distance)
    if clean.sharp is not None:
        due = min(due, peak_bounds.distance_limit(clean.sharp, calibrated_bounds.result_of(recipe, kind)))
    assert distance.high == pytest.approx(due)


def test_few_numbers_have_a_wider_band():
    assert scatter(10**9) == pytest.approx(1.0)
    assert scatter(SCATTER_SIZE) == pytest.approx(math.sqrt(2))
    few, many = (calibrated_bounds.measures("bf16/eager", "update", distances(), n) for n in (8, 10**6))
    assert all(a.high > 5 * b.high for a, b in zip(few[1:], many[1:], strict=True))
    assert few[0].high == pytest.approx(many[0].high ** (scatter(8) / scatter(10**6)))


@pytest.mark.parametrize("wrong", [{"excess": 500.0}, {"gain": 0.2}, {"gain": -0.2}, {"distance": 1e4}])
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_measure_alone_can_break(recipe, wrong):
    assert all(m.ok for m in calibrated_bounds.measures(recipe, "gradients/matrices", distances(), 10**6))
    assert (
        sum(not m.ok for m in calibrated_bounds.measures(recipe, "gradients/matrices", distances(**wrong), 10**6)) >= 1
    )


def test_a_narrow_matrix_counts_as_few_numbers():
    assert calibrated_bounds.independent((8, 4096)) == calibrated_bounds.independent((4096, 8)) == 128
    assert calibrated_bounds.independent((2, 3)) == 6
    assert calibrated_bounds.independent((4096,)) == 4096
    assert calibrated_bounds.independent((2, 64, 8)) == 1024


def test_fp64_is_held_to_a_relative_error():
    (measure,) = calibrated_bounds.measures("fp64/eager", "gradients/qk", distances(relative=9e-13), 100)
    assert measure.ok
    (measure,) = calibrated_bounds.measures("fp64/compiled", "gradients/qk", distances(relative=1.1e-12), 100)
    assert not measure.ok


def test_fp32_gradients_are_held_to_a_relative_error_too():
    by_name = {
        m.name: m
        for m in calibrated_bounds.measures("fp32/eager", "gradients/matrices", distances(relative=1e-7), 10**6)
    }
    assert by_name["relative_error"].high == pytest.approx(calibrated_bounds.FP32_LIMIT)
    assert by_name["excess"].high == pytest.approx(calibrated_bounds.FP32_LIMIT / 1e-7)


def test_a_recipe_that_was_never_measured_is_refused():
    with pytest.raises(UserError, match=r"scripts\.studies\.calibrate"):
        calibrated_bounds.measures("fp8/eager", "nll", distances(), 100)


def test_a_token_that_outweighs_the_rest_counts_alone():
    """A tap's gradient after a norm of a token with a small RMS: its few errors decide every ratio."""
    rng = np.random.default_rng(0)
    tap = rng.standard_normal((2, 64, 32))
    assert calibrated_bounds.carriers(tap) == pytest.approx(16 * 128, rel=0.2)
    tap[1, 5] *= 1e3
    assert calibrated_bounds.carriers(tap) == 16
    matrix = rng.standard_normal((96, 64))
    assert 16 * 50 < calibrated_bounds.carriers(matrix) <= calibrated_bounds.independent((96, 64)) == 1024
    matrix[:, 3] *= 1e3
    assert calibrated_bounds.carriers(matrix) == 16
    assert calibrated_bounds.carriers(np.ones(4096)) == 4096
    assert calibrated_bounds.carriers(np.zeros((4, 8, 16))) == 16 * 32
    assert calibrated_bounds.carriers(np.full((4, 8, 16), np.nan)) == 16 * 32


@pytest.mark.parametrize("terms", [640, 4096, 16384])
def test_the_noise_of_a_sum_one_after_another(terms):
    """How far torch.compile's sums over tokens on the CPU may be from sums in pairs: measured against the formula."""
    x = np.random.default_rng(terms).standard_normal((256, terms)).astype(np.float32)
    due = x.sum(1, dtype=np.float64)
    one_after_another, in_pairs = np.cumsum(x, axis=1, dtype=np.float32)[:, -1], x.copy()
    while in_pairs.shape[1] > 1:
        in_pairs = in_pairs[:, ::2] + np.pad(in_pairs[:, 1::2], ((0, 0), (0, in_pairs.shape[1] % 2)))
    ratio = np.linalg.norm(one_after_another - due) / np.linalg.norm(in_pairs[:, 0] - due)
    assert calibrated_bounds.noise_margin(terms) / 2 < ratio < 2 * calibrated_bounds.noise_margin(terms)
    assert calibrated_bounds.noise_margin(1) == calibrated_bounds.noise_margin(2) == calibrated_bounds.NOISE_MARGIN


def test_tokens_of_one_prediction_count_once():
    """A sequence of one letter has one prediction, and a ratio of its gradients' errors is that of two draws."""
    weights = np.ones((2, 8), np.float32)
    batch = Batch(np.zeros((2, 8), np.int32), np.zeros((2, 8), np.int32), weights)
    assert errors_of_loss(np.full((2, 8), 0.6427, np.float32), batch) == 16
    assert errors_of_loss(np.linspace(2.0, 2.5, 16).reshape(2, 8), batch) > 15 * 16
    confident = np.full((2, 8), 1e-6)
    confident[0, 0] = 3.0
    assert errors_of_loss(confident, batch) == 16
    weights[:] = 0.0
    weights[1, 1] = 1.0
    assert errors_of_loss(np.linspace(2.0, 2.5, 16).reshape(2, 8), batch) == 16


def test_energies_beyond_the_root_of_fp64_are_counted_as_others() -> None:
    """Gradients of 1e80 have energies whose squares FP64 does not hold."""
    energy = np.array([1.0, 2.0, 3.0, 0.5])
    assert calibrated_bounds.participation(energy * 2.0**600) == calibrated_bounds.participation(energy) == 3
    assert calibrated_bounds.participation(np.array([np.inf, 1.0])) == 2
    assert calibrated_bounds.participation(np.zeros(3)) == 3
