"""`deterministic = true`: torch's modes, what is refused and by which name, and that it changes no bit of what trains.

The test of a refused operation that ends the run, and is named, uses `put_`, which torch has no deterministic kernel
for on any device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep.torch_backend.model
from lockstep.core.config.schema import AttentionConfig, LossConfig, RunConfig
from lockstep.core.errors import UserError
from lockstep.parity_tests.cross.variants import same_bits
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.parity_tests.torch_backend.programs import GENERATED, TRACED, fresh_compiler, same_gradients, under
from lockstep.parity_tests.torch_backend.test_repeatable import generated_code
from lockstep.torch_backend.attention import BACKENDS, Kernel
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession
from lockstep.torch_backend.tools import deterministic
from lockstep.torch_backend.tools.deterministic import CUBLAS, NCCL, check_deterministic, refusal, switch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Turn the process's deterministic mode off before and after, with everything that is kept of it."""
    monkeypatch.setattr(deterministic, "_loose", False)
    for name in (CUBLAS, NCCL):
        monkeypatch.setenv(name, "")  # else what a test leaves there would stay
        monkeypatch.delenv(name)
    yield
    switch(tiny_config(), CPU)


def strict(policy: str = "bf16", ranks: int = 1, **changes) -> RunConfig:
    config = tiny_config(policy, layers=1, train={"sequence_length": 32, "ranks": ranks})
    return config.model_copy(update={"deterministic": True, **changes})


def test_the_mode_is_that_of_the_session():
    TorchSession(strict())
    assert torch.are_deterministic_algorithms_enabled() and torch._inductor.config.deterministic
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    TorchSession(tiny_config())
    assert not torch.are_deterministic_algorithms_enabled() and not torch._inductor.config.deterministic


def test_what_somebody_else_has_switched_on_stays_on():
    torch.use_deterministic_algorithms(True)
    try:
        TorchSession(tiny_config())
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_session_does_not_go_on_once_the_mode_is_off():
    session = TorchSession(strict())
    session.gradients(text_batch(session.config))
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.raises(UserError, match="was switched off"):
        session.step(text_batch(session.config))


# The environment


def test_the_environment_is_set_before_cuda_starts():
    check_deterministic(strict(), CUDA)
    assert os.environ[CUBLAS] == ":4096:8" and NCCL not in os.environ
    check_deterministic(strict(ranks=2), CUDA)
    assert os.environ[NCCL] == "Ring"
    check_deterministic(strict(ranks=2), CUDA)


def test_the_cpu_needs_none():
    check_deterministic(strict(ranks=2), CPU)
    assert CUBLAS not in os.environ and NCCL not in os.environ


@pytest.mark.parametrize(("name", "value"), [(CUBLAS, ":4096:2"), (NCCL, "Tree"), (NCCL, "NVLS")])
def test_another_value_is_refused(name, value):
    os.environ[name] = value
    with pytest.raises(UserError, match=rf"needs {name}=.* before CUDA starts, and it is {value}; start again"):
        check_deterministic(strict(ranks=2), CUDA)


def test_after_another_session_on_cuda_it_is_too_late():
    switch(tiny_config(), CUDA)
    with pytest.raises(UserError, match="and it is not set; start again with it"):
        check_deterministic(strict(), CUDA)


# Operations without a deterministic kernel


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention": AttentionConfig(kernel="cudnn")}, "attention.kernel = 'cudnn'.*take flash"),
        ({"attention": AttentionConfig(kernel="fa3")}, "attention.kernel = 'fa3'.*take flash"),
        ({"loss": LossConfig(head="cce")}, "loss.head = 'cce'.*take chunked"),
    ],
)
def test_what_is_known_is_refused_before_anything_starts(changes, said):
    with pytest.raises(UserError, match=f"^deterministic = true: {said}"):
        check_deterministic(strict(**changes), CUDA)
    assert CUBLAS not in os.environ
    check_deterministic(strict(**changes).model_copy(update={"deterministic": False}), CUDA)


@pytest.mark.parametrize("kernel", ["auto", "flash", "efficient", "math", "flex"])
@pytest.mark.parametrize("head", ["chunked", "full", "torch", "liger"])
def test_the_others_are_not(kernel, head):
    config = strict(attention=AttentionConfig(kernel=kernel), loss=LossConfig(head=head))
    assert refusal(config, "cuda") is None


def test_auto_does_not_count_on_cudnn():
    """Torch would leave it out in silence."""
    assert BACKENDS["cudnn"] in Kernel("auto").backends("cuda", torch.bfloat16)
    assert BACKENDS["cudnn"] not in Kernel("auto", deterministic=True).backends("cuda", torch.bfloat16)


def test_tuning_by_time_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"compile\.mode: max-autotune chooses kernels by measured time"):
        RunConfig(deterministic=True, compile={"mode": "max-autotune"})


class _Put(torch.autograd.Function):
    """The tensor as it is; on one of its ways it meets an operation without a deterministic kernel."""

    @staticmethod
    def forward(ctx, x, back):
        ctx.back = back
        return x.clone() if back else _put(x)

    @staticmethod
    def backward(ctx, *grads):
        return _put(grads[0]) if ctx.back else grads[0], None


def _put(x):
    return x.clone().put_(torch.zeros(1, dtype=torch.long), x.flatten()[:1])


class PutsForward(nn.Module):
    back = False

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs, **named):
        return _Put.apply(self.inner(*inputs, **named), self.back)


class PutsBackward(PutsForward):
    back = True


@pytest.mark.parametrize(
    ("wrapper", "where"),
    [
        (PutsForward, r"in the forward pass, after blocks\.0\.mlp\.down_proj"),
        (PutsBackward, r"in the backward pass, after the gradient of blocks\.0\.\w+"),
    ],
)
@pytest.mark.parametrize("program", [None, TRACED], ids=["eager", "aot_eager"])
def test_an_operation_is_refused_by_name_and_place(wrapper, where, program):
    config = strict() if program is None else under(strict(), program)

    class Session(TorchSession):
        def build_model(self):
            model = super().build_model()
            for block in model.blocks:
                block.mlp = wrapper(block.mlp)
            return model

        def _load_parameters(self, params):
            super()._load_parameters({name: params[name.replace("mlp.inner", "mlp")] for name in self.parameters})

    with fresh_compiler():
        session = Session(config)
        said = rf"^deterministic = true: put_ has no deterministic kernel on cpu in torch [\d.]+; it is used {where}$"
        with pytest.raises(UserError, match=said):
            session.gradients(text_batch(config))
    plain = Session(strict().model_copy(update={"deterministic": False}))
    plain.gradients(text_batch(config))


def test_what_inductor_would_add_atomically_it_does_not(monkeypatch):
    """As torch_backend/kernels/embedding.py has it anyway: an embedding that is left to the compiler."""
    monkeypatch.setattr(lockstep.torch_backend.model, "embedding", F.embedding)
    with fresh_compiler():
        torch.use_deterministic_algorithms(True)
        try:
            assert "atomic_add" not in generated_code()
        finally:
            torch.use_deterministic_algorithms(False)


# Its changes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"policy": "fp8_tensorwise"},
        {"policy": "fp16"},
        {"optim": {"name": "muon"}},
        {"optim": {"name": "adamw8bit"}},
        {"loss": LossConfig(head="full")},
        {"compile": TRACED},
        {"compile": GENERATED},
    ],
    ids=["bf16", "fp8", "fp16", "muon", "adamw8bit", "full head", "aot_eager", "inductor"],
)
def test_weights_are_those_without_it(changes):
    """After steps whose first was repeated, and whose cost was measured."""
    changes = dict(changes)
    config = strict(changes.pop("policy", "bf16"))
    if "optim" in changes:
        changes["optim"] = config.optim.model_copy(update=changes["optim"])
    config = config.model_copy(update=changes)
    with fresh_compiler():
        plain = TorchBackend().open(config.model_copy(update={"deterministic": False}))
        due = [plain.step(text_batch(config, step)) for step in range(3)]
        session = TorchSession(config)
        batch = text_batch(config, 0)
        one = session.gradients(batch)
        assert same_gradients(one, session.gradients(batch))
        assert len(session.costs_of_determinism(batch.rows(slice(2)))) == deterministic.PAIRS
        assert [session.step(text_batch(config, step)) for step in range(3)] == due
        assert same_bits(session.state(), plain.state())
