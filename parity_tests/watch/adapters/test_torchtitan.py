"""`watch_torchtitan` on torchtitan's own Trainer, which the tests do not install: without it, runs are skipped."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep import watch_torchtitan
from lockstep.core.errors import UserError
from lockstep.parity_tests.watch.processes import answers
from lockstep.torch_backend.watch.adapters.torchtitan import NOT_TAKEN, declared_by, one_over_targets

AGREED = "agreed in 3 checks against your own module"
NEEDED = ("torchtitan", "spmd_types", "torchdata")
needs_torchtitan = pytest.mark.skipif(
    any(find_spec(name) is None for name in NEEDED), reason=f"{', '.join(NEEDED)} are not all installed"
)
ALL = {"clip_coefficient", "gradients", "loss", "moments", "step_count", "update"}

Told = dict[str, Any]


def told_by(folder: Path, cases: Sequence[str], size: int = 1) -> Told:
    """Train the cases; what all ranks say of them."""
    found = answers("adapters.titan_on_cpu", str(size), str(folder), *cases, size=size, timeout=400)
    assert all(one == found[0] for one in found)
    return found[0]


CLEAN = ("fp32", "bf16", "accumulated", "chunked", "chunked, bf16, accumulated")
FAULTS = {
    "times micro-batches": (1, {"loss", "gradients"}, "times the right length"),
    "mean of means": (1, {"loss", "gradients"}, ""),
    "no clip": (1, {"clip_coefficient"}, ""),
    "other betas": (1, {"update"}, "betas (0.9, 0.999), declared (0.9, 0.95)"),
    "schedule twice": (2, {"learning_rate"}, "lr 0.0004, declared 0.000266"),
}
ON_TWO = ("fp32", "chunked, bf16, accumulated", "local tokens")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told_by(tmp_path_factory.mktemp("one"), (*CLEAN, *FAULTS))


@needs_torchtitan
@pytest.mark.parametrize("case", CLEAN)
def test_a_clean_run_agrees(case: str, alone: Told) -> None:
    assert alone[case]["headline"] == AGREED, alone[case]
    assert set(alone[case]["compared"]) == ALL


@needs_torchtitan
@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_caught_and_named(case: str, alone: Told) -> None:
    step, stages, words = FAULTS[case]
    assert alone[case]["step"] == step, alone[case]
    assert set(alone[case]["stages"]) == stages
    assert words in f"{alone[case]['cause']} {alone[case]['notes']}"


@needs_torchtitan
def test_two_ranks(tmp_path: Path) -> None:
    told = told_by(tmp_path, ON_TWO, 2)
    assert told["fp32"]["headline"] == told["chunked, bf16, accumulated"]["headline"] == AGREED, told
    assert told["local tokens"]["step"] == 1
    assert set(told["local tokens"]["stages"]) == {"loss", "gradients"}


def trainer(**settings: Any) -> Any:
    """As much of a trainer as is read before it trains."""
    group = {"params": [], "param_names": ["a.weight"], "lr": 0.5, "betas": (0.9, 0.95), "fused": False}
    configured = SimpleNamespace(pattern="weight", optimizer_kwargs={"lr": 0.5, "betas": (0.9, 0.95), "other": 1})
    plain = {
        "parallel_dims": SimpleNamespace(),
        "loss_fn": type("CrossEntropyLoss", (), {})(),
        "train_step": lambda data: None,
        "config": SimpleNamespace(optimizer=SimpleNamespace(param_groups=[configured])),
        "optimizers": [SimpleNamespace(param_groups=[group])],
        "lr_schedulers": SimpleNamespace(schedulers=[SimpleNamespace(lr_lambdas=[lambda step: step / 4])]),
    }
    return SimpleNamespace(**plain | settings)


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_what_cuts_tensors_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"data parallelism alone; this trainer has {name[:2]}"):
        watch_torchtitan(trainer(parallel_dims=SimpleNamespace(**{name: True})))


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UserError, match="object is not a loss that"):
        watch_torchtitan(trainer(loss_fn=object()))
    with pytest.raises(UserError, match="accumulate= needs loss="):
        watch_torchtitan(trainer(), accumulate="mean")
    with pytest.raises(UserError, match="training has not started"):
        watch_torchtitan(trainer()).to_json()


def test_the_trainer_gets_its_own_method_back() -> None:
    one = trainer()
    stood = one.train_step
    watcher = watch_torchtitan(one)
    assert one.train_step != stood
    watcher.stop()
    assert one.train_step is stood


def test_hyperparameters_are_those_of_the_first_pattern() -> None:
    declared = declared_by(trainer())
    assert declared("a.weight", 3) == {"betas": (0.9, 0.95), "lr": 0.25}
    assert declared("_checkpoint_wrapped_module.a.weight", 3) == {"betas": (0.9, 0.95), "lr": 0.25}
    assert declared("a.bias", 3) == {}


def test_targets_of_all_micro_batches_are_counted() -> None:
    parts = [{"labels": torch.tensor([[1, -100, 2]])}, {"labels": torch.tensor([[3, 4, -100], [-100, -100, 5]])}]
    assert one_over_targets(parts) == [1 / 5, 1 / 5]
