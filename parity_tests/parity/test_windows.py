"""A program of the whole model that shows some blocks at a time: the windows together are one observation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from lockstep.core.backend import Batch, NotSupported
from lockstep.core.config.schema import CompileConfig, RunConfig
from lockstep.core.model.names import GRADIENT, probe_shapes
from lockstep.core.model.windows import device_bytes, summed_edges, windows_of
from lockstep.core.parity.evidence.probe import probe_of
from lockstep.core.parity.evidence.taps import observed_names
from lockstep.core.plan.checks import GB, cost_of_check, over_budget
from lockstep.core.streams import TAPS, Collected
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.session import TorchSession

PLAIN = tiny_config(train={"batch_size": 4, "micro_batch_size": 4}).model_copy(
    update={"compile": CompileConfig(enabled=True, backend="aot_eager")}
)
NAMES = observed_names(PLAIN)
WHOLE = device_bytes(PLAIN, 2, 0.0)


def budgeted(budget: float) -> RunConfig:
    parity = PLAIN.parity.model_copy(update={"device_gb": budget / GB})
    return PLAIN.model_copy(update={"parity": parity})


def shown(config: RunConfig, batch: Batch, session: TorchSession | None = None) -> dict[str, np.ndarray]:
    found = Collected()
    (session or TorchSession(config)).stream_taps(batch, NAMES, found)
    return dict(found.arrays(TAPS))


@pytest.mark.parametrize("share", [1e-9, 0.4, 0.6, 2.0])
def test_windows_show_everything_once(share: float) -> None:
    parts = windows_of(PLAIN, NAMES, 2, share * WHOLE)
    counted = Counter(name for window in parts for name in window.names)
    assert counted == dict.fromkeys(NAMES, 1)
    summed = summed_edges(PLAIN, parts)
    assert list(summed) == ([GRADIENT + "embed.weight"] if len(parts) > 1 else []), "the tied matrix"
    assert all(len(edges) == 1 and edges <= parts[-1].names for edges in summed.values())
    assert len(parts) == {1e-9: PLAIN.model.layers + 2, 2.0: 1}.get(share, len(parts))
    for before, window in pairwise(parts):
        assert window.border and window.border <= before.names, "each is held to the one before"
        assert {GRADIENT + name for name in window.border} <= window.names - before.names
    assert device_bytes(PLAIN, 2, share * WHOLE) <= max(share * WHOLE, device_bytes(PLAIN, 2, 1.0))


def test_windows_give_the_bits_of_the_whole() -> None:
    batch = probe_of(text_batch(PLAIN), PLAIN)
    config = budgeted(0.6 * WHOLE)
    assert len(windows_of(config, NAMES, 2, 0.6 * WHOLE)) > 1
    whole, by_windows = shown(PLAIN, batch), shown(config, batch)
    assert whole.keys() == by_windows.keys() >= {GRADIENT + "embed.weight", "logits"}
    for name, array in whole.items():
        np.testing.assert_array_equal(by_windows[name], array, name)


class _OtherBits(TorchSession):
    """A program a window, of which the second rounds otherwise."""

    def _tapped(
        self, batch: Batch, names: frozenset[str], rows: Tensor | None, given: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        found = super()._tapped(batch, names, rows, given)
        return {n: v * (1 + 1e-6) if "logits" in names and v.ndim > 2 else v for n, v in found.items()}


def test_windows_whose_programs_differ_show_nothing() -> None:
    config, batch, found = budgeted(0.6 * WHOLE), probe_of(text_batch(PLAIN), PLAIN), Collected()
    with pytest.raises(NotSupported, match=r"does not give the same bits at .*blocks"):
        _OtherBits(config).stream_taps(batch, NAMES, found)
    assert not found.arrays(TAPS)


def test_the_plan_says_what_the_device_needs() -> None:
    """Without a budget all sequences of a micro-batch; with one, those that are looked at, a window at a time."""
    number: Any = PLAIN.train.sequence_length
    taps = sum(math.prod(shape) for shape in probe_shapes(PLAIN.model, 4, number).values())
    cost = cost_of_check(PLAIN, thorough=True)
    assert cost.device == device_bytes(PLAIN, 4, 0.0) > 4 * 2 * taps
    assert cost.least == device_bytes(PLAIN, 2, 1.0) < 0.6 * WHOLE
    assert over_budget(PLAIN, thorough=True) == over_budget(budgeted(0.6 * WHOLE), thorough=True) == []
    (line,) = over_budget(budgeted(cost.least / 2), thorough=True)
    assert "of the device, and parity.device_gb is" in line
    eager = PLAIN.model_copy(update={"compile": CompileConfig(enabled=False)})
    assert cost_of_check(eager, thorough=True).device < cost.least
