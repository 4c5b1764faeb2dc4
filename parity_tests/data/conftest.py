"""Small sources of text for the tests of the data layer."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from lockstep.core.data.prepare import PrepareSettings, prepare

WORDS = [
    "loss",
    "gradient",
    "token",
    "batch",
    "step",
    "weight",
    "norm",
    "clip",
    "rate",
    "epoch",
    "def",
    "return",
    "import",
    "self",
    "value",
    "naïve",
    "数据",
    "🙂",
]


def write_texts(folder: Path, files: int = 40, *, seed: int = 0) -> Path:
    """Write `files` text files, each of some hundred words, into `folder`; return the folder."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        lines = [" ".join(draw.choices(WORDS, k=draw.randint(3, 12))) for _ in range(draw.randint(5, 40))]
        (folder / f"doc_{number:03d}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def settings_for(out: Path, source_folder: Path, **changes) -> PrepareSettings:
    """Return settings that produce several small shards of each split."""
    base = PrepareSettings(out, str(source_folder), vocab_size=300, val_fraction=0.2, shard_tokens=1000)
    return dataclasses.replace(base, **changes)


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    return write_texts(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, texts) -> Path:
    """Return a prepared data folder. A test that changes it must copy it first."""
    folder = tmp_path_factory.mktemp("prepared") / "data"
    prepare(settings_for(folder, texts))
    return folder
