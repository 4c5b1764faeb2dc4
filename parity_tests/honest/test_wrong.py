"""Planted faults are accused, and nothing else with them."""

from __future__ import annotations

import pytest

from lockstep import NotHonest, assert_honest
from lockstep.parity_tests.honest.kinds import inputs_of
from lockstep.parity_tests.honest.wrong import MANY, MAY, WRONG

CASES = [(name, dtype) for name, (kind, _) in WRONG.items() for dtype in kind.dtypes]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=[f"{name}, {dtype}" for name, dtype in CASES])
def test_a_wrong_kernel_is_accused(name: str, dtype: str) -> None:
    kind, wrong = WRONG[name]
    with pytest.raises(NotHonest) as found:
        assert_honest(kind.mine, kind.plain, inputs_of(kind, 1), dtype, **kind.options)
    accused = {one.name for one in found.value.report.results if not one.ok}
    assert wrong <= accused <= wrong | (MAY if name.startswith(MANY) else set()), found.value
