"""Exhibits whose packages are in the present environment, at small sizes: with the bug, and mended."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.parity_tests.repository import REPO
from lockstep.scripts.museum.environments import is_present
from lockstep.scripts.museum.exhibit import exhibits
from lockstep.scripts.museum.loops import accelerate_window, clip_bf16, kernels, packed, packed_plain, seq2seq, trainer
from lockstep.scripts.museum.run import Told

# Modules and their sizes for a test.
SMALL: dict[str, tuple[tuple[Any, dict[str, int]], ...]] = {
    "first_label_gpt2": ((trainer, {"STEPS": 1}),),
    "t5_accumulation": ((seq2seq, {"STEPS": 1}),),
    "packed_use_cache": ((packed_plain, {"STEPS": 1}), (packed, {"STEPS": 1})),
    "accelerate_last_window": ((accelerate_window, {"EPOCHS": 1}),),
    "torch_clip_bf16": ((clip_bf16, {"STEPS": 1}),),
    "torch_layer_norm": ((kernels, {"SHOWN": 64, "JUDGED": 2048}),),
    "torch_embedding": ((kernels, {"SHOWN": 64, "JUDGED": 4096}),),
}
# Numbers for scripts that take one.
SIZES = {"torch_layer_norm": 4096, "torch_embedding": 8192, "torch_vector_norm": 2**23}


@pytest.mark.parametrize("name", SMALL)
def test_it_is_caught_and_mended(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    exhibit = exhibits()[name]
    if not all(map(is_present, exhibit.packages)):
        pytest.skip(f"the exhibit is of {exhibit.version('shipped')}")
    monkeypatch.chdir(tmp_path)
    for module, sizes in SMALL[name]:
        for key, value in sizes.items():
            monkeypatch.setattr(module, key, value)
    loop = SMALL[name][0][0].loop
    shipped, fixed = (loop(**(dict(exhibit.settings or {}) | {"mended": mended})).to_json() for mended in (False, True))
    told = Told(exhibit, shipped, fixed)
    assert told.as_expected, (shipped["words"], fixed["words"])


SCRIPTS = sorted((REPO / "scripts/museum/repros").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_for_the_makers_shows_the_bug_without_lockstep(
    script: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not re.search(r"^\s*(import|from) lockstep", script.read_text(), re.M)
    exhibit = exhibits()[script.stem]
    if not all(map(is_present, exhibit.packages)):
        pytest.skip(f"the exhibit is of {exhibit.version('shipped')}")
    monkeypatch.chdir(tmp_path)
    size = [str(SIZES[script.stem])] if script.stem in SIZES else []
    monkeypatch.setattr(sys, "argv", [str(script), *size])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script))
    assert ended.value.code == 1, capsys.readouterr().out
