"""`lockstep train --deterministic true`: what it prints and refuses, and how a stopped run goes on.

Whatever computes it, it ends with the bits of one that was never stopped.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.core.backend import State
from lockstep.core.checkpoint import taken_over
from lockstep.core.run.layout import CHECKPOINTS, INFO
from lockstep.core.train.loss_scale import SCALE
from lockstep.parity_tests.loop import candidates
from lockstep.parity_tests.loop.runs import COMPILED, INDUCTOR, Folder, one_line
from lockstep.parity_tests.tiny import tiny_config
from lockstep.torch_backend.session import TorchSession
from lockstep.torch_backend.tools.deterministic import switch

STRICT = {"deterministic": True}
HERE = candidates.__name__
# Four of six steps warm up; the run is stopped after the second.
LAST, STOP = 6, 2
SHORT = {**STRICT, "train.steps": LAST, "optim.warmup_steps": 4, "checkpoint.every": STOP, "checkpoint.keep": LAST}


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    yield
    switch(tiny_config(), torch.device("cpu"))


def test_what_is_printed_and_kept(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    short = {"train.steps": 4}
    assert folder.train("strict", STRICT | short) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "× the time of a step (measured: " in said and "step 1 repeated bit for bit (loss, 20 gradients)" in said
    info = folder.run("strict").info
    assert info["in_force"]["deterministic"].endswith("(loss, 20 gradients)")
    assert info["deterministic"]["gradients"] == 20 and min(info["deterministic"]["costs"]) > 0
    assert folder.train("plain", short) == 0
    assert "deterministic" not in folder.run("plain").info["in_force"]
    assert folder.weights("strict") == folder.weights("plain")
    assert folder.losses("strict") == folder.losses("plain")


def test_a_step_that_does_not_repeat_ends_the_run(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    drifts = ("--backend", f"{HERE}:Drifts")
    assert folder.train("drifts", STRICT, *drifts) == 2
    said = one_line(capsys.readouterr().err)
    assert said.endswith(
        "deterministic = true: step 1, repeated from the same state, gave other bits: "
        "gradients of blocks.1.mlp.up_proj.weight"
    )
    assert not (folder.path / "drifts").exists()
    assert folder.train("drifts", {"train.steps": 4}, *drifts) == 0


def test_an_operation_that_torch_refuses_ends_the_run(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert folder.train("puts", STRICT, "--backend", f"{HERE}:Puts") == 2
    said = one_line(capsys.readouterr().err)
    assert "put_ has no deterministic kernel on cpu" in said and "in the forward pass, after nll" in said
    assert not (folder.path / "puts").exists()


def test_a_run_goes_on_only_where_it_began(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**STRICT, "train.steps": 4, "checkpoint.every": 2}
    assert folder.train("mine", settings) == 0
    forget(folder, "mine", 2)
    before = (folder.path / "mine" / INFO).read_bytes(), folder.records("mine")
    threads = torch.get_num_threads()
    capsys.readouterr()
    try:
        torch.set_num_threads(threads + 1)
        assert folder.resume("mine", "--train.micro-batch-size", "1") == 2
    finally:
        torch.set_num_threads(threads)
    said = one_line(capsys.readouterr().err)
    assert f"continues only under the same conditions: threads was {threads}, is {threads + 1}; " in said
    assert said.endswith("train.micro_batch_size was 2, is 1")
    assert ((folder.path / "mine" / INFO).read_bytes(), folder.records("mine")) == before
    assert folder.resume("mine") == 0


def forget(folder: Folder, name: str, step: int) -> None:
    """Take the checkpoints after `step` away, as if the run had been killed before the next one."""
    for path in (folder.path / name / CHECKPOINTS).iterdir():
        if path.name > f"step_{step:06d}":
            shutil.rmtree(path)


KINDS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "aot_eager": COMPILED,
    "inductor": INDUCTOR,
    "fp8": {"precision.policy": "fp8_tensorwise"},
    # The scale doubles at steps 2, 4 and 6, so that its count is lost if it is not kept.
    "fp16": {"precision.policy": "fp16", "precision.loss_scale_interval": 2},
    "accumulation": {"train.batch_size": 6, "train.micro_batch_size": 1},
    "muon": {"optim.name": "muon"},
    "torchao": {"optim.name": "adamw8bit"},
    "bitsandbytes": {"optim.name": "adamw8bit", "optim.eight_bit": "bitsandbytes"},
    "jax": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_in_the_midst_of_the_warm_up(kind: str, folder: Folder) -> None:
    backend = ("--backend", "jax") if kind == "jax" else ()
    assert folder.train("run", SHORT | KINDS[kind], *backend) == 0
    kept = content(folder)
    rates = [record["lr"] for record in folder.records("run")]
    assert rates[STOP - 1] < rates[STOP] < rates[STOP + 1], "it is stopped in the warm-up"
    forget(folder, "run", STOP)
    assert folder.resume("run") == 0
    assert [r["step"] for r in folder.run("run").info["resumes"]] == [STOP]
    assert content(folder) == kept


def content(folder: Folder) -> tuple[bytes, list[tuple[Any, ...]]]:
    """Return the last weights, and of each step the values whose bits must be the same."""
    keys = ("step", "digest", "loss", "lr", "grad_norm", "clip_coefficient", "metrics")
    return folder.weights("run"), [tuple(record[key] for key in keys) for record in folder.records("run")]


@pytest.mark.parametrize("lost", ["exp_avg", "exp_avg_sq", "loss_scale"])
def test_what_a_checkpoint_loses_is_seen(lost: str, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative twin: the comparison above sees a moment or a scale that is not kept."""
    load = TorchSession.load

    def load_less(self: TorchSession, state: State) -> None:
        if lost == "loss_scale":
            scalars = {**state.scalars, SCALE: 2 * state.scalars[SCALE]}
            return load(self, replace(state, scalars=scalars))
        zeros = {name: 0 * moment for name, moment in state.optimizer[lost].items()}
        return load(self, replace(state, optimizer={**state.optimizer, lost: zeros}))

    assert folder.train("run", SHORT | KINDS["fp16"]) == 0
    kept = content(folder)
    forget(folder, "run", STOP)
    monkeypatch.setattr(TorchSession, "load", load_less)
    # A resume sees it by itself (core/checkpoint/taken_over.py).
    assert folder.resume("run") == 2
    monkeypatch.setattr(taken_over, "_differing", lambda *given: [])
    assert folder.resume("run") == 0
    assert content(folder) != kept
