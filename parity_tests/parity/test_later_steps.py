"""Faults that begin in later steps of a run, or in its last checkpoint, are found in the first step."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from lockstep.core.backend import Backend, Batch, Session, StepRecord
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.diagnose.repro import repro
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.saved import open_evidence, save_evidence
from lockstep.core.parity.evidence.store import FolderStore
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.parity.reference.self_check import sound_reference
from lockstep.core.train.fp8_amax import key, layers
from lockstep.core.train.loss_scale import SCALE
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults import later
from lockstep.parity_tests.replay.made import VERSIONS, run_here
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

CONFIG = tiny_config(train={"steps": 20})
FOUND = {
    later.PeakRateAfterWarmUp: ("update", "embed.weight/13"),
    later.NoDecayAfterWarmUp: ("update", "blocks.0.attn.q_proj.weight/13"),
    later.LengthensShortGradients: ("moments", "exp_avg/embed.weight/20"),
    later.MomentumEndsWithWarmUp: ("moments", "exp_avg/embed.weight/13"),
    later.FirstTokenLeftOutAfterWarmUp: ("loss", "the same step, as a later one"),
    later.LastCheckpointInBf16: ("checkpoint", "the checkpoint of the last step"),
}


def check(backend: Backend, config: RunConfig = CONFIG) -> tuple[Evidence, Check]:
    evidence = gather(backend.open(config), config, text_batch(config))
    return evidence, judge(evidence, sound_reference(JaxBackend(), config))


@pytest.mark.parametrize("fault", FOUND, ids=lambda fault: fault.__name__)
def test_what_is_wrong_in_later_steps_alone_is_found_in_the_first(fault: type[TorchBackend]) -> None:
    _, found = check(fault())
    assert found.origin is not None
    assert (found.origin.stage, found.origin.tap) == FOUND[fault]


def test_a_clean_run_agrees_and_both_later_steps_were_looked_at() -> None:
    evidence, found = check(TorchBackend())
    assert found.verdict == "agreed"
    taps = {one.tap for one in found.findings if one.stage == "update"}
    shapes = evidence.before.params
    assert {f"{name}/{number}" for name in shapes for number in (13, 20)} <= taps


class ScaleStays(TorchSession):
    """FP16's loss scale never grows; that it would, a run sees after 2,000 steps."""

    def scalars_after(self, finite: bool) -> dict[str, float]:
        return super().scalars_after(finite) | ({SCALE: self.scalars[SCALE]} if finite else {})


class FullHistoryStays(TorchSession):
    """FP8's history of amaxes takes nothing new once it is full."""

    def scalars_after(self, finite: bool) -> dict[str, float]:
        length = self.config.precision.fp8_history
        full = all(self.scalars[key(layer, "weight", length - 1)] for layer in layers(self.config))
        return dict(self.scalars) if full else super().scalars_after(finite)


@pytest.mark.parametrize(
    "fault, policy, named",
    [
        (ScaleStays, "fp16", ("loss_scale", "loss_scale/13")),
        (FullHistoryStays, "fp8_delayed", ("fp8_amax", "history/13")),
    ],
)
def test_what_a_state_counts_is_held_to_the_rule_as_in_a_long_run(
    fault: type[TorchSession], policy: str, named: tuple[str, str]
) -> None:
    config = tiny_config(policy, train={"steps": 20})
    for session in (fault, TorchSession):
        evidence = gather(session(config), config, text_batch(config))
        found = judge(evidence, sound_reference(JaxBackend(), config))
        assert (found.origin and (found.origin.stage, found.origin.tap)) == (named if session is fault else None)


class _Plain:
    """A session of nothing but plain methods: its step shows no gradients."""

    def __init__(self, session: TorchSession) -> None:
        self._session = session
        self.state, self.load, self.close = session.state, session.load, session.close
        self.gradients, self.observe = session.gradients, session.observe

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        return self._session.step(batch, norms=norms)


@pytest.mark.parametrize("session", [TorchSession, later.PeakRateAfterWarmUp.session_class])
def test_a_step_that_does_not_show_its_gradients_is_held_to_those_computed_apart(session: type[TorchSession]) -> None:
    evidence = gather(cast(Session, _Plain(session(CONFIG))), CONFIG, text_batch(CONFIG))
    origin = judge(evidence, sound_reference(JaxBackend(), CONFIG)).origin
    assert [one.number for one in evidence.moved] == [13, 20]
    assert (origin.tap if origin else None) == (None if session is TorchSession else "embed.weight/13")


def test_a_capsule_says_the_same_and_its_script_shows_it(tmp_path: Path) -> None:
    """The evidence goes through a folder, as a capsule's does; the script recomputes the update of that later step."""
    store = FolderStore.create(tmp_path / "evidence")
    made = later.PeakRateAfterWarmUp().open(CONFIG)
    save_evidence(gather(made, CONFIG, text_batch(CONFIG), store=store), store)
    evidence = open_evidence(tmp_path / "evidence")
    found = judge(evidence, sound_reference(JaxBackend(), CONFIG))
    assert found.origin is not None and found.origin.tap == "embed.weight/13"
    assert run_here(tmp_path / "repro", repro(evidence, found, CONFIG, VERSIONS)) == 1
