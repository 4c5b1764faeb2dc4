"""The reference's programs are compiled while the candidate computes: those that the check runs, at its shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.core.backend import Arrays
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.judge.judge import Reference
from lockstep.core.parity.modes import side_by_side
from lockstep.core.parity.reference.prepare import prepare
from lockstep.jax_backend.backend import JaxBackend
from lockstep.jax_backend.session import JaxSession
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend

# Four sequences a micro-batch, of which two have weight: stages have two sizes.
TWO_SIZES = {"batch_size": 8, "micro_batch_size": 4}
Call = tuple[str, str, tuple[tuple[str, tuple[int, ...], str], ...]]


def config_of(policy: str, **sections: dict[str, Any]) -> RunConfig:
    config = tiny_config(policy, train=TWO_SIZES)
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed)


def call(session: JaxSession, stage: str, inputs: Arrays) -> Call:
    # Floating inputs are cast to the stream dtype first.
    kinds = {name: "floating" if np.asarray(x).dtype.kind == "f" else str(x.dtype) for name, x in inputs.items()}
    return session.policy.name, stage, tuple((name, np.shape(inputs[name]), kinds[name]) for name in sorted(inputs))


@pytest.mark.parametrize(
    "config",
    [
        config_of("bf16"),
        config_of("bf16", attention={"document_mask": True, "reset_positions": True}),
        config_of("fp8_tensorwise"),
        config_of("bf16", model={"tied": False, "qkv_bias": True, "o_bias": True, "mlp_bias": True}),
    ],
    ids=["bf16", "documents", "fp8", "biases"],
)
def test_every_stage_that_a_check_runs_was_prepared_at_its_shapes_and_no_other(config, monkeypatch):
    prepared: set[Call] = set()
    run: set[Call] = set()
    begun = []
    whole, judge = JaxSession.run_stage, side_by_side.judge
    monkeypatch.setattr(JaxSession, "prepare_stage", lambda *of: prepared.add(call(*of)))

    def noted(session: JaxSession, stage: str, inputs: Arrays) -> Arrays:
        # Before the verdict the reference judges itself, in a model of its own.
        if begun and stage != "update":
            run.add(call(session, stage, inputs))
        return whole(session, stage, inputs)

    def judged(*of: Any) -> Any:
        begun.append(True)
        return judge(*of)

    monkeypatch.setattr(JaxSession, "run_stage", noted)
    monkeypatch.setattr(side_by_side, "judge", judged)
    (check,) = side_by_side.check_steps(TorchBackend(), JaxBackend(), config, [text_batch(config)])
    assert check.verdict == "agreed" and run
    assert run == prepared


def test_a_stage_that_was_prepared_is_compiled_no_more():
    from jax import monitoring

    config = config_of("fp32")
    reference = Reference.open(JaxBackend(), config)
    prepare(reference, text_batch(config))
    events: list[str] = []

    def note(event: str, *of: Any, **named: Any) -> None:
        events.append(event)

    x = np.ones((4, config.train.sequence_length, config.model.hidden), np.float32)
    norm = {"x": x, "weight": np.ones(config.model.hidden, np.float32)}
    monitoring.register_event_duration_secs_listener(note)
    try:
        for session in reference.sessions:
            session.run_stage("attn_norm", norm)
            session.run_stage("attn_norm", {**norm, "grad": x})
        assert not [event for event in events if "compile" in event]
        reference.twin.run_stage("attn_norm", {**norm, "x": x[:3]})
        assert [event for event in events if "compile" in event]
    finally:
        monitoring.unregister_event_duration_listener(note)
