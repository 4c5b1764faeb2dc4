"""A truth that is computed a block at a time has the gradients of one that is held whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.core.parity.watch.snapshot import array_of, parameters_of
from lockstep.core.parity.watch.uncovered import Uncovered
from lockstep.parity_tests.watch.own import Gpt, batches, gpt2, gpt2_loss, gpt_loss, train
from lockstep.torch_backend.watch import segments
from lockstep.torch_backend.watch.own_module import OwnModule
from lockstep.torch_backend.watch.segments import blocks_of, kept_narrow

AGREED = "agreed in 3 checks against your own module"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a model of any size for a large one."""
    monkeypatch.setattr(segments, "LARGE", 0)


def truth_of(model: nn.Module, loss: Any, batch: Any, accumulate: Any = None) -> tuple[dict[str, np.ndarray], bool]:
    """Return the gradients of the truth, and whether it was computed whole."""
    reference = OwnModule(model, loss, accumulate)
    params = {name: array_of(p) for name, p in parameters_of(model).items()}
    truth, _ = reference.answers(params, batch, "fp32", Uncovered())
    return dict(truth.grads), reference._whole


class Shared(nn.Module):
    """Blocks of which two are one, in a dictionary, with a tied parameter and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Linear(32, 32), nn.Linear(32, 32)
        second.bias = first.bias
        third = nn.Linear(32, 32).requires_grad_(False)
        self.embed = nn.Embedding(97, 32)
        self.layers = nn.ModuleDict({"a": first, "b": second, "c": first, "d": third})

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x @ self.embed.weight.T


@pytest.mark.parametrize("accumulate", [None, "mean"])
@pytest.mark.parametrize(
    ("make", "loss", "same_bits"),
    [(Gpt, gpt_loss, True), (lambda: gpt2("eager"), gpt2_loss, True), (Shared, gpt_loss, False)],
    ids=["gpt", "gpt2", "shared"],
)
def test_gradients_are_those_of_a_whole_copy(
    make: Any, loss: Any, same_bits: bool, accumulate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight that is used several times gets its parts in another order, and so with other last bits."""
    torch.manual_seed(0)
    model = make()
    batch: Any = batches(2) if accumulate else batches(1)[0]
    whole, _ = truth_of(model, loss, batch, accumulate)
    monkeypatch.setattr(segments, "LARGE", 0)
    assert kept_narrow(model)
    found, failed = truth_of(model, loss, batch, accumulate)
    assert not failed
    assert found.keys() == whole.keys()
    for name, gradient in whole.items():
        assert found[name].dtype == np.float64
        if same_bits:
            assert np.array_equal(found[name], gradient), name
        assert np.linalg.norm(found[name] - gradient) <= 1e-14 * np.linalg.norm(gradient), name


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("precision", ["fp32", "autocast", "bf16 weights"])
def test_a_clean_run_agrees(precision: str) -> None:
    assert train("gpt", precision).headline == AGREED


@pytest.mark.usefixtures("small")
def test_one_wrong_gradient_of_a_block_is_found() -> None:
    def spoil(model: nn.Module, step: int) -> None:
        gradient = model.get_parameter("blocks.1.up.weight").grad
        assert gradient is not None
        gradient *= 1.01

    watcher = train("gpt", spoil=spoil)
    bad = {f.tap for f in watcher.checks[0].findings if not f.ok}
    assert bad == {"blocks.1.up.weight"}


class Flat(nn.Module):
    """A block that reads its weights past the attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, next(self.parameters())))


def test_a_block_that_reads_weights_in_another_way_is_computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Shared()
    model.layers["b"] = Flat()
    whole, _ = truth_of(model, gpt_loss, batches(1)[0])
    monkeypatch.setattr(segments, "LARGE", 0)
    found, failed = truth_of(model, gpt_loss, batches(1)[0])
    assert failed
    assert all(np.array_equal(found[name], gradient) for name, gradient in whole.items())


def test_blocks_are_members_of_lists_and_small_models_have_none() -> None:
    assert list(blocks_of(Gpt())) == ["blocks.0", "blocks.1"]
    assert kept_narrow(Gpt()) == frozenset()


@pytest.mark.usefixtures("small")
def test_what_stands_outside_as_well_is_held_in_fp64() -> None:
    model = Shared()
    model.layers["b"].weight = model.embed.weight
    assert not any("embed" in name or name == "layers.b.weight" for name in kept_narrow(model))
    assert "layers.a.weight" in kept_narrow(model)
