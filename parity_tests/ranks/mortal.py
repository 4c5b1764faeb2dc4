"""Trainers in which one rank is killed during a step of the first start, as by the kernel's OOM killer."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from lockstep.core.backend import Batch
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession


def killed(rank: int, step: int) -> type[TorchSession]:
    """Return a session class in which `rank` kills itself at `step`, but not after a restart by torchrun."""

    class Session(TorchSession):
        def total_weight(self, batch: Batch) -> object:  # type: ignore[override]
            first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
            mine = rank == (self.ranks.rank if self.ranks else 0)
            if first and mine and self.steps_done + 1 == step:
                while step > 3 and not Path("runs/tiny/checkpoints/step_000003").exists():  # wait until it is complete
                    time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGKILL)
            return super().total_weight(batch)

    return Session


class KilledRankZero(TorchBackend):
    session_class = killed(0, 6)


class KilledRankOne(TorchBackend):
    session_class = killed(1, 6)


class KilledBeforeACheckpoint(TorchBackend):
    session_class = killed(1, 2)
