"""Tests of one process share the JAX reference, for the last configurations, and no other backend."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.core.parity.measures.compare import Reference
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.kept_references import MOST, kept
from lockstep.parity_tests.tiny import tiny_config
from lockstep.torch_backend.backend import TorchBackend


class Planted(JaxBackend):
    """A test's own reference."""


def make(backend: Any, config: Any) -> Any:
    return object()


def test_one_is_made_for_each_of_the_last_configurations() -> None:
    made = kept(make, str)
    first = made(JaxBackend(), 0)
    assert made(JaxBackend(), 0) is first and made(JaxBackend(), 1) is not first
    for number in range(1, MOST + 1):
        made(JaxBackend(), number)
    assert made(JaxBackend(), 0) is not first


@pytest.mark.parametrize("backend", [Planted(), TorchBackend()])
def test_any_other_reference_is_made_anew(backend: Any) -> None:
    made = kept(make, str)
    assert made(backend, 0) is not made(backend, 0)


def test_checks_of_one_configuration_share_their_sessions() -> None:
    config = tiny_config("fp64", layers=1)
    one, other = (Reference.open(JaxBackend(), config) for _ in range(2))
    assert one.truth is other.truth
    assert Reference.open(Planted(), config).truth is not one.truth
