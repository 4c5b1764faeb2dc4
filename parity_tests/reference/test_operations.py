"""A look-up is computed from the rows that it reads; weights are where XLA needs no copy of them."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.core.parity.reference.operations import ALIGNMENT, aligned, run_operation
from lockstep.core.parity.reference.stages import stages_of
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.tiny import tiny_config

CONFIG = tiny_config("fp64")


class Watched:
    """A session that notes the largest weight that a stage was given."""

    def __init__(self, session):
        self._session, self.rows = session, 0

    def run_stage(self, stage, inputs):
        self.rows = max(self.rows, len(inputs["weight"]))
        return self._session.run_stage(stage, inputs)


@pytest.mark.parametrize("with_grad", [False, True])
def test_a_look_up_by_rows_is_that_of_the_table(with_grad):
    stage, session = stages_of(CONFIG)[0], JaxBackend().open(CONFIG)
    rng = np.random.default_rng(0)
    table = rng.standard_normal((CONFIG.model.vocab_size, CONFIG.model.hidden))
    tokens = np.array([[3, 3, 7, 299], [0, 7, 3, 1]], np.int32)
    inputs = {"weight": table, "tokens": tokens}
    if with_grad:
        inputs["grad"] = rng.standard_normal((*tokens.shape, CONFIG.model.hidden))
    watched = Watched(session)
    found, due = run_operation(watched, stage.id, stage, inputs), session.run_stage(stage.id, inputs)
    assert watched.rows == tokens.size and found.keys() == due.keys()
    np.testing.assert_array_equal(found["out"], due["out"])
    if with_grad:
        np.testing.assert_allclose(found["grad/weight"], due["grad/weight"], rtol=1e-14, atol=1e-14)
        assert np.count_nonzero(found["grad/weight"].any(axis=1)) == 5


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_aligned_array_is_copied_once(dtype):
    raw = np.arange(1000, dtype=np.float32)
    for start in range(3):
        x = raw[start : start + 600].reshape(20, 30)
        found = aligned(x, dtype)
        assert found.dtype == dtype and found.ctypes.data % ALIGNMENT == 0
        np.testing.assert_array_equal(found, x)
        assert aligned(found, dtype) is found
    assert aligned(np.array(2, np.float32), dtype) == 2
