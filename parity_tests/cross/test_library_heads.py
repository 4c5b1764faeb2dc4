"""Loss heads of libraries: equal to Lockstep's own within their declared casts, which the twin mirrors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lockstep.core.config.schema import LossConfig
from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.judge.own_step import OWN as OWN_WEIGHTS
from lockstep.core.parity.reference.self_check import check_reference
from lockstep.jax_backend.backend import JaxBackend
from lockstep.jax_backend.kernels.library_heads import library_nll
from lockstep.jax_backend.precision import POLICIES as TWIN
from lockstep.parity_tests.faults import levers
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.kernels import library_heads
from lockstep.torch_backend.kernels.library_heads import check_head, library_loss
from lockstep.torch_backend.precision import POLICIES

pytestmark = pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="the head is of torch 2.13")

UNIT = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
TOKENS, VOCABULARY, WIDTH = 96, 61, 16


def with_head(config, head="torch", **loss):
    return config.model_copy(update={"loss": LossConfig(head=head, **loss)})


def inputs():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, TOKENS // 2, WIDTH), np.float32)
    weight = rng.standard_normal((VOCABULARY, WIDTH), np.float32)
    targets = rng.integers(VOCABULARY, size=(2, TOKENS // 2)).astype(np.int64)
    weights = np.where(rng.random(targets.shape) < 0.3, 0, 1).astype(np.float32)
    return x, weight, targets, weights


def of_torch(policy, chunk):
    x, weight, targets, weights = map(torch.tensor, inputs())
    x, weight = (t.to(POLICIES[policy].stream).requires_grad_() for t in (x, weight))
    total, settings = weights.double().sum(), LossConfig(head="torch", chunk=chunk)
    loss, nll = library_loss(x, weight, targets, weights, total, POLICIES[policy], settings, lambda _, value: value)
    return nll.detach().numpy(), *(g.numpy() for g in torch.autograd.grad(loss, (x, weight)))


def of_twin(policy, chunk):
    x, weight, targets, weights = inputs()
    stream, settings = TWIN[policy].stream, LossConfig(head="torch", chunk=chunk)

    def nll(x, weight):
        return library_nll(x, weight, jnp.asarray(targets), TWIN[policy], settings)

    @jax.jit
    def with_gradients(x, weight, shares):
        found, back = jax.vjp(nll, x, weight)
        return found, *back(shares)

    shares = weights.astype(np.float64) / weights.sum(dtype=np.float64)
    return tuple(map(np.asarray, with_gradients(*(jnp.asarray(a, stream) for a in (x, weight, shares)))))


def apart(one, other):
    wide = other.astype(np.float64)
    return np.linalg.norm(one - wide) / np.linalg.norm(wide)


@pytest.mark.parametrize("chunk", [1, 7, 32, TOKENS, 4096])
@pytest.mark.parametrize("policy", ["fp64", "fp32", "bf16", "fp16"])
def test_the_twin_has_torch_s_roundings(policy, chunk):
    """Some FP32 roundings of other sums move a few numbers at a tie; every other cast is the same."""
    close = 30 * UNIT["fp64" if policy == "fp64" else "fp32"]
    for ours, theirs in zip(of_torch(policy, chunk), of_twin(policy, chunk), strict=True):
        assert apart(ours, theirs) < (close if policy in ("fp64", "fp32") else UNIT[policy] / 20)


def test_more_chunks_are_more_roundings():
    """Torch's head adds its chunks up in the operand dtype, as documented."""
    exact = of_torch("fp64", TOKENS)[2]
    errors = [apart(of_torch("bf16", chunk)[2], exact) for chunk in (TOKENS, 8, 1)]
    assert errors[0] < errors[1] < errors[2]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("policy", ["fp64", "fp32", "bf16", "fp16"])
def test_it_is_the_whole_head_within_the_policy_s_rounding(policy, tied):
    config = tiny_config(policy, layers=1, vocab_size=259, tied=tied, train={"sequence_length": 32})
    batch = uneven_weights(text_batch(config), 1)
    whole, other = (TorchBackend().open(with_head(config, head)).gradients(batch) for head in ("full", "torch"))
    assert apart(other.nll, whole.nll) < 2 * UNIT[policy]
    # Two roundings of a narrow product, and their way through one block; else sums of some hundred terms.
    roundings = 6 if policy in ("bf16", "fp16") else 40
    for name, gradient in whole.grads.items():
        assert apart(other.grads[name], gradient) < roundings * UNIT[policy], name


@pytest.mark.parametrize(
    ("compiled", "casts"), [(False, "lockstep"), (True, "lockstep"), (False, "residual=bf16, norm=bf16")]
)
def test_a_check_of_it_agrees(compiled, casts):
    config = with_head(tiny_config("bf16", compiled=compiled), chunk=50)
    config = config.model_copy(update={"precision": config.precision.model_copy(update={"casts": casts})})
    evidence = gather(TorchBackend().open(config), config, uneven_weights(text_batch(config), 0))
    check = judge(evidence, Reference.open(JaxBackend(), config))
    assert check.verdict == "agreed", check.origin
    judged = {(f.phase, f.tap) for f in check.findings if f.stage == "torch_head" and f.scope == "local"}
    assert judged == {("forward", "nll"), ("backward", "final_norm"), ("backward", "logits.weight")}
    # The step's NLL is held to that of other loss weights, and no stage of whole logits is judged.
    assert {(f.stage, f.note) for f in check.findings if f.stage in ("logits", "nll")} <= {("nll", OWN_WEIGHTS)}


def test_shares_that_are_rounded_are_found():
    """Without the scaling every gradient is off by the rounding of 1 / tokens."""
    config = with_head(tiny_config("bf16"))
    session = levers.LibraryHeadGetsRoundedShares().open(config)
    evidence = gather(session, config, uneven_weights(text_batch(config), 0))
    origin = judge(evidence, Reference.open(JaxBackend(), config)).origin
    assert origin is not None
    assert (origin.stage, origin.phase) == ("torch_head", "backward")


@pytest.mark.parametrize("policy", ["bf16", "fp32"])
def test_the_reference_is_judged_with_it(policy):
    check = check_reference(JaxBackend(), with_head(tiny_config(policy)))
    assert not check.wrong and not check.not_covered
    assert {"forward", "backward"} <= {f.phase for f in check.findings if f.stage == "torch_head"}


def test_a_model_with_a_head_of_its_own_keeps_it():
    class Backend(TorchBackend):
        class session_class(TorchBackend.session_class):
            def build_model(self):
                model = super().build_model()
                model.nll = lambda logits, targets: type(model).nll(model, logits, targets)
                return model

    config = with_head(tiny_config("bf16"))
    session = Backend().open(config)
    assert session.model.fused_loss is None
    assert "logits" in session.observe(text_batch(config), ["logits"])


def test_a_batch_without_any_weight_has_gradients_of_zero():
    x, weight, targets, _ = map(torch.tensor, inputs())
    x, weight = x.requires_grad_(), weight.requires_grad_()
    nothing, total = torch.zeros(targets.shape), torch.tensor(8.0, dtype=torch.float64)
    settings = LossConfig(head="torch")
    loss, _ = library_loss(x, weight, targets, nothing, total, POLICIES["bf16"], settings, lambda _, value: value)
    grads = torch.autograd.grad(loss, (x, weight))
    assert loss.item() == 0
    assert all(not grad.any() for grad in grads)


@pytest.mark.parametrize(
    "head, interpreted, said",
    [
        ("liger", "", "loss.head = 'liger' is made of Triton kernels and needs CUDA; take 'chunked'"),
        ("cce", "1", "loss.head = 'cce' is made of Triton kernels and needs CUDA; take 'chunked'"),
        ("liger", "1", "loss.head = 'liger' needs liger-kernel: pip install 'lockstep[liger]'"),
    ],
)
def test_a_head_that_cannot_run_here_says_why(monkeypatch, head, interpreted, said):
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    monkeypatch.setattr(library_heads, "find_spec", lambda name: None)
    with pytest.raises(UserError) as error:
        check_head(LossConfig(head=head), torch.device("cpu"))
    assert str(error.value) == said


def test_an_older_torch_is_refused(monkeypatch):
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions")
    with pytest.raises(UserError, match=r"needs torch 2\.13"):
        check_head(LossConfig(head="torch"), torch.device("cpu"))


def test_both_backends_run_it_as_a_stage():
    config = with_head(tiny_config("bf16", vocab_size=VOCABULARY, hidden=WIDTH, heads=2, kv_heads=1), chunk=20)
    x, weight, targets, weights = inputs()
    arrays = {"x": x, "weight": weight, "targets": targets, "grad": weights / weights.sum(dtype=np.float32)}
    ours, theirs = (b.open(config).run_stage("torch_head", arrays) for b in (TorchBackend(), JaxBackend()))
    assert ours.keys() == theirs.keys() == {"out", "grad/x", "grad/weight"}
    for name, value in ours.items():
        assert apart(value, theirs[name]) < UNIT["bf16"] / 20
