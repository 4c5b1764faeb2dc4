"""Several ranks with one verdict: DistributedDataParallel and FSDP2 over gloo, clean and with planted faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep import watch
from lockstep.core.errors import UserError
from lockstep.core.parity.watch.together import Cut, differences, owner_of
from lockstep.parity_tests.watch.own import gpt_loss
from lockstep.parity_tests.watch.processes import answers

Told = dict[str, Any]
AGREED = "agreed in 2 checks against your own module"
NOT_JUDGED = "could_not in 2 checks against your own module; loss and gradients: not judged"


@dataclass(frozen=True)
class Expected:
    """Hold what both ranks say of a case: how the headline begins, and of the first bad check its step and stages.

    words: in the origin's note, or the cause.
    """

    headline: str
    step: int | None = None
    stages: frozenset[str] = frozenset()
    words: str = ""


def disagrees(step: int, stages: str, words: str = "") -> Expected:
    return Expected("disagreed", step, frozenset(stages.split()), words)


QUICK = {
    "ddp": Expected(AGREED),
    "ddp, rank 1 drifts": disagrees(2, "weights loss gradients update", "rank 1 differs in 1 of 28 tensors: embed"),
    "fsdp, bf16": Expected(AGREED),
    "fsdp, part of a gradient": disagrees(2, "gradients", "only in the part of rank 1"),
}
OTHERS = {
    "ddp, accumulated": Expected(AGREED),
    "ddp, tokens": Expected(AGREED),
    "ddp, mean of means": disagrees(1, "loss gradients"),
    "ddp, rank 1's gradient": disagrees(
        2, "reduction clip_coefficient moments update", "rank 1 differs in 1 of 28 tensors: blocks.0.norm1.bias"
    ),
    "ddp, rank 1 cannot send": Expected(f"{NOT_JUDGED} (rank 1: RuntimeError: planted)"),
    "ddp, loss fails": Expected(f"{NOT_JUDGED} (RuntimeError: planted)"),
    "fsdp": Expected(AGREED),
    "fsdp, root alone": Expected(AGREED),
    "fsdp, compiled blocks": Expected(AGREED),
    "fsdp, summed": Expected(AGREED),
    "fsdp, bf16 sums": Expected(AGREED),
    "fsdp, bf16 blocks": Expected(AGREED),
    "fsdp, bf16, accumulated": Expected(AGREED),
    "fsdp, tokens": Expected(AGREED),
    "fsdp, mean of means": disagrees(1, "loss gradients"),
    "fsdp, half the clip": disagrees(1, "clip_coefficient"),
    "fsdp, clip by tensor": disagrees(1, "clip_coefficient"),
    "fsdp, eps": disagrees(1, "update", "eps 0.001, declared 1e-08"),
    "fsdp, part of a weight": disagrees(2, "weights", "rank 1: blocks.0.norm1.bias"),
    "fsdp, one rank dropped": disagrees(1, "loss gradients"),
    "fsdp, bf16 declared as fp32": disagrees(1, "loss gradients"),
    "fsdp, loss fails": Expected(f"{NOT_JUDGED} (RuntimeError: planted)"),
    "fsdp, rank 1 cannot send": Expected(f"{NOT_JUDGED} (rank 1: RuntimeError: planted)"),
    "fsdp, rank 1 cannot read": Expected(
        "agreed in 2 checks against your own module; weights and moments between steps"
    ),
    "fsdp, rank 1 does not step": disagrees(2, "moments step_count update", "[0] on rank 1"),
}


def told_by(folder: Path, cases: Sequence[str]) -> list[Told]:
    """Run the cases on two ranks; return the answers of each."""
    return answers("together_on_two_ranks", str(folder / "store"), *cases)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    return told_by(tmp_path_factory.mktemp("quick"), list(QUICK))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    return told_by(tmp_path_factory.mktemp("others"), [*OTHERS, "checks alone", "watches alone"])


def held(case: str, told: Sequence[Told], expected: Expected) -> None:
    first, second = (rank[case] for rank in told)
    assert first == second
    assert first["headline"].startswith(expected.headline), first
    assert first["step"] == expected.step, first
    assert set(first["stages"]) == expected.stages, first
    assert expected.words in f"{first['origin']} {first['cause']}"
    assert first["precision"] == ("bf16" if "bf16" in case and "fp32" not in case else "fp32")
    if expected.headline == AGREED:
        assert first["headline"] == AGREED
        parts = {"loss/loss", "gradients/embed.weight", "update/embed.weight", "moments/exp_avg/embed.weight"}
        ranks = {"weights/ranks", "reduction/ranks", "update/ranks", "moments/ranks"} if "ddp" in case else set()
        assert parts | ranks <= set(first["compared"])


@pytest.mark.parametrize("case", QUICK)
def test_two_ranks_give_one_verdict(case: str, quick: list[Told]) -> None:
    held(case, quick, QUICK[case])


def test_a_rank_that_checks_alone_goes_on_training(others: list[Told]) -> None:
    first, second = (rank["checks alone"] for rank in others)
    assert first.startswith("agreed in 2 checks against your own module; step: not judged (not all ranks came to this")
    assert second == "agreed in 1 checks against your own module"


def test_a_rank_that_watches_alone_is_told_and_goes_on_training(others: list[Told]) -> None:
    assert "watch() was not called on all of the ranks 0, 1 within 2 seconds" in str(others[0]["watches alone"])
    assert not others[1]["watches alone"]


@pytest.mark.parametrize("case", OTHERS)
def test_more_of_two_ranks(case: str, others: list[Told]) -> None:
    held(case, others, OTHERS[case])


def test_what_one_rank_of_three_holds_is_named() -> None:
    usual, other = {"after/weights": {"w": b"1", "b": b"2"}}, {"after/weights": {"w": b"1", "b": b"3"}}
    for rank in range(3):
        digests = [other if rank == one else usual for one in range(3)]
        (found,) = differences(digests)
        assert not found.ok
        assert (found.stage, found.tap, found.note) == ("update", "ranks", f"rank {rank} differs in 1 of 2 tensors: b")
    (found,) = differences([usual] * 3)
    assert found.ok
    assert found.size == 2
    assert not list(differences([usual, {}]))


def test_a_tensor_is_put_together_from_parts_of_uneven_length() -> None:
    whole = np.arange(15).reshape(5, 3)
    one_axis = {0: whole[:3], 1: whole[3:], 2: whole[5:]}
    assert np.array_equal(Cut(whole[:3], np.arange(3), (0,)).whole(one_axis), whole)
    columns = {0: whole[:, :2], 1: whole[:, 2:]}
    assert np.array_equal(Cut(whole, np.arange(2), (1,)).whole(columns), whole)
    with_copies = {2: whole[:3], 3: whole[3:], 0: whole[:3], 1: whole[3:]}
    assert np.array_equal(Cut(whole, np.asarray([[2, 3], [0, 1]]), (None, 0)).whole(with_copies), whole)


def test_the_rank_that_holds_what_is_off_is_named() -> None:
    w = {"a": np.zeros((4, 2)), "b": np.zeros(4)}
    layouts = {name: (Cut(x[:2], np.arange(2), (0,)), {0: x[:2].shape, 1: x[2:].shape}) for name, x in w.items()}
    c = {"a": w["a"] + [[0], [0], [1], [1]], "b": w["b"] + [0, 0, 0, 1]}
    assert owner_of(["a", "b"], c, w, layouts) == "only in the part of rank 1"
    assert owner_of(["a", "b"], c | {"b": np.ones(4)}, w, layouts) == ""
    assert owner_of(["a"], c, w, {}) == ""


def test_settings_that_cannot_work_are_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UserError, match="it is 'gather' or 'given'"):
        watch(model, optimizer, loss=gpt_loss, ranks="all")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="ranks= needs loss="):
        watch(model, optimizer, reference=lambda p, b: (0.0, {}), ranks="gather")
