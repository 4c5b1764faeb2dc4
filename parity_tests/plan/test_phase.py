"""Phases add up as memory does."""

from lockstep.core.plan.phase import Phase, Tape, held


def test_a_sum_is_the_walk():
    tape = Tape({"before": 3.0})
    tape.make(a=5.0)
    tape.make(b=2.0)
    tape.free("a", "before")
    assert tape.phase == Phase(-1.0, 7.0, 7.0)
    assert tape.phase + tape.phase == Phase(-2.0, 7.0, 14.0)
    assert held(4.0) + tape.phase == Phase(3.0, 11.0, 7.0)


def test_many_are_a_loop():
    grows, shrinks = Phase(2.0, 7.0, 1.0), Phase(-2.0, 5.0, 1.0)
    for phase in (grows, shrinks):
        walked = Phase()
        for _ in range(9):
            walked += phase
        assert phase.times(9) == walked
    assert grows.times(0) == Phase()
