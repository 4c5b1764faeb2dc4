"""`lockstep train --backend jax`: the reference trains by itself."""

from __future__ import annotations

import pytest

from lockstep.parity_tests.loop.runs import STEPS, Folder


def test_the_loss_falls_and_a_resumed_run_ends_with_the_same_bits(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lockstep.jax_backend.session import JaxSession

    settings = {
        "optim.peak_lr": 1e-2,
        "checkpoint.every": 5,
        "checkpoint.best": False,
        "eval.every": 6,
        "log.norms_every": 6,
    }
    assert folder.train("straight", settings, "--backend", "jax") == 0
    losses = [loss for _, loss in folder.losses("straight")]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.3
    assert folder.run("straight").info["backend"] == "jax"
    assert "val/loss" in folder.records("straight")[-1]["metrics"]
    step = JaxSession.step

    def fail(self, batch, *, norms=False):
        if self.steps_done == 7:
            raise KeyboardInterrupt
        return step(self, batch, norms=norms)

    monkeypatch.setattr(JaxSession, "step", fail)
    assert folder.train("stopped", settings, "--backend", "jax") == 130
    monkeypatch.undo()
    capsys.readouterr()
    assert folder.resume("stopped") == 0
    assert "going on from step 5" in capsys.readouterr().out
    assert folder.losses("stopped") == folder.losses("straight")
    assert folder.weights("stopped") == folder.weights("straight")
