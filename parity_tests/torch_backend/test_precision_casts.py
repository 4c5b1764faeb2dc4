"""The compiled program rounds where the policy rounds: why `emulate_precision_casts` is on.

Here nothing but the head rounds: with o_proj and down_proj at zero, the residual stream is the embedding in FP32, and
the error of the NLL is that of the head's operands. Inductor by itself drops a cast to bf16 and back inside a fusion:
the "bf16" head then computes in FP32, an excess far below 1. The block product reads bf16, so only copies lose a cast.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lockstep.core.parity.measures.distances import distances
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.cross.variants import fresh_state
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.parity_tests.torch_backend.programs import EAGER, GENERATED, TRACED, fresh_compiler, under
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.program_cache import options_of
from lockstep.torch_backend.session import TorchSession
from lockstep.torch_backend.switches import INDUCTOR

CONFIG = tiny_config("bf16", layers=1)
COPIES = CONFIG.model_copy(update={"precision": CONFIG.precision.model_copy(update={"cpu_products": "blas"})})
BATCH = text_batch(CONFIG)


@pytest.fixture(scope="module")
def state():
    params = dict(TorchBackend().open(CONFIG).state().params)
    for name in params:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            params[name] = np.zeros_like(params[name])
    return fresh_state(params)


@pytest.fixture(scope="module")
def measure(state):
    """Distances of a program's NLL from the twin and the truth."""
    reference = JaxBackend().open(CONFIG)
    reference.load(state)
    twin = reference.evaluate(BATCH)["nll"]
    exact = JaxBackend().open(tiny_config("fp64", layers=1))
    exact.load(state)
    truth = exact.evaluate(BATCH)["nll"]

    def measure(program, config=CONFIG):
        session = TorchBackend().open(under(config, program))
        session.load(state)
        with fresh_compiler():
            nll = session.gradients(BATCH).nll
        return distances(nll, twin, truth, np.float32)

    return measure


@pytest.mark.parametrize("program", [EAGER, TRACED, GENERATED], ids=["eager", "aot_eager", "inductor"])
def test_the_head_rounds_as_its_twin(measure, program):
    """Measured: twin distance 6e-4, the order of an FP32 sum, and excess 1.000."""
    for found in (measure(program), measure(program, COPIES)):
        assert found.twin_distance < 0.1
        assert 0.9 < found.excess < 1.1


def test_without_the_option_the_rounding_is_lost(measure, monkeypatch):
    """Measured: excess 0.003, twin distance 1.00."""
    compile_ = torch.compile
    seen = []

    def without_options(function, options=None, **other):
        seen.append(options)
        return compile_(function, **other)

    monkeypatch.setattr(torch, "compile", without_options)
    found = measure(GENERATED, COPIES)
    assert seen == [{"emulate_precision_casts": True, **INDUCTOR, **options_of(TorchSession)}]
    assert found.excess < 0.1
    assert found.twin_distance > 0.9
