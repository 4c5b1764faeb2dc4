"""Fixtures: a tiny data set, and folders of runs on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.parity_tests.loop.runs import COMPILED, INDUCTOR, Folder
from lockstep.scripts import cli
from lockstep.scripts.studies.tiny_workspace import write_workspace

KINDS: dict[str, dict[str, object]] = {"eager": {}, "aot_eager": COMPILED, "inductor": INDUCTOR}


def prepare(text: Path, data: Path, *more: str) -> None:
    """Run `lockstep data prepare`, with a vocabulary of 300 unless `more` sets another."""
    words = ["data", "prepare", "--data.source", str(text), "--data.path", str(data), "--workers", "1", *more]
    if not {"--model.vocab-size", "--data.tokenizer"} & set(more):
        words += ["--model.vocab-size", "300"]
    if "--data.val-fraction" not in more:
        words += ["--data.val-fraction", "0.2"]
    assert cli.run(words) == 0


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_workspace(tmp_path_factory.mktemp("text")).parent / "text"


@pytest.fixture(scope="session")
def tokens(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a prepared data folder. A test that changes it must copy it first."""
    data = tmp_path_factory.mktemp("tokens") / "data"
    prepare(text, data)
    return data


@pytest.fixture
def folder(tmp_path: Path, tokens: Path) -> Folder:
    return Folder(tmp_path, tokens)


@pytest.fixture(scope="session")
def straight(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Folder]:
    """Return `straight(kind)` → a folder with an uninterrupted run of that kind, named `straight`."""
    made: dict[str, Folder] = {}

    def run(kind: str) -> Folder:
        if kind not in made:
            made[kind] = Folder(tmp_path_factory.mktemp(kind), tokens)
            assert made[kind].train("straight", KINDS[kind]) == 0
        return made[kind]

    return run
