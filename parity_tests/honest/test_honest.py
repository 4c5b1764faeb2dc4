"""Kernels that round elsewhere, sum in another order or are better than the plain function are not accused."""

from __future__ import annotations

import pytest

from lockstep import assert_honest
from lockstep.parity_tests.honest.kinds import KINDS, inputs_of

FIRST = [(name, kind.dtypes[0]) for name, kind in KINDS.items()]
OTHERS = [(name, dtype) for name, kind in KINDS.items() for dtype in kind.dtypes[1:]]


def passes(name: str, dtype: str) -> None:
    kind = KINDS[name]
    report = assert_honest(kind.mine, kind.plain, inputs_of(kind, 0), dtype, **kind.options)
    assert all(one.measured is not None for one in report.results)


@pytest.mark.parametrize(("name", "dtype"), FIRST, ids=[f"{name}, {dtype}" for name, dtype in FIRST])
def test_an_honest_kernel_passes(name: str, dtype: str) -> None:
    passes(name, dtype)


@pytest.mark.parametrize(("name", "dtype"), OTHERS, ids=[f"{name}, {dtype}" for name, dtype in OTHERS])
def test_an_honest_kernel_passes_in_other_dtypes(name: str, dtype: str) -> None:
    passes(name, dtype)
