"""Planted faults are accused, and nothing else with them."""

from __future__ import annotations

import pytest

from lockstep import NotHonest, assert_honest
from lockstep.parity_tests.honest.kinds import inputs_of
from lockstep.parity_tests.honest.wrong import MANY, MAY, WRONG

FIRST = [(name, kind.dtypes[0]) for name, (kind, _) in WRONG.items()]
OTHERS = [(name, dtype) for name, (kind, _) in WRONG.items() for dtype in kind.dtypes[1:]]


def is_accused(name: str, dtype: str) -> None:
    kind, wrong = WRONG[name]
    with pytest.raises(NotHonest) as found:
        assert_honest(kind.mine, kind.plain, inputs_of(kind, 1), dtype, **kind.options)
    accused = {one.name for one in found.value.report.results if not one.ok}
    assert wrong <= accused <= wrong | (MAY if name.startswith(MANY) else set()), found.value


@pytest.mark.parametrize(("name", "dtype"), FIRST, ids=[f"{name}, {dtype}" for name, dtype in FIRST])
def test_a_wrong_kernel_is_accused(name: str, dtype: str) -> None:
    is_accused(name, dtype)


@pytest.mark.parametrize(("name", "dtype"), OTHERS, ids=[f"{name}, {dtype}" for name, dtype in OTHERS])
def test_a_wrong_kernel_is_accused_in_other_dtypes(name: str, dtype: str) -> None:
    is_accused(name, dtype)
