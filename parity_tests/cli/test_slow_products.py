"""One line of advice where this CPU's bf16 products are far slower than FP32's. The machine is a stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.core.config.file import load_config
from lockstep.core.config.schema import RunConfig
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.parity_tests.clock import Clock
from lockstep.parity_tests.repository import REPO
from lockstep.scripts.shared import slow_products as asking
from lockstep.scripts.shared.slow_products import slow_products
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.tools import bf16_products

QUICKSTART = REPO / "configs/quickstart.toml"


class Machine:
    """Products that take so many seconds of a clock that stands still otherwise, the first one an hour."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bf16: float) -> None:
        self._seconds = {torch.bfloat16: bf16, torch.float32: 1.0}
        self._clock, self._seen = Clock(), set[torch.dtype]()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(bf16_products, "time", self._clock)
        monkeypatch.setattr(bf16_products, "_product", self._product)

    def _product(self, a: torch.Tensor) -> None:
        self._clock.sleep(self._seconds[a.dtype] if a.dtype in self._seen else 3600.0)
        self._seen.add(a.dtype)


def quickstart(**given: str) -> RunConfig:
    return load_config(QUICKSTART, {"device": "cpu", **given})


def test_the_factor_is_that_of_products_which_are_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, 92.0)
    assert TorchBackend().bf16_slowdown(quickstart()) == 92


def test_a_real_product_is_measured() -> None:
    assert 0 < bf16_products.bf16_slowdown() < float("inf")


def test_one_thread_makes_the_products_and_the_others_are_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two threads and three busy programs beside them, 119 was measured as 2.3."""
    found, right, before = [], bf16_products._product, torch.get_num_threads()

    def product(a: torch.Tensor) -> torch.Tensor:
        found.append(torch.get_num_threads())
        return right(a)

    monkeypatch.setattr(bf16_products, "_product", product)
    torch.set_num_threads(2)
    try:
        bf16_products.bf16_slowdown()
        assert set(found) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("bf16", "told"), [(92.0, "bf16 products take 92 times FP32's time"), (2.0, None)])
def test_slow_products_are_told_and_others_are_not(
    bf16: float, told: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Machine(monkeypatch, bf16)
    words = slow_products(quickstart(), TorchBackend())
    assert words == (told and f"{told} on this CPU")
    assert asking.main(QUICKSTART) == 0
    assert capsys.readouterr().out == (f"{words}\n" if words else "")


def test_nothing_is_measured_where_there_is_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(self: TorchBackend, config: RunConfig) -> float:
        raise AssertionError("there was no need")

    monkeypatch.setattr(TorchBackend, "bf16_slowdown", measured)
    assert slow_products(quickstart(**{"precision.policy": "fp32"}), TorchBackend()) is None
    assert slow_products(quickstart(**{"train.steps": "1", "optim.warmup_steps": "0"}), TorchBackend()) is None
    assert slow_products(quickstart(), JaxBackend()) is None
    with pytest.raises(AssertionError):
        slow_products(quickstart(), TorchBackend())


def test_training_begins_with_the_advice(
    lockstep: Lockstep, run_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch, 92.0)
    monkeypatch.setattr(asking, "WORTH_A_LINE", 0.0)
    small = ("--train.steps", 1, "--optim.warmup-steps", 0)
    advice = "bf16 products take 92 times FP32's time on this CPU: --precision.policy fp32 trains faster"
    done = lockstep("train", run_file, *small)
    assert done.code == 0 and done.out.splitlines()[0] == advice
    assert advice not in lockstep("train", run_file, *small, "--overwrite", "--precision.policy", "fp32").out
