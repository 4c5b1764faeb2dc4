"""Parameters and FLOPs against closed forms and the published figures."""

import pytest

from lockstep.core.config.schema import (
    AttentionConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RecomputeConfig,
    RunConfig,
    TrainConfig,
)
from lockstep.core.errors import UserError
from lockstep.core.model.budget import (
    PEAK_FLOPS,
    floor_seconds,
    flops_per_token,
    forward_products,
    hfu,
    mfu,
    optimizer_bytes,
    parameter_count,
    parameter_count_by_group,
    peak_flops,
    recomputed_flops_per_token,
    require_memory,
    state_bytes,
    update_flops,
)

ONE_B = ModelConfig(vocab_size=131_072, hidden=2048, layers=16, heads=32, kv_heads=8, ffn_hidden=8192)
H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_count_against_the_closed_form(tied, qkv_bias):
    v, d, layers, h, k, f = 96, 32, 3, 4, 2, 80
    model = ModelConfig(
        vocab_size=v, hidden=d, layers=layers, heads=h, kv_heads=k, ffn_hidden=f, tied=tied, qkv_bias=qkv_bias
    )
    kv = d * k // h
    block = 2 * d * d + 2 * d * kv + 3 * d * f + 2 * d + qkv_bias * (d + 2 * kv)
    assert parameter_count(model) == v * d * (1 if tied else 2) + layers * block + d


def test_groups_sum_to_the_whole():
    groups = parameter_count_by_group(ONE_B)
    assert sum(groups.values()) == parameter_count(ONE_B) == 1_241_581_568
    assert groups["embedding"] == 131_072 * 2048
    assert groups["gains"] == 33 * 2048
    assert "head" not in groups and "biases" not in groups
    untied = parameter_count_by_group(ONE_B.model_copy(update={"tied": False}))
    assert untied["head"] == untied["embedding"]


def test_flops_a_token_are_the_published_ones():
    flops = flops_per_token(ONE_B, 2048)
    assert [round(flops[kind] / 1e9, 3) for kind in ("6N", "causal", "full")] == [7.449, 7.852, 8.255]
    assert flops["full"] - flops["6N"] == 2 * (flops["causal"] - flops["6N"]) == 12 * 16 * 2048 * 2048


def test_mfu_of_the_published_run():
    """400k tokens/s on 8 H100 are 37.6 % of the dense peak; "18 %" was against the sparse one and another count."""
    shares = mfu(ONE_B, 2048, 400e3 / 8, H100, "bf16")
    assert round(shares["6N"], 3) == 0.376
    assert shares["6N"] < shares["causal"] < shares["full"]


def test_an_unknown_peak_gives_no_figure():
    assert mfu(ONE_B, 2048, 1e4, "Some CPU", "bf16") == {}
    assert mfu(ONE_B, 2048, 1e4, H100, "int4") == {}


def test_peaks_are_dense():
    """FP8's dense peak is twice bf16's; "1979" for bf16 is the sparse figure."""
    for peaks in PEAK_FLOPS.values():
        assert max(peak for precision, peak in peaks.items() if precision != "fp8") < 1000e12
        assert peaks["fp8"] / peaks["bf16"] == pytest.approx(2, rel=1e-3)


def test_a_policy_is_held_against_its_own_peak():
    assert peak_flops(H100, "bf16") == ("bf16", 989.4e12) == peak_flops(H100, "fp16")
    assert peak_flops(H100, "fp8_tensorwise") == ("fp8", 1978.9e12) == peak_flops("NVIDIA H200", "fp8_rowwise")
    assert peak_flops("NVIDIA H100 PCIe", "fp8_rowwise") == ("fp8", 1513e12)
    assert peak_flops(H100, "tf32") == ("tf32", 494.7e12)
    assert peak_flops("Some CPU", "bf16") is None
    assert mfu(ONE_B, 2048, 5e4, H100, "fp8_rowwise")["6N"] * 1978.9 == pytest.approx(
        mfu(ONE_B, 2048, 5e4, H100, "bf16")["6N"] * 989.4
    )


def run(model=ONE_B, batch=16, length=2048, **sections):
    return RunConfig(
        model=model, train=TrainConfig(batch_size=batch, micro_batch_size=batch, sequence_length=length), **sections
    )


# By hand for the 1.24B model: 2·2048² = 8.389M FLOPs for q and o each, a quarter of that for k and v each;
# 2·2048·8192 = 33.554M for gate, up and down each; causal attention 2·2048·2048 = 8.389M; 16 layers.
Q, GATE, SCORES = 2 * 2048**2, 2 * 2048 * 8192, 2 * 2048**2
AGAIN = [
    ("", 1, False, "auto", 0, 0),
    ("embedding", 1, False, "auto", 0, 0),
    ("norms", 1, False, "auto", 0, 0),
    ("attention", 1, False, "auto", 16 * 1.5 * Q, 16),
    ("mlp", 1, False, "auto", 16 * 2 * GATE, 0),
    ("attention,mlp", 1, False, "auto", 16 * (1.5 * Q + 2 * GATE), 16),
    ("block", 1, False, "auto", 16 * (2.5 * Q + 2 * GATE), 16),
    ("block", 2, False, "auto", 8 * (2.5 * Q + 2 * GATE), 8),
    ("block", 3, False, "auto", 5 * (2.5 * Q + 2 * GATE), 5),
    ("block", 1, True, "auto", 0, 0),
    ("block", 1, True, "flex", 0, 16),
    ("mlp", 1, True, "fa3", 0, 0),
]


@pytest.mark.parametrize(("parts", "every", "keep", "kernel", "linears", "attentions"), AGAIN)
def test_what_is_computed_again_by_hand(parts, every, keep, kernel, linears, attentions):
    recompute = RecomputeConfig(parts=parts, every=every, keep_products=keep)
    config = run(recompute=recompute, attention=AttentionConfig(kernel=kernel))
    assert recomputed_flops_per_token(config) == {
        "6N": linears,
        "causal": linears + attentions * SCORES,
        "full": linears + 2 * attentions * SCORES,
    }


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("parts", ["embedding", "norms", "attention", "mlp", "attention,mlp", "block"])
def test_what_is_computed_again_is_what_torch_counts(parts, every):
    """Torch counts the products of a step as they are dispatched; written-out attention computes all positions."""
    from torch.utils.flop_counter import FlopCounterMode

    from lockstep.parity_tests.tiny import text_batch, tiny_config
    from lockstep.torch_backend.backend import TorchBackend

    def counted(recompute):
        sections = {"recompute": recompute, "attention": AttentionConfig(kernel="math"), "device": "cpu"}
        config = tiny_config("fp32").model_copy(update={**sections, "loss": LossConfig(head="full")})
        # torch does not count oneDNN's.
        products = config.precision.model_copy(update={"cpu_products": "blas"})
        config = config.model_copy(update={"precision": products})
        session, batch = TorchBackend().open(config), text_batch(config)
        with FlopCounterMode(display=False) as counter:
            session.gradients(batch)
        return config, counter.get_total_flops() / batch.tokens.size

    plain, none = counted(RecomputeConfig())
    config, some = counted(RecomputeConfig(parts=parts, every=every))
    again = recomputed_flops_per_token(config)
    assert again is not None and some - none == again["full"]
    products = forward_products(plain.model, plain.train.sequence_length)
    of_scores = sum(value for name, value in products.items() if name.endswith(".attn.out"))
    assert none == 3 * (sum(products.values()) + of_scores)


def test_hfu_counts_what_is_computed_again():
    config = run(recompute=RecomputeConfig(parts="block"))
    rate = 16 * 2048 / 0.6
    model, hardware = mfu(ONE_B, 2048, rate, H100, "bf16"), hfu(config, rate, H100)
    again = {"6N": 16 * (2.5 * Q + 2 * GATE), "causal": 16 * (3.5 * Q + 2 * GATE), "full": 16 * (4.5 * Q + 2 * GATE)}
    for kind, flops in again.items():
        assert (hardware[kind] - model[kind]) * 989.4e12 == pytest.approx(flops * rate)
    assert hfu(run(), rate, H100) == model
    assert hfu(run(), rate, "Some CPU") == {}
    assert hfu(run(recompute=RecomputeConfig(memory_budget=0.5)), rate, H100) == {}


def test_bytes_of_the_update():
    count = parameter_count(ONE_B)
    assert optimizer_bytes(run()) == 28 * count
    assert optimizer_bytes(run(precision=PrecisionConfig(policy="fp64"))) == 56 * count
    matrices = parameter_count_by_group(ONE_B)["matrices"]
    assert optimizer_bytes(run(optim=OptimConfig(name="muon"))) == 28 * count - 8 * matrices
    gains = parameter_count_by_group(ONE_B)["gains"]  # of 2048 numbers each: too small for 8 bits
    narrow = (12 + 4 * (1 + 4 / 256)) * (count - gains) + 28 * gains
    assert optimizer_bytes(run(optim=OptimConfig(name="adamw8bit"))) == pytest.approx(narrow)


def test_muon_s_products_by_hand():
    """One block of 32: q and o (32, 32), k and v (16, 32), gate, up and down (64, 32) either way."""
    model = ModelConfig(vocab_size=64, hidden=32, layers=1, heads=4, kv_heads=2, ffn_hidden=64)
    square, half, wide = (4 * r * r * c + 2 * r**3 for r, c in ((32, 32), (16, 32), (32, 64)))
    due = 5 * (2 * square + 2 * half + 3 * wide)
    assert update_flops(run(model, optim=OptimConfig(name="muon"))) == due
    assert update_flops(run(model)) == 0


def test_the_floor_by_hand():
    """[16, 2048] at 800 TFLOP/s and 2.5 TB/s: the norms' gains, of which 6N counts six FLOPs, have no products."""
    rates = {"bf16": 800e12, "fp8": 1500e12, "fp32": 50e12}
    tokens, count = 16 * 2048, parameter_count(ONE_B)
    moved = 28 * count / 2.5e12
    products = 6 * (count - 33 * 2048) + 6 * 16 * 2048 * 2048
    assert floor_seconds(run(), rates, 2.5e12) == pytest.approx(tokens * products / 800e12 + moved)
    linears = 6 * 16 * (2.5 * 2048**2 + 3 * 2048 * 8192)
    narrow = floor_seconds(run(precision=PrecisionConfig(policy="fp8_rowwise")), rates, 2.5e12)
    assert narrow == pytest.approx(tokens * ((products - linears) / 800e12 + linears / 1500e12) + moved)
    single = floor_seconds(run(precision=PrecisionConfig(policy="tf32")), rates, 2.5e12)
    assert single == pytest.approx(tokens * products / 50e12 + moved)
    assert floor_seconds(run(precision=PrecisionConfig(policy="fp16")), rates, 2.5e12) is None


def test_state_by_hand():
    count = parameter_count(ONE_B)
    assert state_bytes(run()) == 16 * count
    assert state_bytes(run(precision=PrecisionConfig(policy="fp64"))) == 32 * count
    matrices = parameter_count_by_group(ONE_B)["matrices"]
    assert state_bytes(run(optim=OptimConfig(name="muon"))) == 16 * count - 4 * matrices


@pytest.mark.parametrize(
    ("size", "value"), [("vocab_size", 2**40), ("hidden", 2**30), ("layers", 2000), ("ffn_hidden", 2**40)]
)
def test_a_model_larger_than_the_memory_is_refused_by_the_size_to_blame(size, value):
    model = ModelConfig(**{size: value})
    with pytest.raises(UserError, match=rf"^model\.{size} = {value}: [\d,]+ parameters take at least [\d,.]+ GiB, "):
        require_memory(run(model, device="cpu"), 2**30)
    require_memory(run(model, device="cpu"), 0)


def test_memory_counts_state_on_the_cpu_and_initial_weights_elsewhere():
    state = int(state_bytes(run()))
    require_memory(run(device="cpu"), state)
    with pytest.raises(UserError, match=r"^model\."):
        require_memory(run(device="cpu"), state - 1)
    require_memory(run(device="cuda"), state // 4)
    with pytest.raises(UserError, match=r"^model\."):
        require_memory(run(device="cuda"), state // 4 - 1)


def test_a_micro_batch_larger_than_the_memory_is_refused():
    with pytest.raises(UserError, match=r"^train\.micro_batch_size = 1099511627776: "):
        require_memory(run(ModelConfig(), batch=2**40, device="cpu"), 2**40)
    require_memory(run(ModelConfig(), batch=2**40, device="cuda"), 2**40)
