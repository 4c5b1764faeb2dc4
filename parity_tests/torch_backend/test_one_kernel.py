"""The head's Triton kernels, interpreted: within the bounds of the FP64 path, and nothing is read that is overwritten.

The interpreter shows every number. It shows no race between the threads of a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from lockstep.core.config.schema import CompileConfig, LossConfig
from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.measures.calibrated_bounds import measures
from lockstep.core.parity.measures.distances import distances
from lockstep.core.parity.modes.side_by_side import check_steps
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.parity_tests.torch_backend.interpreted import SOURCE, interpreted
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.kernels import one_kernel
from lockstep.torch_backend.kernels.library_heads import check_head
from lockstep.torch_backend.loss import logits_gradient, losses_and_logsumexp

INTERPRET = "TRITON_INTERPRET"
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None or not os.environ.get(INTERPRET),
    reason="needs Triton (pip install triton), imported under TRITON_INTERPRET=1",
)
ROWS, BLOCK = 8, 64


@pytest.fixture(params=["held", "again"])
def kernel(request, monkeypatch):
    """Choose the kernel that reads a row once, or the one that reads it twice, BLOCK columns at a time."""
    monkeypatch.setattr(one_kernel, "AT_A_TIME", BLOCK)
    if request.param == "again":
        monkeypatch.setattr(one_kernel, "HELD", 0)


def normal(V, scale=1.0, rows=ROWS):
    return scale * torch.randn(rows, V, generator=torch.Generator().manual_seed(V))


def peaked(V, lead):
    """Set the target's logit `lead` above the largest other one in every second row, and below it in the others."""
    x = normal(V)
    x[::2, 3], x[1::2, 5] = x[::2].amax(-1) + lead, x[1::2].amax(-1) + lead
    return x


def certain(V, lead):
    """Every target's logit `lead` above all others: losses of V · e^(−lead)."""
    x = normal(V)
    x[torch.arange(ROWS), drawn(x)[0]] = x.amax(-1) + lead
    return x


def masked(V):
    """Logits of −inf, as of tokens that must not be chosen: a whole block of them first, and single ones."""
    x = normal(V)
    x[:, 4:BLOCK] = x[:, ::7] = -torch.inf
    x[:, 3] = 0.5
    return x


def drawn(x):
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(x.shape[1], (len(x),), generator=generator)
    targets[::2] = min(3, x.shape[1] - 1)
    if torch.isinf(x).any():
        targets[:] = 3
    return targets, torch.rand(len(x), generator=generator) / len(x)


LOGITS = {
    "normal": normal(259),
    "multiple of the block": normal(256),
    "one more than a multiple": normal(257),
    "fewer than a block": normal(5),
    "wide": normal(1000, 10.0),
    "one row": normal(300, rows=1),
    "confident": certain(259, 12.0),
    "confident or wrong": peaked(259, 20.0),
    "nearly certain or wrong": peaked(259, 60.0),
    "extreme": 88 * normal(259).sign(),
    "one-hot": 88 * torch.nn.functional.one_hot(torch.arange(ROWS), 259).float(),
    "all equal": torch.full((ROWS, 259), 7.25),
    "far from zero": normal(259) - 5e4,
    "masked": masked(259),
    "bf16": normal(259, 3.0).bfloat16(),
}


def of_kernel(x, targets, shares, z_loss=0.0):
    return one_kernel.losses_and_shown_gradient(x, targets, shares, z_loss)


def of_fp64_path(x, targets, shares, z_loss=0.0):
    losses, logsumexp = losses_and_logsumexp(x, targets, z_loss)
    return losses, logits_gradient(x, targets, logsumexp, shares, z_loss)


def disagreements(x, z_loss=0.0):
    """Return the measures that are out of bounds: a local comparison, the FP64 path as the twin, FP64 as the truth."""
    targets, shares = drawn(x)
    ours, twin = of_kernel(x, targets, shares, z_loss), of_fp64_path(x, targets, shares, z_loss)
    truth = of_fp64_path(x.double(), targets, shares.double(), z_loss)
    found = []
    for kind, c, w, t in zip(("forward/nll", "backward/nll/logits"), ours, twin, truth, strict=True):
        d = distances(*(a.double().numpy() for a in (c, w, t)), np.float32)
        found += [(kind, m) for recipe in ("fp32/eager", "bf16/compiled") for m in measures(recipe, kind, d, t.numel())]
    return [(kind, measure) for kind, measure in found if not measure.ok]


@needs_triton
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("name", LOGITS)
def test_losses_and_gradients_are_within_the_bounds(name, z_loss, kernel):
    with interpreted():
        assert not disagreements(LOGITS[name], z_loss)


@needs_triton
def test_so_are_those_of_a_real_vocabulary():
    with interpreted():
        assert one_kernel.readings(50_257, torch.device("cpu")) == 2
        assert not disagreements(normal(50_257, 3.0))


def ulps(x):
    """Return the largest error of a single loss or gradient in ulp of its own size, against FP64.

    A norm is made of the largest numbers: that of a confident token's loss, or of an unlikely token's gradient, hides.
    """
    targets, shares = drawn(x)
    truth = of_fp64_path(x.double(), targets, shares.double())
    found = zip(of_kernel(x, targets, shares), truth, strict=True)
    return max(float(((ours.double() - due) / due)[due.abs() > 1e-30].abs().max()) for ours, due in found) * 2**23


@needs_triton
@pytest.mark.parametrize("name", ["normal", "wide", "confident"])
def test_single_losses_and_gradients_are_right_to_two_ulp(name, kernel):
    with interpreted():
        assert ulps(LOGITS[name]) < 2


@needs_triton
@pytest.mark.parametrize("operand", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["normal", "multiple of the block", "one more than a multiple", "one row"])
def test_the_gradient_takes_the_logits_memory(name, operand, kernel):
    """The same numbers as in memory of its own, rounded once: no logit is overwritten before it is read."""
    x = LOGITS[name].clone()
    targets, shares = drawn(x)
    with interpreted():
        losses, grad = of_kernel(x, targets, shares)
        again, narrow = one_kernel.losses_and_gradient(x, targets, shares, 0.0, operand)
    assert torch.equal(losses, again) and torch.equal(grad.to(operand), narrow)
    assert narrow.data_ptr() == x.data_ptr() and narrow.dtype == operand


@needs_triton
def test_logits_in_bf16_are_overwritten_in_bf16(kernel):
    x = LOGITS["bf16"].clone()
    targets, shares = drawn(x)
    with interpreted():
        losses, grad = of_kernel(x, targets, shares)
        again, narrow = one_kernel.losses_and_gradient(x, targets, shares, 0.0, torch.bfloat16)
    assert torch.equal(losses, again) and torch.equal(grad, narrow) and losses.dtype == torch.float32


@needs_triton
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_spoils_its_row_alone(value, kernel):
    x = normal(259)
    x[2, 100] = value
    targets, shares = drawn(x)
    with interpreted():
        losses, grad = of_kernel(x, targets, shares)
    spoiled = torch.arange(ROWS) == 2
    assert torch.equal(losses.isnan(), spoiled) and torch.equal(grad.isnan().all(-1), spoiled)
    assert not grad[~spoiled].isnan().any()


@needs_triton
def test_a_token_without_weight_has_no_gradient(kernel):
    x = normal(259)
    targets, shares = drawn(x)
    shares[::3] = 0.0
    with interpreted():
        _, grad = of_kernel(x, targets, shares)
    assert torch.equal(grad.any(-1), shares > 0)


# A piece of the kernels' source → the fault in its place.
FAULTS = {
    "the maximum is not subtracted": ("x.to(tl.float64) - largest", "x.to(tl.float64)"),
    "the last block is not masked": ('other=float("-inf")', "other=0.0"),
    "the sum is FP32, one after another": (
        "tl.sum(exponentials.to(tl.float64), 0)",
        "tl.max(tl.cumsum(exponentials, 0), 0).to(tl.float64)",
    ),
    "the difference is FP32": ("x.to(tl.float64) - largest)", "(x - largest.to(tl.float32)).to(tl.float64))"),
    "the sum is not scaled to a larger maximum": ("total * tl.exp(before - largest)", "total"),
    "the series lacks its last term": ("series = 1.0 + r * (1 / 7)", "series = 1.0"),
    "no target": ("tl.where(is_target, 1.0, 0.0)", "0.0"),
    "the share is left out": (") * share)", "))"),
    "z-loss without its gradient": ("(1.0 + 2.0 * Z_LOSS * logsumexp)", "1.0"),
}


def with_fault(folder, name):
    """Write the kernels' file with a fault in it."""
    piece, wrong = FAULTS[name]
    source = SOURCE.read_text()
    assert piece in source
    file = folder / "wrong.py"
    file.write_text(source.replace(piece, wrong))
    return file


def wrong(names):
    """Return the names of the logits with which a test above fails."""
    return [n for n in names if disagreements(LOGITS[n]) or disagreements(LOGITS[n], 1e-2) or not ulps(LOGITS[n]) < 2]


@needs_triton
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch, tmp_path):
    monkeypatch.setattr(one_kernel, "AT_A_TIME", BLOCK)
    names, caught = ("normal", "wide", "confident"), []
    with interpreted(with_fault(tmp_path, fault)), np.errstate(all="ignore"):
        for held in (one_kernel.HELD, 0):
            monkeypatch.setattr(one_kernel, "HELD", held)
            caught += wrong(names)
    assert caught


def steps(policy):
    config = tiny_config(policy, layers=1, train={"sequence_length": 32})
    config = config.model_copy(update={"loss": LossConfig(head="one_kernel", chunk=24)})
    batches = [uneven_weights(text_batch(config, step), 1) for step in range(2)]
    return list(check_steps(TorchBackend(), JaxBackend(), config, iter(batches)))


@needs_triton
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_two_steps_agree_with_jax(policy):
    with interpreted():
        assert [check.verdict for check in steps(policy)] == ["agreed", "agreed"]


@needs_triton
@pytest.mark.parametrize("fault", ["the last block is not masked", "no target", "the share is left out"])
def test_a_step_with_a_planted_fault_does_not(fault, tmp_path):
    with interpreted(with_fault(tmp_path, fault)):
        first, *_ = steps("bf16")
    assert first.verdict == "disagreed"


@needs_triton
def test_a_compiled_step_calls_the_kernels(monkeypatch):
    launch, launched = one_kernel._launch, []
    monkeypatch.setattr(one_kernel, "_launch", lambda *arguments: (launched.append(1), launch(*arguments)))
    config = tiny_config("bf16", layers=1, train={"sequence_length": 32})
    compiled = config.compile.model_copy(update={"enabled": True})
    config = config.model_copy(update={"loss": LossConfig(head="one_kernel", chunk=24), "compile": compiled})
    batch = uneven_weights(text_batch(config), 1)
    with interpreted():
        found = TorchBackend().open(config).gradients(batch)
        assert launched
        eager = TorchBackend().open(config.model_copy(update={"compile": CompileConfig(enabled=False)}))
        assert found.loss == pytest.approx(eager.gradients(batch).loss, rel=1e-6)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: pip install triton")
@pytest.mark.skipif(bool(os.environ.get(INTERPRET)), reason="is such a process")
def test_they_pass_in_a_process_that_interprets():
    """Triton decides it when it is imported, which other tests of this process may have done."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env={**os.environ, INTERPRET: "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_nothing_imports_triton_before_a_kernel_is_launched():
    assert "lockstep.torch_backend.kernels.one_kernel_triton" not in sys.modules


@pytest.mark.parametrize(
    "device, found, interpret, said",
    [
        ("cpu", True, "", "is made of Triton kernels and needs CUDA; take 'chunked'"),
        ("cpu", True, "1", None),
        ("cuda", True, "", None),
        ("cuda", False, "", "needs Triton; take 'chunked'"),
    ],
)
def test_where_it_cannot_run_it_is_refused(monkeypatch, device, found, interpret, said):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    monkeypatch.setattr(one_kernel, "find_spec", lambda name: found or None)
    if said is None:
        check_head(LossConfig(head="one_kernel"), torch.device(device))
        return
    with pytest.raises(UserError) as error:
        check_head(LossConfig(head="one_kernel"), torch.device(device))
    assert str(error.value) == f"loss.head = 'one_kernel' {said}"


@pytest.mark.parametrize(
    "capability, triton, vocabulary, readings",
    [
        ((9, 0), "3.8.0", 131_072, 1),
        ((9, 0), "3.8.0", 131_073, 2),
        ((9, 0), "3.6.0", 131_072, 2),
        ((8, 0), "3.9.0", 50_257, 2),
        ((8, 0), "3.6.0", 16_384, 1),
        ((12, 0), "3.10.1", 50_257, 1),
    ],
)
def test_a_row_is_read_once_where_a_cluster_holds_it(monkeypatch, capability, triton, vocabulary, readings):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(one_kernel, "version", lambda package: triton)
    assert one_kernel.readings(vocabulary, torch.device("cuda")) == readings
