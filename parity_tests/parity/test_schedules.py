"""The learning rate of every schedule is held to its formula in every check, and repro.py recomputes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.core.arrays import bit_equal
from lockstep.core.parity.diagnose.repro import repro
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.judge.exercised import not_exercised
from lockstep.core.parity.judge.judge import Reference
from lockstep.core.parity.judge.update import flat, step_scalars
from lockstep.core.train.schedule import learning_rate
from lockstep.jax_backend.session import JaxSession
from lockstep.parity_tests.faults.optimizer import ScheduleCountsMicroBatches
from lockstep.parity_tests.replay.made import VERSIONS, Accused, backend, run_here
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
# In 20 steps with 5 of warm-up: in the warm-up, the stable phase, the decay, at its end.
STEPS = (3, 9, 17, 20)


def with_schedule(name):
    return BASE.model_copy(update={"optim": BASE.optim.model_copy(update={"warmup_steps": 5, **SCHEDULES[name]})})


def wrongly(**changes):
    """Build a candidate whose schedule is not the run's: these settings of `optim` are others."""

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
    made = repro(evidence, Accused(step, (), (), accused=finding), config, VERSIONS)
    assert run_here(tmp_path / "honest", made) == 0


def test_a_rate_that_never_decays_is_caught_in_the_first_step(tmp_path):
    """Warm-up and peak are right; the candidate's records of the first steps as well."""
    made, config = wrongly(min_lr_ratio=1.0), with_schedule("cosine")
    session = made.open_rank(config)
    evidence = gather(session, config, text_batch(config))
    assert [record.step for record in evidence.later] == [14, 20]
    reference = JaxSession(config)
    found = list(step_scalars(evidence, Reference(config, reference, reference)))
    wrong = [finding for finding in found if not finding.ok]
    assert [finding.tap for finding in wrong] == ["learning_rate/14", "learning_rate/20"]
    script = repro(evidence, Accused(1, (), (), accused=wrong[0]), config, VERSIONS)
    assert run_here(tmp_path / "repro", script) == 1
    honest = gather(TorchBackend().open(config), config, text_batch(config))
    assert all(finding.ok for finding in step_scalars(honest, Reference(config, reference, reference)))


def test_the_session_goes_on_where_it_was():
    config = with_schedule("linear")
    one, other = (TorchBackend().open(config) for _ in range(2))
    gather(one, config, text_batch(config))
    other.step(text_batch(config))
    for session in (one, other):
        session.step(text_batch(config, 1))
    states = [flat(session.state()) for session in (one, other)]
    assert all(bit_equal(states[0][name], states[1][name]) for name in states[1])


def test_a_session_that_does_not_take_the_step_s_number_is_caught():
    class OfItsOwn(TorchSession):
        """Counts its steps by itself."""

        def load(self, state):
            step = self.state().step if state.step > 10 else state.step
            super().load(replace(state, step=step))

    config = with_schedule("linear")
    evidence = gather(backend(OfItsOwn).open_rank(config), config, text_batch(config))
    reference = JaxSession(config)
    found = step_scalars(evidence, Reference(config, reference, reference))
    assert [(finding.stage, finding.tap) for finding in found if not finding.ok] == 2 * [("checkpoint", "step")]


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
            made = repro(evidence, Accused(step, (), (), accused=finding), config, VERSIONS)
            caught[step] = run_here(tmp_path / str(step), made)
    assert caught and set(caught.values()) == {1}


class _NeverBelowOne(TorchSession):
    """Brings all gradients to the length of clip_norm, longer ones and shorter ones (a minimum is missing)."""

    def clip_coefficient(self, norm):
        return self.config.optim.clip_norm / (norm + 1e-6)


def test_gradients_that_are_made_longer_by_clipping_are_caught_in_the_first_step(tmp_path):
    config = with_schedule("cosine")
    reference = JaxSession(config)
    wrong, honest = (
        gather(made.open_rank(config), config, text_batch(config)) for made in (backend(_NeverBelowOne), TorchBackend())
    )
    assert honest.record.grad_norm > config.optim.clip_norm > honest.later[-1].grad_norm
    found = [f for f in step_scalars(wrong, Reference(config, reference, reference)) if not f.ok]
    assert [finding.tap for finding in found] == ["clip_coefficient/20"]
    script = repro(wrong, Accused(1, (), (), accused=found[0]), config, VERSIONS)
    assert run_here(tmp_path / "repro", script) == 1
    assert "gradients below clip_norm" not in not_exercised(honest, config)
    assert "gradients below clip_norm" in not_exercised(replace(honest, later=()), config)
