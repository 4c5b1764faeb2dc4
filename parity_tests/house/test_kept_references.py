"""Tests of one process share the sessions of `JaxBackend` that were used last, and those of no other backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.core.config.auto import settled
from lockstep.core.config.file import load_config
from lockstep.core.config.schema import PrecisionConfig
from lockstep.core.parity.measures.compare import Reference
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests import kept_references
from lockstep.parity_tests.kept_references import MOST, kept, what_is_read
from lockstep.parity_tests.tiny import tiny_config
from lockstep.scripts.studies.tiny_workspace import write_workspace
from lockstep.torch_backend.backend import TorchBackend


class Planted(JaxBackend):
    """A test's own reference."""


def make(backend: Any, config: Any) -> Any:
    return object()


def test_one_is_made_for_each_configuration_and_the_last_used_are_kept() -> None:
    made = kept(make, str)
    first, second = made(JaxBackend(), 0), made(JaxBackend(), 1)
    assert first is not second and made(JaxBackend(), 0) is first
    for number in range(2, MOST + 1):
        made(JaxBackend(), number)
    assert made(JaxBackend(), 0) is first
    assert made(JaxBackend(), 1) is not second


@pytest.mark.parametrize("backend", [Planted(), TorchBackend()])
def test_any_other_reference_is_made_anew(backend: Any) -> None:
    made = kept(make, str)
    assert made(backend, 0) is not made(backend, 0)


CONFIG = tiny_config("fp64", layers=1)
APART: dict[str, dict[str, Any]] = {
    "weights": {"seed": 1},
    "batch": {"train": CONFIG.train.model_copy(update={"micro_batch_size": 1})},
    "devices": {"parity": CONFIG.parity.model_copy(update={"reference_devices": 2})},
}


def test_runs_that_differ_in_folders_and_reports_share_their_sessions() -> None:
    config = CONFIG.model_copy(update={"name": "other", "log": CONFIG.log.model_copy(update={"norms_every": 7})})
    one, other = (Reference.open(JaxBackend(), c) for c in (CONFIG, config))
    assert one.truth is other.truth
    assert (one.config, other.config) == (CONFIG, config)
    assert Reference.open(Planted(), CONFIG).truth is not one.truth


def test_a_run_that_was_made_has_its_automatic_settings_resolved_and_shares_the_session() -> None:
    resolved = settled(CONFIG, "cpu").model_copy(update={"device": "cpu"})
    assert resolved != CONFIG and what_is_read(resolved) == what_is_read(CONFIG)
    other = CONFIG.model_copy(update={"attention": CONFIG.attention.model_copy(update={"kernel": "math"})})
    assert what_is_read(other) != what_is_read(CONFIG)


def test_runs_of_other_lengths_and_batches_of_the_same_micro_batches_share_their_sessions() -> None:
    train = CONFIG.train.model_copy(update={"steps": 20, "batch_size": 8})
    other = CONFIG.model_copy(update={"train": train})
    session: Any = Reference.open(JaxBackend(), other).truth
    of_config: Any = Reference.open(JaxBackend(), CONFIG).truth
    assert session is of_config
    for setting in ("steps", "batch_size"):
        with pytest.raises(AttributeError, match=rf"^a session of the reference reads train\.{setting}: "):
            getattr(session.config.train, setting)


@pytest.mark.parametrize("reader", ["optim", "precision"])
def test_what_computes_from_the_batch_size_is_set_apart_by_it(reader: str) -> None:
    read = {
        "optim": CONFIG.optim.model_copy(update={"base_batch": 4}),
        "precision": PrecisionConfig(policy="fp8_delayed"),
    }
    configs = [
        CONFIG.model_copy(update={reader: read[reader], "train": CONFIG.train.model_copy(update={"batch_size": size})})
        for size in (4, 8)
    ]
    assert len({what_is_read(config) for config in configs}) == 2


def test_twins_of_other_casts_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def counted(backend: JaxBackend, config: Any) -> Any:
        opened.append(config.precision.policy)
        return object()

    monkeypatch.setattr(JaxBackend, "open", counted)
    # With a vocabulary of its own: no other test opens such sessions.
    config = tiny_config("bf16", layers=1, vocab_size=299)
    other = config.model_copy(update={"precision": PrecisionConfig(policy="bf16", casts="residual=bf16")})
    reference = Reference.open(JaxBackend(), config)
    one, again = (reference.with_twin_of(JaxBackend(), other).twin for _ in range(2))
    assert one is again is not reference.twin and opened == ["bf16", "fp64", "bf16"]


def test_runs_of_the_command_line_share_those_of_the_tiny_configuration(tmp_path: Path) -> None:
    file = write_workspace(tmp_path)
    of_file = load_config(file, {"precision.policy": "fp64"})
    assert Reference.open(JaxBackend(), of_file).truth is Reference.open(JaxBackend(), tiny_config("fp64")).truth


def test_the_truth_of_a_narrow_run_is_the_session_in_fp64() -> None:
    narrow = CONFIG.model_copy(update={"precision": CONFIG.precision.model_copy(update={"policy": "bf16"})})
    assert Reference.open(JaxBackend(), narrow).truth is Reference.open(JaxBackend(), CONFIG).truth


@pytest.mark.parametrize("apart", APART)
def test_what_a_session_computes_from_sets_it_apart(apart: str) -> None:
    assert what_is_read(CONFIG.model_copy(update=APART[apart])) != what_is_read(CONFIG)


class ReadsItsLog(JaxBackend):
    def open(self, config: Any) -> Any:
        assert config.parity.reference_devices == 1
        return config.log.norms_every


def test_a_session_that_reads_more_is_no_session() -> None:
    with pytest.raises(AttributeError, match=r"^a session of the reference reads log\.norms_every: "):
        kept_references._opened(ReadsItsLog(), CONFIG)
