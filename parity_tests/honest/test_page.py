"""The examples of docs/guide/assert_honest.md run as they stand, and end as on the page."""

from __future__ import annotations

import inspect
import re
from types import ModuleType
from typing import Any

import pytest

from lockstep import NotHonest, assert_honest
from lockstep.core.parity.honest.measures import NAMES
from lockstep.parity_tests.repository import REPO

PAGE = (REPO / "docs/guide/assert_honest.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```.*?```\n(.*?)```", PAGE, re.S)


def run(code: str) -> dict[str, Any]:
    """Run an example and return the names that it defines."""
    module = ModuleType("example")
    exec(compile(code, "example", "exec"), vars(module))
    return vars(module)


@pytest.mark.parametrize(("test", "place"), [("test_layer_norm", 0), ("test_gelu", 2)])
def test_an_example_ends_as_the_page_says(test: str, place: int) -> None:
    code, output = EXAMPLES[place]
    with pytest.raises(NotHonest) as found:
        run(code)[test]()
    # Figures are of one machine's kernels; the verdict and the results are not.
    said, shown = (text.splitlines() for text in (output, str(found.value)))
    assert said[:2] == shown[:2]
    names = [[line.split("  ")[0] for line in lines[2:] if not line.startswith(" ")] for lines in (said, shown)]
    assert names[0] == names[1]


@pytest.mark.parametrize(("dtype", "honest"), [("fp16", True), ("bf16", False)])
def test_the_example_of_triton(dtype: str, honest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton is installed, and no GPU is there, in its interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    test = run(EXAMPLES[1][0])["test_rms_norm"]
    if honest:
        test(dtype)
    else:
        with pytest.raises(NotHonest, match="grad x"):
            test(dtype)


def test_the_page_names_every_argument_and_measure() -> None:
    named = set(re.findall(r"`(\w+)=`", PAGE))
    assert set(inspect.signature(assert_honest).parameters) <= named
    assert {*NAMES} <= set(re.findall(r"`(\w+)`", PAGE))
    assert max(len(line) for line in PAGE.splitlines() if not line.startswith("|")) <= 160
