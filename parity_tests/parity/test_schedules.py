"""The learning rate of every schedule is held to its formula in every check, and repro.py recomputes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.core.parity.diagnose.repro import repro
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.judge.judge import Reference
from lockstep.core.parity.judge.update import step_scalars
from lockstep.core.train.schedule import learning_rate
from lockstep.jax_backend.session import JaxSession
from lockstep.parity_tests.faults.optimizer import ScheduleCountsMicroBatches
from lockstep.parity_tests.replay.made import VERSIONS, backend
from lockstep.parity_tests.replay.test_repro import _Accused, run_here
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

BASE = tiny_config("fp32", train={"sequence_length": 16, "steps": 20}, hidden=32, ffn_hidden=32, layers=1)
SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {"schedule": "cosine"},
    "linear": {"schedule": "linear"},
    "wsd, 1 − √": {"schedule": "wsd", "decay_share": 0.4, "decay_shape": "sqrt"},
    "wsd, linear": {"schedule": "wsd", "decay_share": 0.4, "decay_shape": "linear"},
}
# Of 20 steps with 5 of warm-up: in the warm-up, the stable phase, the decay, at its end.
STEPS = (3, 9, 17, 20)


def with_schedule(name):
    return BASE.model_copy(update={"optim": BASE.optim.model_copy(update={"warmup_steps": 5, **SCHEDULES[name]})})


def wrongly(**changes):
    """A candidate whose schedule is not the run's: these settings of `optim` are others."""

    class Wrong(TorchSession):
        def step(self, batch, *, norms=False):
            config = self.config
            self.config = config.model_copy(update={"optim": config.optim.model_copy(update=changes)})
            record = super().step(batch, norms=norms)
            self.config = config
            return record

    return backend(Wrong)


def evidence_at(made, config, step):
    session = made.open_rank(config)
    session.load(replace(session.state(), step=step - 1))
    return gather(session, config, text_batch(config))


def lr_finding(evidence, config):
    session = JaxSession(config)
    found = step_scalars(evidence, Reference(config, session, session))
    return next(finding for finding in found if finding.stage == "learning_rate")


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("step", STEPS)
def test_an_honest_rate_agrees_and_the_script_says_so_too(name, step, tmp_path):
    config = with_schedule(name)
    evidence = evidence_at(TorchBackend(), config, step)
    finding = lr_finding(evidence, config)
    assert finding.ok and evidence.record.lr == learning_rate(config.optim, step, config.train.steps)
    made = repro(evidence, _Accused(step, (), (), accused=finding), config, VERSIONS)
    assert run_here(tmp_path / "honest", made) == 0


WRONG = {
    "another schedule": lambda name: wrongly(**SCHEDULES["cosine" if name != "cosine" else "linear"]),
    "another shape": lambda name: wrongly(decay_shape="linear" if name == "wsd, 1 − √" else "sqrt", schedule="wsd"),
    "a decay that begins a step early": lambda name: wrongly(schedule="wsd", decay_share=0.45),
    "micro-batches counted by the schedule": lambda name: ScheduleCountsMicroBatches(),
}


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "cosine"])
@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_schedule_is_caught(name, fault, tmp_path):
    config = with_schedule(name)
    caught = {}
    for step in STEPS:
        evidence = evidence_at(WRONG[fault](name), config, step)
        finding = lr_finding(evidence, config)
        same = np.isclose(evidence.record.lr, learning_rate(config.optim, step, config.train.steps), rtol=1e-7)
        assert finding.ok == bool(same)
        if not finding.ok:
            made = repro(evidence, _Accused(step, (), (), accused=finding), config, VERSIONS)
            caught[step] = run_here(tmp_path / str(step), made)
    assert caught and set(caught.values()) == {1}
