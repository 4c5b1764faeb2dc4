"""Example records and states for tests of run directories and checkpoints."""

from pathlib import Path

import numpy as np

from lockstep.core.backend import State, StepRecord
from lockstep.core.config.schema import CheckpointConfig, RunConfig

CONFIG = RunConfig(name="r", checkpoint=CheckpointConfig(keep=3))


def record(step: int, **changes) -> StepRecord:
    values = {"loss": 8.0 / step, "loss_weight": 2.0, "lr": 1e-3, "grad_norm": 1.0, "clip_coefficient": 0.5}
    return StepRecord(**{"step": step, "digest": "d", "tokens": 2, **values, **changes})


def state(step: int, seed: int = 0) -> State:
    rng = np.random.default_rng([step, seed])
    shapes = {"embed.weight": (7, 4), "final_norm.weight": (4,)}

    def arrays(dtype):
        return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}

    return State(step, arrays(np.float32), {"exp_avg": arrays(np.float32), "exp_avg_sq": arrays(np.float64)})


def assert_same_state(ours: State, theirs: State) -> None:
    assert ours.step == theirs.step
    groups = [(ours.params, theirs.params)]
    assert ours.optimizer.keys() == theirs.optimizer.keys()
    groups += [(ours.optimizer[kind], theirs.optimizer[kind]) for kind in ours.optimizer]
    for left, right in groups:
        assert left.keys() == right.keys()
        for name in left:
            assert left[name].dtype == right[name].dtype and left[name].shape == right[name].shape
            assert left[name].tobytes() == right[name].tobytes(), name


def everything_under(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))
