"""A run that goes on keeps what `auto` stood for when it was made."""

from __future__ import annotations

import pytest

from lockstep.core.config import auto
from lockstep.core.config.auto import BEFORE, ON_CPU, on_cpu
from lockstep.core.run import directory
from lockstep.core.run.info import read_info, write_info
from lockstep.parity_tests.loop.runs import STEPS, Folder

EVERY_4 = {"checkpoint.every": 4, "checkpoint.keep": 20, "checkpoint.best": False}
SINCE_4 = ("--from-step", "4")


def kept(folder: Folder, stands_for: dict[str, object]) -> None:
    path = folder.path / "run" / "run.json"
    write_info(path, {key: value for key, value in read_info(path).items() if key != "seal"} | {ON_CPU: stands_for})


@pytest.mark.parametrize(
    ("settings", "by_another_rule"),
    [
        ({}, {"attention.kernel": "math", "optim.fused": True}),
        (
            {"precision.policy": "fp32", "model.hidden": 256, "model.ffn_hidden": 1024},
            {**BEFORE, "precision.cpu_products": "blas"},
        ),
    ],
    ids=["bf16", "fp32"],
)
def test_an_earlier_run_goes_on_bit_for_bit(
    settings: dict[str, object], by_another_rule: dict[str, object], folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a Lockstep made it that had no rule and kept nothing of it."""
    with monkeypatch.context() as earlier:
        for module in (auto, directory):
            earlier.setattr(module, "on_cpu", lambda config: dict(BEFORE))
        assert folder.train("run", EVERY_4 | settings) == 0
    path = folder.path / "run" / "run.json"
    info = {key: value for key, value in read_info(path).items() if key not in (ON_CPU, "seal")}
    assert info["config"]["attention.kernel"] == info["config"]["optim.fused"] == "auto"
    write_info(path, info)
    losses, weights = folder.losses("run"), folder.weights("run")
    assert folder.resume("run", *SINCE_4) == 0
    assert folder.losses("run") == losses
    assert folder.weights("run") == weights
    # The negative twin: by another rule it would be another run.
    kept(folder, by_another_rule)
    assert folder.resume("run", *SINCE_4) == 0
    assert folder.losses("run")[:4] == losses[:4]
    assert folder.losses("run")[4:] != losses[4:]


def test_a_run_goes_on_with_what_it_keeps_whatever_the_rule_says_then(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With another micro-batch too, and beside its run file, which has `auto`."""
    for which in ("builds_bf16_products", "has_cpp_compiler"):
        monkeypatch.setattr(auto, which, lambda: False)
    assert folder.train("run", EVERY_4) == 0
    losses = folder.losses("run")
    told = folder.run("run").info
    assert told[ON_CPU] == on_cpu(folder.run("run").asked)
    assert told[ON_CPU].items() >= {"attention.kernel": "math", "optim.fused": True}.items()
    assert "math kernel" in told["in_force"]["attention"] and "fused" in told["in_force"]["optimizer"]
    monkeypatch.setattr(auto, "SHORT", 1)
    assert folder.resume("run", *SINCE_4) == 0
    assert folder.losses("run") == losses
    capsys.readouterr()
    assert folder.resume("run", *SINCE_4, "--train.micro-batch-size", "4") == 0
    assert "scaled_dot_product_attention, math kernel" in capsys.readouterr().out
    assert [step for step, _ in folder.losses("run")] == list(range(1, STEPS + 1))


def test_another_kernel_on_purpose_is_a_branch(folder: Folder) -> None:
    assert folder.train("run", EVERY_4) == 0
    assert folder.resume("run", *SINCE_4, "--attention.kernel", "flash", "--optim.fused", "false") == 0
    gone_on = folder.run("run")
    told = {"attention.kernel": ["auto", "flash"], "optim.fused": ["auto", False]}
    assert gone_on.info["resumes"][-1]["changed"] == told
    assert (gone_on.config.attention.kernel, gone_on.config.optim.fused) == ("flash", False)
    assert gone_on.config_at(4).attention.kernel == on_cpu(gone_on.asked)["attention.kernel"] != "flash"


def test_a_branch_in_fp32_multiplies_fp32(folder: Folder) -> None:
    """A library of bf16 operands is the run's; the branch has one that multiplies FP32 on this machine."""
    assert folder.train("run", EVERY_4) == 0
    assert folder.resume("run", *SINCE_4, "--precision.policy", "fp32") == 0
    assert [step for step, _ in folder.losses("run")] == list(range(1, STEPS + 1))
    assert folder.run("run").config.precision.cpu_products in ("brgemm", "onednn", "blas")
