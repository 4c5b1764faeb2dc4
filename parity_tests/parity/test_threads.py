"""Two threads judge what one thread judges, with a reference that declares itself thread-safe, and with no other."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from typing import Any

import numpy as np
import pytest

from lockstep.core.backend import NotSupported
from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.parity.modes.side_by_side import check_steps
from lockstep.core.parity.reference import self_check
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

CONFIG = tiny_config("bf16", train={"batch_size": 4, "micro_batch_size": 2})


def gathered(fault: float = 1.0, config: Any = CONFIG) -> Evidence:
    evidence = gather(TorchSession(config), config, uneven_weights(text_batch(config), 0))
    taps = dict(evidence.taps)
    taps["blocks.1.mlp.act"] = taps["blocks.1.mlp.act"] * np.float32(fault)
    return dataclasses.replace(evidence, taps=taps)


def said(check: Check) -> list[Any]:
    return [check.findings, sorted(check.not_covered)]


def of_threads(threads: bool) -> Reference:
    return dataclasses.replace(Reference.open(JaxBackend(), CONFIG).over_a_run(), threads=threads)


@pytest.mark.parametrize("fault", [1.0, 1.1, np.nan])
def test_two_threads_find_what_one_finds(fault):
    evidence = gathered(fault)
    one, two = (judge(evidence, of_threads(threads)) for threads in (False, True))
    assert len(one.findings) > 100 and said(one) == said(two)
    assert one.verdict == ("agreed" if fault == 1.0 else "disagreed")


class Asked:
    """The JAX reference, which notes the threads that call its sessions."""

    def __init__(self, threads: bool | None) -> None:
        self.by: set[str] = set()
        if threads is not None:
            self.threads = threads

    def open(self, config: Any) -> Any:
        session, by = JaxBackend().open(config), self.by

        class Noting:
            def __getattr__(self, name: str) -> Any:
                by.add(threading.current_thread().name)
                return getattr(session, name)

        return Noting()


@pytest.mark.parametrize(
    "threads, memory_gb, asked",
    [(None, 0.0, False), (False, 0.0, False), (True, 8.0, False), (True, 0.0, True)],
    ids=["undeclared", "one", "within a budget", "two"],
)
def test_one_thread_asks_a_reference_that_does_not_say_that_two_may(threads, memory_gb, asked, monkeypatch):
    backend: Any = Asked(threads)
    monkeypatch.setattr(self_check, "require_sound", lambda *of: self_check.ReferenceCheck((), ()))
    config = CONFIG.model_copy(update={"parity": CONFIG.parity.model_copy(update={"memory_gb": memory_gb})})
    (check,) = check_steps(TorchBackend(), backend, config, [text_batch(config)])
    assert check.verdict == "agreed"
    others = backend.by - {threading.main_thread().name}
    assert any(name.startswith("lockstep-judge") for name in others) == asked


def test_numpy_treats_what_is_not_finite_alike_in_both():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert judge(gathered(np.inf), of_threads(True)).verdict == "disagreed"


@pytest.mark.parametrize("threads", [False, True])
def test_a_reference_that_is_not_sound_judges_nobody(threads, monkeypatch):
    def unsound(*of: Any) -> Any:
        raise UserError("the reference is wrong, so it does not judge: rope")

    monkeypatch.setattr(self_check, "require_sound", unsound)
    monkeypatch.setattr(JaxBackend, "threads", threads)
    with pytest.raises(UserError, match="does not judge: rope"):
        list(check_steps(TorchBackend(), JaxBackend(), CONFIG, [text_batch(CONFIG)]))


def test_a_reference_that_cannot_be_opened_is_said_before_anything_is_computed(monkeypatch):
    computed: list[str] = []
    monkeypatch.setattr(TorchSession, "step", lambda *of, **named: computed.append("step"))
    monkeypatch.setattr(TorchSession, "gradients", lambda *of: computed.append("gradients"))

    class Absent:
        threads = True

        def open(self, config: Any) -> Any:
            raise UserError("JAX finds no GPU")

    absent: Any = Absent()
    with pytest.raises(UserError, match="finds no GPU"):
        list(check_steps(TorchBackend(), absent, CONFIG, [text_batch(CONFIG)]))
    assert computed == []


@pytest.mark.parametrize("part", ["stages", "repeat"])
def test_what_either_thread_meets_ends_the_check(part, monkeypatch):
    from lockstep.core.parity.judge import end_to_end, local

    def damaged(*of: Any) -> Any:
        raise UserError("the evidence was damaged")

    monkeypatch.setattr(*{"stages": (local, "stages"), "repeat": (end_to_end, "repeat")}[part], damaged)
    with pytest.raises(UserError, match="damaged"):
        judge(gathered(), of_threads(True))


def test_what_the_reference_does_not_support_is_missing_in_either(monkeypatch):
    def refused(*of: Any) -> Any:
        raise NotSupported("no stage by itself")

    session = type(Reference.open(JaxBackend(), CONFIG).twin)
    monkeypatch.setattr(session, "run_stage", refused, raising=False)
    one, two = (judge(gathered(), of_threads(threads)) for threads in (False, True))
    assert any("no stage by itself" in reason for reason in one.not_covered) and said(one) == said(two)
