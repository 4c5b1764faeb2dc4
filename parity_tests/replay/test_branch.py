"""A run that was set back is bisected as it was: the branch, with what stood before it."""

from __future__ import annotations

import pytest

from lockstep.core.checkpoint.format import checkpoint_step
from lockstep.core.errors import UserError
from lockstep.core.parity.modes.bisect import bisect_run
from lockstep.core.run.branches import RunBranch
from lockstep.core.run.directory import RunDir
from lockstep.core.run.layout import CHECKPOINTS
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.replay.made import CONFIG, GeluFrom7, backend, make_run, run_batch


def set_back(path, step):
    run = RunDir.open(path, write=True)
    run.resume_from(step)
    run.close()
    return RunDir.open(path)


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", GeluFrom7, steps=10, checkpoints=(4, 8))


def steps_of(run):
    return [line["step"] for line in run.records()], [checkpoint_step(p) for p in run.checkpoints()]


def test_it_holds_what_was_taken_away_and_what_stood_before(run):
    was = run.records()
    assert steps_of(set_back(run.path, 6)) == ([1, 2, 3, 4, 5, 6], [4])
    assert steps_of(RunBranch(RunDir.open(run.path), 1)) == (list(range(1, 11)), [4, 8])
    # Set back further: the first branch begins in what the second took away.
    after = set_back(run.path, 2)
    assert steps_of(after) == ([1, 2], [])
    assert RunBranch(after, 1).records() == was
    assert steps_of(RunBranch(after, 2)) == ([1, 2, 3, 4, 5, 6], [4])
    assert (run.path / CHECKPOINTS).is_dir()


def test_the_fault_that_was_rolled_back_is_found(run):
    after = set_back(run.path, 4)
    found = bisect_run(
        RunBranch(after, 1),
        lambda step: run_batch(CONFIG, step),
        backend(GeluFrom7),
        JaxBackend(),
        lambda line: None,
        with_cause=False,
    )
    assert found.first_bad_step == 7 and found.differs_at is None


def test_a_branch_that_is_not_there(run):
    with pytest.raises(UserError, match="has no branch 1: it has none"):
        RunBranch(run, 1)
    with pytest.raises(UserError, match="has no branch 3: it has 1 to 1"):
        RunBranch(set_back(run.path, 5), 3)
