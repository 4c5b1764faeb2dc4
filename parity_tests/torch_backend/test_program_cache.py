"""A program that was compiled before is loaded where all of its code is Lockstep's own, and else traced again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch._dynamo.utils import counters

from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.parity_tests.torch_backend.programs import GENERATED, fresh_compiler
from lockstep.torch_backend import program_cache
from lockstep.torch_backend.session import TorchSession

CONFIG = tiny_config(layers=1, compiled=True, train={"sequence_length": 32})
CONFIG = CONFIG.model_copy(update={"compile": GENERATED})


class Somebodys(TorchSession):
    """A session of a class that lies elsewhere: its code may have a formula that no key holds."""


@pytest.fixture
def gradients(tmp_path, monkeypatch) -> Callable[[type[TorchSession]], Mapping[str, Any]]:
    """Gradients of the first batch by a process that has compiled nothing yet; no earlier test's program is found."""
    monkeypatch.setattr(program_cache, "installed", lambda: str(tmp_path))

    def computed(session: type[TorchSession]) -> Mapping[str, Any]:
        counters.clear()
        with fresh_compiler():
            return session(CONFIG).gradients(text_batch(CONFIG)).grads

    return computed


def found() -> dict[str, int]:
    """How often a program was in the cache, and was not, since the last computation began."""
    return {name: counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")}


def test_own_code_alone_is_marked_as_what_may_be_loaded():
    """Programs of Lockstep's own session go to the cache, by what is installed; anybody else's are traced."""
    own, other = (program_cache.settings_of(session) for session in (TorchSession, Somebodys))
    assert set(own.values()) == {True} and set(other.values()) == {False}
    assert "enable_autograd_cache" in own.keys() == other.keys()
    (marked,) = program_cache.options_of(TorchSession).values()
    assert set(marked) == set(program_cache.KNOWN) and set(marked.values()) == {program_cache.installed()}
    assert program_cache.options_of(Somebodys) == {}


def test_own_programs_are_loaded_and_give_equal_bits(gradients):
    traced = gradients(TorchSession)
    assert found() == {"hit": 0, "miss": 1, "bypass": 0}
    loaded = gradients(TorchSession)
    assert found() == {"hit": 1, "miss": 0, "bypass": 0}
    assert all((loaded[name] == traced[name]).all() for name in traced)


def test_programs_of_other_packages_are_traced(gradients, monkeypatch, tmp_path):
    gradients(TorchSession)
    monkeypatch.setattr(program_cache, "installed", lambda: f"{tmp_path}, of other packages")
    gradients(TorchSession)
    assert found() == {"hit": 0, "miss": 1, "bypass": 0}


def test_programs_of_anybody_elses_session_are_traced(gradients):
    gradients(Somebodys)
    assert found() == {"hit": 0, "miss": 0, "bypass": 0}
