"""The loop acts on what another rank notices; no processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from lockstep.core.backend import Batch
from lockstep.core.data.loader import LoaderError
from lockstep.core.run.ranks import ONE
from lockstep.core.train.loop import Checks, next_of
from lockstep.parity_tests.tiny import text_batch, tiny_config

T = TypeVar("T")
BATCH = text_batch(tiny_config())


class Rank0:
    """Rank 0 of two, of which the other one gives the answers it is made with."""

    rank, count = 0, 2

    def __init__(self, other: Any) -> None:
        self._other = other

    def of_first(self, compute: Callable[[], T], asked: str = "") -> T:
        return compute()

    def gather(self, value: T, asked: str = "") -> list[T]:
        return [value, self._other]


class Rank1(Rank0):
    """Rank 1, which hears what rank 0 has."""

    rank = 1

    def of_first(self, compute: Callable[[], T], asked: str = "") -> T:
        heard: T = self._other.pop(0)
        return heard


def failing() -> Iterator[Batch]:
    raise LoaderError("step 3: its batch could not be made: OSError: gone")
    yield BATCH


def test_a_batch_that_another_rank_cannot_read_stops_this_one() -> None:
    assert next_of(iter([BATCH]), Rank0(None), 3) is BATCH
    with pytest.raises(LoaderError, match=r"^rank 1: step 3: its batch was not made$"):
        next_of(iter([BATCH]), Rank0("step 3: its batch was not made"), 3)


def test_ones_own_batch_is_told_in_its_own_words() -> None:
    for ranks in (ONE, Rank0(None), Rank0("the same")):
        with pytest.raises(LoaderError, match=r"^step 3: its batch could not be made: OSError: gone$"):
            next_of(failing(), ranks, 3)


def test_a_check_that_comes_back_to_rank_0_reaches_the_others() -> None:
    """The alarm is sounded on every rank, since all of them run the step again."""
    from lockstep.core.parity.measures.compare import exact
    from lockstep.core.parity.measures.verdict import Check

    bad = Check(2, (exact("tokens", "order", 1, 4, "", ""),), ())
    assert bad.verdict == "disagreed"
    sounded: list[int] = []

    def alarm(check: Check) -> tuple[Check, None]:
        sounded.append(check.step)
        return check, None

    checks = Checks([], alarm, Rank1([bad, (3, "busy"), None]))
    checks.deliver(iter(()))
    assert sounded == [2] and checks.bad == 2
