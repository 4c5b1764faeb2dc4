"""Tiny evidence, checks and runs for the tests of this folder, and the candidates that produce them."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch.nn.functional as F

from lockstep.core.backend import Batch
from lockstep.core.checkpoint.format import save_checkpoint
from lockstep.core.config.schema import RunConfig
from lockstep.core.files.jsonl import sealed_line
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.evidence.recorded import observe, probe_of, save_observations
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.measures.verdict import Check, Finding
from lockstep.core.run.directory import RunDir
from lockstep.core.run.layout import CHECKPOINTS, OBSERVATIONS
from lockstep.jax_backend.backend import JaxBackend
from lockstep.jax_backend.session import JaxSession
from lockstep.parity_tests.kept_references import Shared
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

# Most tests of checks use this configuration, and so share the reference's compiled programs.
CONFIG = tiny_config("bf16")
STEPS = CONFIG.train.steps
VERSIONS = {"torch": "2.13.0", "numpy": "2.0"}


def backend(session: type[TorchSession]) -> TorchBackend:
    """Return a backend that opens sessions of this class."""
    made = TorchBackend()
    made.session_class = session
    return made


class SharedJax(JaxBackend):
    """The base class of references that a test defines: it opens the shared sessions of `JaxBackend`."""

    def open(self, config: RunConfig) -> JaxSession:
        session: JaxSession = Shared(JaxBackend()).open(config)
        return session


def reference(config: RunConfig = CONFIG) -> Reference:
    return Reference.open(JaxBackend(), config)


def evidence_of(session: TorchSession, number: int = 0) -> Evidence:
    batch = uneven_weights(text_batch(session.config, number), number)
    return gather(session, session.config, batch, due=batch.digest())


def checked(made: TorchBackend, config: RunConfig = CONFIG) -> tuple[Evidence, Check]:
    """Return the evidence of a candidate's first step, and the check of it."""
    evidence = evidence_of(made.open_rank(config))
    return evidence, judge(evidence, reference(config))


class Gelu(TorchSession):
    """The first block uses GELU in place of SiLU, from step `since` on."""

    since = 1

    def build_model(self):
        model = super().build_model()
        right = model.blocks[0].mlp.activate

        def wrong(gate, up):
            return F.gelu(gate) * up if self.steps_done + 1 >= self.since else right(gate, up)

        model.blocks[0].mlp.activate = wrong
        return model


@cache
def of_gelu() -> tuple[Evidence, Check]:
    """Return `checked` of `Gelu`, computed once. Tests must not change it."""
    return checked(backend(Gelu))


class GeluFrom7(Gelu):
    since = 7


class BadAt7(Gelu):
    """The first block uses GELU in step 7 alone."""

    def build_model(self):
        model = super().build_model()
        right, wrong = TorchSession(self.config).model.blocks[0].mlp.activate, model.blocks[0].mlp.activate
        model.blocks[0].mlp.activate = lambda gate, up: (wrong if self.steps_done == 6 else right)(gate, up)
        return model


class Flips(TorchSession):
    """One element of one gradient is wrong in the first step of the class, and never again (FAULTS #34)."""

    struck = False

    def accumulate(self, batch):
        result = super().accumulate(batch)
        if not type(self).struck:
            type(self).struck = True
            self.parameters["blocks.1.mlp.up_proj.weight"].grad[3, 5] += 1.0
        return result


class HiddenMomentum(TorchSession):
    """Each step adds a tenth of the last step's gradients to its own. They are not in the state; a load clears them."""

    _last = None

    def _update(self, grads, coefficient, lr, finite):
        last, self._last = self._last, [grad.clone() for grad in grads]
        for grad, old in zip(grads, last or (), strict=last is not None):
            grad.add_(old, alpha=0.1)
        super()._update(grads, coefficient, lr, finite)

    def load(self, state):
        super().load(state)
        self._last = None


class SumsInBf16(TorchSession):
    """The sum of gradients over micro-batches is rounded to bf16."""

    def accumulate(self, batch):
        result = super().accumulate(batch)
        if len(batch.tokens) > self.config.train.micro_batch_size:
            for p in self.parameters.values():
                p.grad = p.grad.bfloat16().to(p.grad.dtype)
        return result


def run_batch(config: RunConfig, step: int) -> Batch:
    """Return the batch that these runs train on in a step."""
    return text_batch(config, step)


def make_run(
    path: Path,
    session: type[TorchSession],
    steps: int = STEPS,
    checkpoints: tuple[int, ...] = (),
    sketches: tuple[int, ...] = (),
) -> RunDir:
    """Make a run directory as `lockstep train` does, with checkpoints and sketches at these steps."""
    config = CONFIG
    run = RunDir.create(path, config, {"backend": "torch"})
    trainer = session(config)
    for step in range(1, steps + 1):
        batch = run_batch(config, step)
        if step in sketches:
            probe = probe_of(batch, config)
            save_observations(run.path / OBSERVATIONS, step, batch, probe, observe(trainer, config, probe))
        run.append_record(trainer.step(batch))
        if step in checkpoints:
            save_checkpoint(run.path / CHECKPOINTS, trainer.state(), {})
    run.close()
    return RunDir.open(path)


def fake_check(path: Path, step: int, verdict: str) -> None:
    """Append a check of a step with this verdict to parity.jsonl."""
    with (path / "parity.jsonl").open("ab") as file:
        file.write(sealed_line({"schema": 2, "step": step, "verdict": verdict, "stages": []}))


def run_here(folder, made):
    """Run the repro script in this process, which has imported torch already; return its exit code."""
    folder.mkdir(exist_ok=True)
    np.savez(folder / "stage.npz", **made.tensors)
    (folder / "repro.py").write_text(made.script)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(folder / "repro.py"), run_name="__main__")
    return stop.value.code


class Accused:
    """A stand-in for a check, with an origin that the test chooses."""

    def __init__(self, step, findings, not_covered, accused: Finding):
        self.step, self.findings, self.not_covered = step, (*findings, accused), not_covered
        self.origin = self.worst = accused
