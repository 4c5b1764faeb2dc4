"""`lockstep faults`: findings are compared with the expected ones, and no error is passed over."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lockstep.core.backend import Batch
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults import FAULTS, Fault
from lockstep.parity_tests.faults.data import LoaderStartsOver
from lockstep.parity_tests.faults.fault import Batches
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.scripts.commands.faults import stamp, with_recipe
from lockstep.scripts.shared import scoreboard
from lockstep.scripts.shared.planting import HONEST_STEPS, Bench, chosen
from lockstep.scripts.shared.scoreboard import HONEST, Row
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

pytestmark = pytest.mark.usefixtures("in_one_process")
BY_NAME = {fault.name: fault for fault in FAULTS}
FOUND = Row("F", "bf16/eager", "", None, ("q", "forward", 1), 2, 1, 1e-3, None, step=2, rank=1, loss_moved=1e-4)


@dataclass
class Data:
    """The data of a run, without a folder."""

    config: RunConfig

    def batch(self, step: int) -> Batch:
        return text_batch(self.config, step)


class Crashing(TorchBackend):
    """Its step raises."""

    class session_class(TorchSession):
        def step(self, batch: Batch, *, norms: bool = False):
            raise RuntimeError("no such kernel")


class NotPlanted(TorchBackend):
    """An honest trainer that claims to be wrong."""


class WrongFromTheStart(LoaderStartsOver):
    """A loader that claims to be honest until step 2."""

    @staticmethod
    def loader(batches: Batches) -> Batches:
        return lambda step: batches(step + 1)


@pytest.fixture(scope="module")
def bench() -> Bench:
    config = tiny_config("bf16")
    return Bench(config, Data(config), JaxBackend(), TorchBackend())


def test_the_honest_trainer_is_not_accused(bench: Bench) -> None:
    row = bench.honest_row()
    assert (row.name, row.step, row.checks, row.broken_promises) == (HONEST, None, HONEST_STEPS, [])
    assert row.seconds > 0


def test_rows_without_their_causes_are_not_those_that_a_resumed_run_asks_for(tmp_path: Path) -> None:
    file, config = tmp_path / "rows.json", tiny_config("bf16")
    scoreboard.write(file, [FOUND], stamp(config, "none"))
    assert scoreboard.read(file, stamp(config, "none")) == [FOUND]
    assert scoreboard.read(file, stamp(config, "promised")) == []


FOUND_AS_PROMISED = (
    "BranchDamped",
    "SkipGradientShort",
    "LoaderStartsOver",
    "GradientsNotZeroed",
    "AttentionLogitsUnscaled",
    "AveragedWeightsStay",
    "SamplingFreesMoments",
    # Found only if a step records norms by group.
    "NormsByGroupAfterClipping",
)


@pytest.mark.parametrize("name", FOUND_AS_PROMISED)
def test_a_fault_is_found_where_and_when_it_is_promised(name: str, bench: Bench) -> None:
    fault = BY_NAME[name]
    row = bench.row(fault)
    assert row.broken_promises == []
    assert (row.step, row.named) == (fault.first_step, fault.origin(2))


def test_what_does_not_repeat_is_called_so(bench: Bench) -> None:
    assert "does not repeat" in bench.row(BY_NAME["OneBitFlips"]).cause


def test_a_fault_that_crashes_is_a_row_that_says_so(bench: Bench) -> None:
    row = bench.row(Fault(Crashing, "q"))
    assert "no such kernel" in row.error
    assert "no such kernel" in row.broken_promises[0]


def test_a_fault_that_is_not_there_is_missed(bench: Bench) -> None:
    assert bench.row(Fault(NotPlanted, "q", layer=0)).broken_promises == ["missed"]


def test_an_accusation_before_a_fault_acts_is_not_a_find(bench: Bench) -> None:
    row = bench.row(Fault(WrongFromTheStart, "tokens", first_step=2))
    assert (row.step, row.in_time, row.broken_promises) == (1, False, ["found in step 1, acts in 2"])


def test_a_wrong_layer_is_not_the_origin(bench: Bench) -> None:
    row = bench.row(replace(BY_NAME["BranchDamped"], layer=0))
    assert (row.rank, row.broken_promises) == (None, ["misnamed"])


@pytest.mark.parametrize(
    ("otherwise", "said"),
    [
        ({}, []),
        ({"step": None, "rank": None}, ["missed"]),
        ({"step": 3}, ["found in step 3, acts in 2"]),
        ({"step": 3, "within": 2}, []),
        ({"rank": 2}, ["its origin is number 2 of those named"]),
        ({"loss_moved": 1e-2}, ["the loss moved by 1.0e-02"]),
        ({"promised_cause": "repeat", "cause": "repeats"}, []),
        ({"promised_cause": "repeat"}, ["the cause does not name 'repeat'"]),
    ],
    ids=["kept", "missed", "late", "slow", "second", "loud", "cause", "no cause"],
)
def test_each_promise_is_held_to(otherwise: dict, said: list[str]) -> None:
    assert replace(FOUND, **otherwise).broken_promises == said


def test_totals_count_what_was_promised() -> None:
    rows = [FOUND, replace(FOUND, rank=2), replace(FOUND, step=None, rank=None), replace(FOUND, step=1)]
    counts = scoreboard.totals(rows)
    assert (counts["faults"], counts["found_in_time"], counts["named_exactly"]) == (4, 2, 1)
    assert (counts["within_top_three"], counts["accused_before_they_act"], counts["as_promised"]) == (2, 1, 1)


def test_a_scoreboard_on_disk_is_gone_on_with_only_if_its_expectations_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "board.json"
    scoreboard.write(file, [FOUND], "mark")
    assert scoreboard.read(file, "mark") == [FOUND]
    assert scoreboard.read(file, "another") == []
    assert scoreboard.read(tmp_path / "none.json", "mark") == []
    file.write_text("[]")
    with pytest.raises(UserError, match="not a scoreboard"):
        scoreboard.read(file, "mark")


def test_names_are_those_of_the_collection() -> None:
    assert [fault.name for fault in chosen(["KvHeadsTiled"])] == ["KvHeadsTiled"]
    assert len(chosen(())) == len(FAULTS)
    with pytest.raises(UserError, match="did you mean KvHeadsTiled"):
        chosen(["KvHeadTiled"])


def test_a_recipe_is_a_policy_and_a_program() -> None:
    given = with_recipe({"seed": "1"}, "fp32/compiled")
    assert given == {"seed": "1", "precision.policy": "fp32", "compile.enabled": "true"}
    with pytest.raises(UserError, match="recipe = bf16"):
        with_recipe({}, "bf16")
