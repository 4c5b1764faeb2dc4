"""Links of the chain beyond the model: each is tripped by a fault of its own, named, and alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.session import TorchSession

CONFIG = tiny_config("bf16", train={"sequence_length": 32})


@pytest.fixture(scope="module")
def reference():
    return Reference.open(JaxBackend(), CONFIG)


def check_of(session: type[TorchSession], reference: Reference, steps: int = 1):
    opened = session(CONFIG)
    for number in range(steps):
        check = judge(gather(opened, CONFIG, uneven_weights(text_batch(CONFIG, number), number)), reference)
    return check


class _ForgetsMoments(TorchSession):
    def load(self, state):
        zeros = {kind: {n: np.zeros_like(m) for n, m in by.items()} for kind, by in state.optimizer.items()}
        super().load(replace(state, optimizer=zeros))


class _AddsInBf16(TorchSession):
    """Gradients of micro-batches are summed in bf16; a single one is left as it is."""

    def accumulate(self, batch):
        result = super().accumulate(batch)
        if len(batch.tokens) > self.config.train.micro_batch_size:
            for p in self.parameters.values():
                p.grad = p.grad.bfloat16().to(p.grad.dtype)
        return result


class _ScalesOneGradient(TorchSession):
    def accumulate(self, batch):
        result = super().accumulate(batch)
        self.parameters["blocks.1.mlp.up_proj.weight"].grad.mul_(1.0001)
        return result


@pytest.mark.parametrize(
    "session, expected",
    [
        (TorchSession, None),
        (_ForgetsMoments, ("checkpoint", "state", None)),
        (_AddsInBf16, ("accumulation", "backward", None)),
        (_ScalesOneGradient, ("gradients", "backward", 1)),
    ],
    ids=["honest", "moments lost", "bf16 sum", "one gradient a ten-thousandth too long"],
)
def test_origin(session, expected, reference):
    check = check_of(session, reference)
    if expected is None:
        assert check.verdict == "agreed", check.origin
        return
    assert check.origin is not None
    stage, phase, layer = expected
    assert (check.origin.stage, check.origin.phase) == (stage, phase)
    assert layer is None or check.origin.layer == layer


def test_a_length_that_is_off_is_decoded(reference):
    class Doubles(TorchSession):
        def accumulate(self, batch):
            result = super().accumulate(batch)
            for p in self.parameters.values():
                p.grad.mul_(self.config.train.accumulation)
            return result

    check = check_of(Doubles, reference)
    assert check.origin is not None and check.origin.stage == "gradients"
    notes = {f.note for f in check.findings if not f.ok and f.scope == "end_to_end"}
    assert any("the accumulation steps" in note for note in notes), notes


def test_contaminated_findings_are_told_from_origins(reference):
    class Gelu(TorchSession):
        def build_model(self):
            import torch.nn.functional as F

            model = super().build_model()
            model.blocks[0].mlp.activate = lambda gate, up: F.gelu(gate) * up
            return model

    check = check_of(Gelu, reference)
    assert check.origin is not None
    assert (check.origin.stage, check.origin.phase, check.origin.layer) == ("act", "forward", 0)
    roles = {f.scope: check.role(f) for f in check.findings if not f.ok}
    assert roles == {"local": "origin", "end_to_end": "contaminated"}
    assert {f.layer for f in check.origins} == {0}
