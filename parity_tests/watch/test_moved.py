"""`watch` sees weights that something other than the optimizer's step changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lockstep import watch
from lockstep.core.parity.watch.api import Watcher
from lockstep.parity_tests.watch.own import Gpt, batches, gpt_loss

Change = Callable[[nn.Module], None]


@torch.no_grad()
def to_bf16(model: nn.Module) -> None:
    table = model.get_parameter("embed.weight")
    table.copy_(table.bfloat16())


@torch.no_grad()
def decay(model: nn.Module) -> None:
    """Move one weight of a bf16 or FP32 model to the number next to it."""
    weight = model.get_parameter("blocks.0.up.weight")
    weight[0, 0] = torch.nextafter(weight[0, 0], weight.new_tensor(2.0))


def nothing(model: nn.Module) -> None:
    """Leave the weights alone."""


@torch.no_grad()
def swapped_and_back(model: nn.Module) -> None:
    """Evaluate by other weights, as averages are, and put the own ones back."""
    kept = [p.clone() for p in model.parameters()]
    for p in model.parameters():
        p.zero_()
    for p, own in zip(model.parameters(), kept, strict=True):
        p.copy_(own)


def loop(
    steps: int, *, begin: Change = nothing, inside: Change = nothing, end: Change = nothing, **settings: bool | int
) -> Watcher:
    """Train, with changes from the second step on: before the block, in it before the update, and in it after it."""
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watcher = watch(model, optimizer, loss=gpt_loss, **{"every": 1, **settings})  # type: ignore[arg-type]
    for number, batch in enumerate(batches(steps)):
        change = number > 0
        if change:
            begin(model)
        loss = gpt_loss(model, batch)
        loss.backward()
        with watcher.step(batch, loss):
            if change:
                inside(model)
            optimizer.step()
            if change:
                end(model)
        optimizer.zero_grad()
    return watcher


@pytest.mark.parametrize(
    ("where", "words"),
    [("begin", "begin of the step"), ("inside", "begin of the update"), ("end", "end of the step")],
)
def test_one_weight_is_seen_where_it_moves(where: str, words: str) -> None:
    watcher = loop(2, **{where: decay})  # type: ignore[arg-type]
    first, second = watcher.checks
    assert first.verdict == "agreed", watcher
    assert second.origin is not None and (second.origin.stage, second.origin.tap) == ("weights", words), watcher
    assert second.origin.note == "blocks.0.up.weight"
    assert [f.tap for f in second.findings if f.stage == "weights" and not f.ok] == [words]


def test_what_moved_in_a_block_is_not_accused_again_in_the_next() -> None:
    changes = iter([decay])
    watcher = loop(3, end=lambda model: next(changes, nothing)(model))
    assert [check.verdict for check in watcher.checks] == ["agreed", "disagreed", "agreed"], watcher


def test_weights_that_were_rounded_are_named() -> None:
    origin = loop(2, begin=to_bf16).checks[1].origin
    assert origin is not None and origin.note == "embed.weight; only bf16 numbers are left"


def test_a_swap_that_is_undone_is_no_change() -> None:
    watcher = loop(2, begin=swapped_and_back, end=swapped_and_back)
    assert watcher.headline == "agreed in 2 checks against your own module", watcher
    taps = {f.tap for f in watcher.checks[1].findings if f.stage == "weights"}
    assert taps == {"begin of the step", "begin of the update", "end of the step"}


def test_changes_that_are_declared_are_not_judged() -> None:
    watcher = loop(2, begin=to_bf16, end=decay, weights_change=True)
    assert watcher.verdict == "agreed", watcher
    text = "weights that the loop changes outside optimizer.step() (weights_change=True)"
    assert all(text in check.not_covered for check in watcher.checks)


def test_a_change_before_every_step_is_found_in_the_next_check() -> None:
    """Steps 1 and 3 are checked; what the second left is kept for the third."""
    watcher = loop(3, begin=decay, every=3)
    assert [check.step for check in watcher.checks] == [1, 3]
    origin = watcher.checks[1].origin
    assert origin is not None and (origin.stage, origin.tap) == ("weights", "begin of the step"), watcher
    text = "weights and optimizer state between steps that are not checked (every=1 compares them)"
    assert all(text in check.not_covered for check in watcher.checks)


def test_a_change_before_a_check_that_was_not_due_is_not_seen() -> None:
    """Nothing was kept before a check of `check=True`."""
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watcher = watch(model, optimizer, loss=gpt_loss, every=100)
    for number, batch in enumerate(batches(3)):
        decay(model)
        loss = gpt_loss(model, batch)
        loss.backward()
        with watcher.step(batch, loss, check=number == 2 or None):
            optimizer.step()
        optimizer.zero_grad()
    assert [check.step for check in watcher.checks] == [1, 3] and watcher.verdict == "agreed", watcher


@pytest.mark.parametrize("shared", [False, True])
def test_two_optimizers_move_their_own_weights(shared: bool) -> None:
    """One that both hold is moved by the other between an optimizer's begin and the block's: that is no change."""
    torch.manual_seed(0)
    model = Gpt()
    table, *others = model.parameters()
    optimizers = [torch.optim.SGD([table], lr=1e-2), torch.optim.SGD([*others, table] if shared else others, lr=1e-2)]
    watcher = watch(model, optimizers, loss=gpt_loss, every=1)
    for batch in batches(2):
        loss = gpt_loss(model, batch)
        loss.backward()
        with watcher.step(batch, loss):
            for optimizer in optimizers:
                optimizer.step()
        model.zero_grad()
    assert not [f for check in watcher.checks for f in check.findings if f.stage == "weights" and not f.ok], watcher
