"""A candidate that promises the bits of its training program with taps is held to them, another one to its length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults.planting import swapped
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.model import RMSNorm

pytestmark = pytest.mark.usefixtures("in_one_process")
CONFIG = tiny_config("bf16")
NAME = "blocks.0.attn.q_proj.weight"


@pytest.fixture(scope="module")
def gathered() -> tuple[Evidence, Reference]:
    evidence = gather(TorchBackend().open(CONFIG), CONFIG, uneven_weights(text_batch(CONFIG), 0))
    return evidence, Reference.open(JaxBackend(), CONFIG)


def at_ties(grad: np.ndarray) -> np.ndarray:
    """Move a quarter of bf16 numbers by half an ulp or one, as another order of FP32 sums upstream does.

    Hooks on Hugging Face's norms moved 3 to 20 % of the first block's.
    """
    moved = grad.copy()
    flat = moved.reshape(-1)
    flat[::4] *= np.float32(1 + 2.0**-8)
    return moved


def too_long(grad: np.ndarray) -> np.ndarray:
    return grad * np.float32(1.01)


def broken(gathered: tuple[Evidence, Reference], change: Callable[[np.ndarray], np.ndarray], keeps: bool) -> set[str]:
    """Return the broken stages of a step whose training program gives one gradient otherwise than the tapped one."""
    evidence, reference = gathered
    assert evidence.probed is not None and evidence.taps_keep_bits
    wrong = {NAME: change(np.asarray(evidence.probed.grads[NAME]))}
    grads, program = ({**there, **{n: w for n, w in wrong.items() if n in there}} for there in (
        evidence.probed.grads, evidence.probed.program))  # fmt: skip
    probed = replace(evidence.probed, grads=grads, program=program)
    check = judge(replace(evidence, probed=probed, taps_keep_bits=keeps), reference)
    return {found.stage for found in check.findings if not found.ok and found.scope == "local"}


@pytest.mark.parametrize("keeps", [True, False])
def test_the_same_bits_agree(gathered: tuple[Evidence, Reference], keeps: bool) -> None:
    assert broken(gathered, lambda grad: grad, keeps) == set()


def test_other_ties_are_accused_only_where_bits_are_promised(gathered: tuple[Evidence, Reference]) -> None:
    assert broken(gathered, at_ties, keeps=True) == {"gradients"}
    assert broken(gathered, at_ties, keeps=False) == set()


@pytest.mark.parametrize("keeps", [True, False])
def test_a_wrong_length_is_accused_with_and_without_the_promise(
    gathered: tuple[Evidence, Reference], keeps: bool
) -> None:
    assert broken(gathered, too_long, keeps) == {"gradients"}


class _LibraryNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class _WrittenOutNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class LibraryNorm(TorchBackend):
    session_class = swapped(RMSNorm, _LibraryNorm)


class WrittenOutNorm(TorchBackend):
    session_class = swapped(RMSNorm, _WrittenOutNorm)


@pytest.mark.parametrize("candidate", [LibraryNorm, WrittenOutNorm])
def test_a_norm_of_other_code_keeps_the_promise(
    candidate: type[TorchBackend], gathered: tuple[Evidence, Reference]
) -> None:
    """A norm uses its input twice, and autograd would add up a tap's part between both."""
    evidence = gather(candidate().open(CONFIG), CONFIG, uneven_weights(text_batch(CONFIG), 0))
    assert judge(evidence, gathered[1]).verdict == "agreed"


def test_an_alarm_of_bits_alone_names_the_promise(gathered: tuple[Evidence, Reference]) -> None:
    evidence, reference = gathered
    assert evidence.probed is not None
    grads, program = dict(evidence.probed.grads), dict(evidence.probed.program)
    for there in (grads, program):
        if NAME in there:
            there[NAME] = at_ties(np.asarray(there[NAME]))
    check = judge(replace(evidence, probed=replace(evidence.probed, grads=grads, program=program)), reference)
    (wrong,) = (found for found in check.findings if not found.ok and found.scope == "local")
    assert wrong.note == "the session promises equal bits of both programs (taps_keep_bits)"
