"""Each operator changes its input as declared; a mutant changes the step, and its neighbour does not."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from lockstep.core.mutate.conditions import REGIONS
from lockstep.core.mutate.draw import mutants
from lockstep.core.mutate.mutant import Mutant, Operator
from lockstep.core.mutate.operators import operators
from lockstep.core.mutate.places import places
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.mutate.data import Text
from lockstep.parity_tests.mutate.test_mutants import whole_logits
from lockstep.scripts.shared.mutating import MutantBench
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.mutate.change import backward, change_of, region, straight, within

AXES = ("row", "position", "head", "column")
TENSOR = sorted(
    {str(one) for place in places(whole_logits()) if place.axes for one in operators(whole_logits(), place)}
)


@pytest.mark.parametrize("text", [t for t in TENSOR if t not in ("other", "stale")])
def test_an_operator_changes_a_tensor(text: str) -> None:
    x = torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(0))
    changed = change_of(Operator.parse(text), AXES)(x)
    assert changed.shape == x.shape and changed.dtype == x.dtype
    assert not torch.equal(changed, x)


def test_operators_do_what_they_say() -> None:
    x = torch.arange(1.0, 7.0).reshape(2, 3)

    def made(text: str) -> list[list[float]]:
        return change_of(Operator.parse(text), ("row", "column"))(x).tolist()

    assert made("zero(column,last)") == [[1, 2, 0], [4, 5, 0]]
    assert made("swap(row)") == [[4, 5, 6], [1, 2, 3]]
    assert made("swap(column)") == [[2, 1, 3], [5, 4, 6]]
    assert made("shift(column)") == [[3, 1, 2], [6, 4, 5]]
    assert made("scale(-2^-1)") == [[0.5, 1, 1.5], [2, 2.5, 3]]
    cut = change_of(Operator.parse("truncate(bf16)"), ("column",))(torch.tensor([1 + 2**-8 + 2**-20, -1 - 2**-8]))
    assert cut.tolist() == [1, -1]


def test_gradients_of_changes() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    backward(x, lambda grad: -grad).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [-1, -1]
    straight(x, lambda value: 3 * value).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 0]


@pytest.mark.parametrize("condition", REGIONS)
def test_a_region_spares_the_rest(condition: str) -> None:
    tokens = torch.tensor([[1, 2, 1, 3], [4, 4, 5, 4]])
    due = {
        "last-row": [[False] * 4, [True] * 4],
        "last-position": [[False, False, False, True]] * 2,
        "repeated": [[False, False, True, False], [False, True, False, True]],
    }[condition]
    held = region(condition, tokens)
    assert held is not None and held.tolist() == due
    x = torch.ones(2, 4, 3)
    assert torch.equal(within(held, torch.zeros_like)(x)[..., 0] == 0, torch.tensor(due))


@cache
def bench() -> MutantBench:
    config = whole_logits(batch_size=8)
    return MutantBench(config, Text(config, uneven=True), JaxBackend(), TorchBackend())


CELLS: dict[str, list[Mutant]] = {}
for mutant in mutants(whole_logits(batch_size=8)):
    if mutant.condition == "always" or mutant.kind == "part":
        CELLS.setdefault(f"{mutant.kind}-{mutant.operator.name}", []).append(mutant)


@pytest.mark.parametrize("cell", CELLS)
def test_every_operator_changes_the_step_at_every_kind_of_place(cell: str) -> None:
    """One mutant of the cell changes a bit of the step; others may not, as a bf16 number rounded to bf16."""
    of_cell = CELLS[cell]
    for one in of_cell[:: max(1, len(of_cell) // 5)]:
        row = bench().measured(one)
        if row.stopped or not row.equivalent:
            return
    raise AssertionError(f"no mutant of {cell} changes the step")


def test_a_condition_that_does_not_hold_spares_every_bit() -> None:
    """The batches of this bench have uneven loss weights."""
    assert bench().measured(Mutant.parse("blocks.1.mlp.act:forward*drop@ones")).equivalent
    assert not bench().measured(Mutant.parse("blocks.1.mlp.act:forward*drop@many-micro")).equivalent
