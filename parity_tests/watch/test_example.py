"""The example of docs/guide/watch.md: under 60 lines, agrees, and sees a fault; core's side knows no framework."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lockstep.core.parity.watch.api import Settings

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLE = DOCS / "examples" / "watch_loop.py"


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("watch_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_agrees(example: ModuleType) -> None:
    watcher = example.main()
    assert watcher.verdict == "agreed"
    assert str(watcher).endswith("agreed in 4 checks")
    assert len(EXAMPLE.read_text().splitlines()) < 60


def test_the_example_with_a_tanh_approximation_disagrees(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.nn.functional.gelu
    monkeypatch.setattr(example.F, "gelu", lambda x: exact(x, approximate="tanh"))
    assert example.main().verdict == "disagreed"


def test_the_page_names_only_what_there_is() -> None:
    page = (DOCS / "guide/watch.md").read_text()
    named = set(re.findall(r"^\| `(\w+)=", page, re.M))
    assert named == {"reference", *Settings.__dataclass_fields__}
