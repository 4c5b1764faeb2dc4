"""The example of docs/guide/watch.md: under 60 lines, agrees, and sees a fault; core's side imports no framework."""

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
OWN = DOCS / "examples" / "watch_own_module.py"


@pytest.fixture
def example() -> ModuleType:
    return loaded(EXAMPLE)


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
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


def test_the_own_module_agrees_in_three_lines_and_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    example = loaded(OWN)
    watcher = example.main()
    assert watcher.headline == "agreed in 4 checks against your own module"
    added = [line for line in OWN.read_text().splitlines() if "watch" in line and not line.startswith('"""')]
    assert [line[-3:] for line in added if not line.startswith("    return")] == ["# 1", "# 2", "# 3"]
    monkeypatch.setattr(example.nn.utils, "clip_grad_norm_", lambda *_: None)
    assert example.main().verdict == "disagreed"


@pytest.mark.parametrize(("adapter", "most"), [("watch_trainer", 2), ("watch_lightning", 3), ("watch_accelerate", 3)])
def test_an_adapter_takes_so_many_lines_of_the_users(adapter: str, most: int) -> None:
    page = (DOCS / "guide/watch_trainers.md").read_text()
    (block,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.S) if adapter in code)
    assert sum("watch" in line for line in block.splitlines()) == most
    assert re.search(rf"^\| `{adapter}` \| {most} \|", page, re.M)


def test_the_page_names_only_what_there_is() -> None:
    page = (DOCS / "guide/watch.md").read_text()
    named = set(re.findall(r"^\| `(\w+)=", page, re.M))
    assert named == {"loss", "reference", "accumulate", "ranks", "operations", *Settings.__dataclass_fields__}
