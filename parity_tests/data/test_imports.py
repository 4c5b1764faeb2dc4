"""The data layer loads numpy and nothing heavier until it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "jax", "tokenizers", "pyarrow", "rich"}


def loaded_by(code: str) -> set[str]:
    """Which heavy packages a fresh Python has loaded after `code`."""
    code += "\nimport sys; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return HEAVY & set(found.stdout.split())


def test_every_module_is_light():
    names = sorted(path.stem for path in (REPOSITORY / "core" / "data").glob("*.py"))
    assert "prepare" in names
    assert loaded_by("\n".join(f"import lockstep.core.data.{name}" for name in names if name != "__init__")) == set()


@pytest.mark.parametrize("name", ["tokenizers", "pyarrow"])
def test_a_heavy_import_would_be_seen(name):
    assert loaded_by(f"import lockstep.core.data.prepare\nimport {name}") == {name}
