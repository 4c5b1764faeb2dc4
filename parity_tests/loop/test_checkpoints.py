"""Which checkpoints a run writes and keeps, what they cost it, and what becomes of it when they cannot be written."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lockstep.torch_backend.checkpoint
from lockstep.core.checkpoint.format import list_checkpoints, read_random
from lockstep.core.files.jsonl import read_lines
from lockstep.core.run.checkpoints import Checkpointer
from lockstep.parity_tests.loop.runs import STEPS, Folder, one_line
from lockstep.parity_tests.stored import stored
from lockstep.torch_backend.checkpoint import WritingTorch


def steps_kept(folder: Folder, name: str) -> list[int]:
    return [int(p.name.removeprefix("step_")) for p in list_checkpoints(folder.path / name / "checkpoints")]


def test_the_last_every_nth_and_the_best_are_kept(folder: Folder) -> None:
    """The learning rate is so high that the validation loss rises after its best."""
    settings = {
        "checkpoint.every": 2,
        "checkpoint.keep": 2,
        "checkpoint.keep_every": 4,
        "eval.every": 1,
        "optim.peak_lr": 3.0,
        "optim.min_lr_ratio": 1.0,
    }
    assert folder.train("one", settings) == 0
    losses = {r["step"]: r["metrics"]["val/loss"] for r in folder.records("one")}
    best = min(losses, key=losses.__getitem__)
    saved = {line["step"]: line for line in read_lines(folder.path / "one" / "checkpoints.jsonl")}
    others = {4, 8, 12, *sorted(saved)[-2:]}
    assert best not in others, f"choose other settings: the best is kept for another reason: {losses}"
    assert steps_kept(folder, "one") == sorted({*others, best})
    lowest = [s for s, loss in losses.items() if all(loss < losses[t] for t in range(1, s))]
    assert sorted(saved) == sorted({*range(2, STEPS + 1, 2), *lowest})
    assert {s for s, line in saved.items() if line["reason"] == "best"} == set(lowest) - {STEPS}
    assert saved[STEPS]["reason"] == "end"
    assert all(line["wait_seconds"] >= 0 and line["write_seconds"] > 0 for line in saved.values())
    last = folder.path / "one" / "checkpoints" / f"step_{STEPS:06d}"
    assert saved[STEPS]["bytes"] == sum(p.stat().st_size for p in last.rglob("*"))
    assert folder.train("two", settings | {"checkpoint.best": False}) == 0
    assert steps_kept(folder, "two") == [4, 8, 10, 12]


def test_the_best_is_known_after_a_resume(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"eval.every": 1, "optim.peak_lr": 0.3, "optim.min_lr_ratio": 1.0, "checkpoint.every": 1}
    assert folder.train("straight", settings) == 0
    folder.stop("stopped", settings, 15, after=8)  # type: ignore[arg-type]
    assert folder.resume("stopped") == 0
    assert steps_kept(folder, "stopped") == steps_kept(folder, "straight")


def test_what_is_saved_beside_weights_and_moments(folder: Folder) -> None:
    assert folder.train("one", {"precision.policy": "fp16"}) == 0
    path = folder.path / "one" / "checkpoints" / f"step_{STEPS:06d}"
    extra = json.loads((path / "extra.json").read_text())
    assert extra["tokens_seen"] == STEPS * 4 * 32
    assert extra["data_fingerprint"] == folder.run("one").info["data"]["fingerprint"]
    assert extra["config"]["precision"]["policy"] == "fp16" and extra["versions"]["torch"]
    assert "wandb_id" in extra
    assert set(read_random(path)) == {"python", "python/gauss", "numpy", "numpy/gauss", "session/torch_cpu"}
    assert stored(path).scalars["loss_scale"] > 0


class Slow(WritingTorch):
    """Writes when it is let."""

    begun, let = threading.Event(), threading.Event()
    steps_meanwhile = 0

    def wait(self) -> None:
        self.begun.set()
        assert self.let.wait(60)
        super().wait()


def test_training_goes_on_while_a_checkpoint_is_written(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is not let through before three more steps were recorded; its bits are those of its own step."""
    assert folder.train("straight", {"checkpoint.every": 5, "checkpoint.keep": 9}) == 0
    Slow.begun.clear()
    Slow.let.clear()
    monkeypatch.setattr(lockstep.torch_backend.checkpoint, "WritingTorch", Slow)

    def let() -> None:
        assert Slow.begun.wait(60)
        while len(folder.records("slow")) < 8:
            pass
        Slow.steps_meanwhile = len(folder.records("slow"))
        assert steps_kept(folder, "slow") == []
        Slow.let.set()

    watcher = threading.Thread(target=let)
    watcher.start()
    assert folder.train("slow", {"checkpoint.every": 5, "checkpoint.keep": 9}) == 0
    watcher.join()
    assert Slow.steps_meanwhile >= 8
    assert steps_kept(folder, "slow") == [5, 10, 12]
    for step in (5, 10, 12):
        one, other = (stored(folder.path / n / "checkpoints" / f"step_{step:06d}") for n in ("slow", "straight"))
        assert all(one.params[name].tobytes() == p.tobytes() for name, p in other.params.items())


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refusing(path: str) -> Callable[..., None]:
    """`os.rename` on a disk that is full, for checkpoints alone."""
    rename = os.rename

    def refuse(source: Any, target: Any) -> None:
        full() if path in str(target) else rename(source, target)

    return refuse


def test_a_checkpoint_that_the_disk_refuses_is_told_and_the_next_one_tried(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At an interval training goes on; at the end there is none to try again at (parity_tests/guards)."""
    assert folder.train("straight", {"checkpoint.every": 3}) == 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refusing("step_000006"))
        capsys.readouterr()
        assert folder.train("one", {"checkpoint.every": 3}) == 0
    (said,) = (line for line in capsys.readouterr().out.splitlines() if "cannot write" in line)
    assert "step_000006: No space left on device; those before it stay, and the next interval tries again" in said
    assert [p.name for p in (folder.path / "one" / "checkpoints").iterdir()] == ["step_000009", "step_000012"]
    assert folder.weights("one") == folder.weights("straight")
    assert [line["step"] for line in read_lines(folder.path / "one" / "checkpoints.jsonl")] == [3, 9, 12]


@pytest.mark.parametrize("at_once", [False, True])
def test_one_that_the_disk_refuses_in_the_step_of_ctrl_c_ends_with_2(
    at_once: bool, folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was due at an interval, and yet none follows, whether it is refused before the step is over or after."""
    from lockstep.parity_tests.loop.test_elastic import three_steps

    with monkeypatch.context() as patch:
        three_steps(patch, 6)
        patch.setattr(os, "rename", refusing("step_000006"))
        if at_once:
            collect = Checkpointer.collect

            def joined(self: Checkpointer) -> Any:
                if self._thread is not None:
                    self._thread.join()
                return collect(self)

            patch.setattr(Checkpointer, "collect", joined)
        assert folder.train("one", {"checkpoint.every": 3}) == 2
    said = one_line(capsys.readouterr().err)
    assert "step_000006: No space left on device; continue with: lockstep train --resume" in said
    assert steps_kept(folder, "one") == [3]


def test_what_is_being_written_when_training_fails_is_kept(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lockstep.torch_backend.session import TorchSession

    step = TorchSession.step

    def fails(self: TorchSession, batch: Any, *, norms: bool = False) -> Any:
        if self.steps_done == 3:
            raise RuntimeError("no such luck")
        return step(self, batch, norms=norms)

    monkeypatch.setattr(TorchSession, "step", fails)
    assert folder.train("one", {"checkpoint.every": 3}) == 2
    assert "no such luck" in one_line(capsys.readouterr().err)
    assert steps_kept(folder, "one") == [3]
    assert [p.name for p in (folder.path / "one" / "checkpoints").iterdir()] == ["step_000003"]


CONVERSIONS = [("torch", "jax"), ("jax", "torch"), ("torch", "safetensors"), ("jax", "safetensors")]


@pytest.mark.parametrize(("made", "to"), CONVERSIONS)
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adamw8bit"])
def test_a_checkpoint_converted_there_and_back_has_the_same_bits(
    folder: Folder, made: str, to: str, optimizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from lockstep.core.parity.judge.update import flat
    from lockstep.scripts import cli

    settings = {"optim.name": optimizer, "train.steps": 4, "optim.warmup_steps": 2, "precision.policy": "fp16"}
    assert folder.train("one", settings, "--backend", made) == 0
    first = folder.path / "one" / "checkpoints" / "step_000004"
    there, back = folder.path / "there", folder.path / "back"
    assert cli.run(["convert", str(first), str(there), "--to", to]) == 0
    assert cli.run(["convert", str(there), str(back), "--to", made]) == 0
    due = flat(stored(first))
    for path in (there, back):
        found = flat(stored(path))
        assert found.keys() == due.keys()
        assert all(found[name].tobytes() == a.tobytes() and found[name].dtype == a.dtype for name, a in due.items())
        assert (path / "extra.json").read_bytes() == (first / "extra.json").read_bytes()
    if to == "safetensors":
        from safetensors.numpy import load_file

        assert load_file(there / "params.safetensors").keys() == stored(first).params.keys()
    assert cli.run(["convert", str(first), str(there), "--to", to]) == 2
    assert "exists already" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(("made", "to"), [("torch", "jax"), ("jax", "torch")])
def test_a_run_goes_on_in_the_other_framework(folder: Folder, made: str, to: str) -> None:
    from lockstep.parity_tests.loop.test_elastic import three_steps
    from lockstep.scripts import cli

    settings = {"precision.policy": "fp64"}
    assert folder.train("straight", settings, "--backend", made) == 0
    with pytest.MonkeyPatch.context() as patch:
        three_steps(patch, 5)
        assert folder.train("one", settings, "--backend", made) == 130
    assert cli.run(["convert", str(folder.path / "one"), str(folder.path / "other"), "--to", to]) == 0
    assert folder.run("other").info["backend"] == to
    assert folder.resume("other") == 0
    straight, other = folder.records("straight"), folder.records("other")
    assert [r["digest"] for r in other] == [r["digest"] for r in straight]
    assert [r["loss"] for r in other[:5]] == [r["loss"] for r in straight[:5]]
    assert [r["loss"] for r in other] == pytest.approx([r["loss"] for r in straight], rel=1e-12)


def test_what_cannot_be_converted(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    from lockstep.scripts import cli

    assert folder.train("one") == 0
    path = folder.path / "one" / "checkpoints" / f"step_{STEPS:06d}"
    capsys.readouterr()

    def refused(*words: str | Path) -> str:
        assert cli.run(["convert", *map(str, words)]) == 2
        return one_line(capsys.readouterr().err)

    assert "neither a checkpoint nor a run" in refused(folder.path / "nowhere", folder.path / "to")
    assert "--to torch or --to jax" in refused(folder.path / "one", folder.path / "to")
    assert "cannot make /proc/nowhere: No such file" in refused(path, "/proc/nowhere/to")
    (weights,) = path.glob("*model*")
    weights.write_bytes(weights.read_bytes()[:-1])
    assert f"{weights} has" in refused(path, folder.path / "to")
    assert not (folder.path / "to").exists()
