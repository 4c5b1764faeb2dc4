"""Time accounting: every moment is charged once, to the innermost part, and nothing is lost."""

from __future__ import annotations

import pytest

from lockstep.core.train.time_accounting import PARTS, TimeAccounting


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_every_moment_is_charged_once(clock: Clock) -> None:
    spent = TimeAccounting(clock)
    clock.now += 1
    with spent.part("data"):
        clock.now += 2
    with spent.part("logging"):
        clock.now += 4
        with spent.part("checkpoint"):
            clock.now += 8
        clock.now += 16
    clock.now += 32
    assert spent.lap() == {
        "seconds/data": 2,
        "seconds/checkpoint": 8,
        "seconds/logging": 20,
        "seconds/other": 33,
    }
    clock.now += 5
    assert spent.lap() == {"seconds/other": 5}
    assert spent.lap() == {}


def test_compilation_is_a_part_of_its_own_wherever_it_happens(clock: Clock) -> None:
    compiled = [5.0]
    spent = TimeAccounting(clock, lambda: compiled[0])
    with spent.part("compute"):
        clock.now += 10
        compiled[0] += 7
    with spent.part("validation"):
        clock.now += 3
        compiled[0] += 1
    clock.now += 2
    # No more than the time that has passed.
    compiled[0] += 50
    assert spent.lap() == {"seconds/compute": 3, "seconds/compilation": 10, "seconds/validation": 2}
    assert spent.lap() == {}


def test_an_error_closes_its_part(clock: Clock) -> None:
    spent = TimeAccounting(clock)
    with pytest.raises(KeyError), spent.part("data"):
        clock.now += 1
        raise KeyError
    clock.now += 2
    assert spent.lap() == {"seconds/data": 1, "seconds/other": 2}


TOLD = {"compute": 3.0, "communication": 1.0, "optimizer": 2.0, "logging": 0.5}


@pytest.mark.parametrize(
    ("told", "rest", "found"),
    [
        (TOLD, "other", {"compute": 3, "communication": 1, "optimizer": 2, "logging": 0.5, "other": 3.5}),
        (TOLD, "checks", {"compute": 3, "communication": 1, "optimizer": 2, "logging": 0.5, "checks": 3.5}),
        ({}, "other", {"compute": 10}),
        ({"compute": 4.0, "nonsense": 3.0}, "other", {"compute": 4, "other": 6}),
        # A session that claims more than there was gets what there was.
        ({"compute": 9.0, "optimizer": 99.0}, "other", {"optimizer": 10}),
        ({"compute": 99.0, "optimizer": -5.0}, "other", {"compute": 10}),
    ],
)
def test_the_parts_of_a_step_add_up_to_it_whatever_the_session_says(
    clock: Clock, told: dict[str, float], rest: str, found: dict[str, float]
) -> None:
    spent = TimeAccounting(clock)
    with spent.part("compute"):
        clock.now += 10
    spent.split_step(told, rest)
    lap = spent.lap()
    assert lap == {f"seconds/{part}": seconds for part, seconds in found.items()}
    assert sum(lap.values()) == 10 and {name.removeprefix("seconds/") for name in lap} <= set(PARTS)


def test_a_clock_that_goes_back_takes_nothing_away(clock: Clock) -> None:
    spent = TimeAccounting(clock)
    clock.now -= 50
    with spent.part("data"):
        clock.now += 1
    assert spent.lap() == {"seconds/data": 1}
