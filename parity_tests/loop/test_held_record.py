"""A run's records are held to its settings in every step, between checks too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.core.backend import StepRecord
from lockstep.core.train.held_record import WrongRecord, require_prescribed
from lockstep.core.train.schedule import learning_rate
from lockstep.parity_tests.loop.runs import Folder, one_line
from lockstep.parity_tests.tiny import text_batch, tiny_config

CONFIG = tiny_config()
BATCH = text_batch(CONFIG)
LR = learning_rate(CONFIG.optim, 3, CONFIG.train.steps)
HONEST = StepRecord(
    step=3,
    loss=5.0,
    loss_weight=float(BATCH.weights.sum(dtype=np.float64)),
    lr=LR,
    grad_norm=4.0,
    clip_coefficient=float(np.float32(CONFIG.optim.clip_norm / (4.0 + 1e-6))),
    digest=BATCH.digest(),
    tokens=BATCH.targets.size,
)
BELOW: dict[str, Any] = {"grad_norm": CONFIG.optim.clip_norm / 2}


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"lr": float(np.float32(LR))},
        {"loss_weight": float(np.float32(HONEST.loss_weight))},
        BELOW | {"clip_coefficient": 1.0},
        {"grad_norm": np.inf, "clip_coefficient": 0.0},
    ],
)
def test_a_record_that_follows_is_let_be(told: dict[str, Any]) -> None:
    require_prescribed(replace(HONEST, **told), BATCH, 3, CONFIG)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"step": 4}, "it is the record of step 4"),
        ({"digest": "0" * 64}, "the digest of the batch is not that of the batch that the session got"),
        ({"tokens": HONEST.tokens // 2}, f"tokens {HONEST.tokens // 2:,}, where the batch has {HONEST.tokens:,}"),
        ({"loss_weight": 1.001 * HONEST.loss_weight}, "loss_weight "),
        ({"lr": LR * (1 + 1e-6)}, "lr "),
        ({"lr": float("nan")}, "lr nan"),
        ({"clip_coefficient": 1.0}, "clip_coefficient 1 for a gradient norm of 4 and optim.clip_norm = "),
        (BELOW | {"clip_coefficient": 2.0}, "clip_coefficient 2 for a gradient norm of "),
    ],
)
def test_a_record_that_does_not_is_refused(told: dict[str, Any], said: str) -> None:
    with pytest.raises(WrongRecord, match=r"^step 3: its record does not follow from the run: ") as refused:
        require_prescribed(replace(HONEST, **told), BATCH, 3, CONFIG)
    assert said in str(refused.value)


def test_all_ranks_end_if_one_has_a_wrong_record() -> None:
    class Two:
        """Rank 0, whose record is right, beside a rank 1 whose rate is wrong."""

        rank, count = 0, 2

        def of_first(self, compute: Any, asked: str = "") -> Any:
            return compute()

        def gather(self, value: Any, asked: str = "") -> list[Any]:
            return [value, "lr 1, where the schedule has 2"]

    with pytest.raises(WrongRecord, match=r"^step 3: its record on rank 1 does not follow from the run: lr 1, where"):
        require_prescribed(HONEST, BATCH, 3, CONFIG, Two())


@pytest.mark.usefixtures("in_one_process")
def test_a_rate_that_leaves_its_schedule_between_checks_ends_the_run(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under the settings of a run that names none for alarms."""
    backend = "lockstep.parity_tests.faults.reports:LeavesTheSchedule"
    assert folder.train("run", {"train.steps": 8}, "--backend", backend) == 2
    line = one_line(capsys.readouterr().err)
    assert line.startswith("lockstep: step 4: its record does not follow from the run: lr ")
    assert len(folder.records("run")) == 3
