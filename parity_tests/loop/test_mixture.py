"""Runs on a mixture: losses of each data set, a resume that keeps the mixture, and the origin of a step's sequences."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.core.data.mixed import source_of
from lockstep.core.run.data import RunData
from lockstep.parity_tests.loop.conftest import prepare
from lockstep.parity_tests.loop.runs import Folder


@pytest.fixture(scope="module")
def second(tokens: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare half the text with the tokenizer of the first data set."""
    place = tmp_path_factory.mktemp("second")
    (place / "text").mkdir()
    for file in sorted(text.glob("*.txt"))[::2]:
        (place / "text" / file.name).write_bytes(file.read_bytes())
    prepare(place / "text", place / "web", "--data.tokenizer", str(tokens / "tokenizer.json"))
    return place / "web"


def test_a_run_on_a_mixture(folder: Folder, second: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixture = f"{folder.data}: 3, {second}: 1"
    settings = {"data.mixture": mixture, "train.steps": 4, "eval.every": 2, "eval.batches": 2, "checkpoint.every": 2}
    assert folder.train("run", settings) == 0
    shown = capsys.readouterr().out
    assert "data 75.0%" in shown and "web 25.0%" in shown and "epochs" in shown
    metrics = folder.records("run")[-1]["metrics"]
    # Three of four held-out sequences are of the first.
    weighted = (3 * metrics["val/loss/data"] + metrics["val/loss/web"]) / 4
    assert metrics["val/loss"] == pytest.approx(weighted, rel=1e-12)
    assert "(data " in shown and ", web " in shown
    run = folder.run("run")
    assert [source["name"] for source in run.info["data"]["sources"]] == ["data", "web"]
    data = RunData.open(run.config)
    assert [data.batch(step).digest() for step in range(1, 5)] == [r["digest"] for r in folder.records("run")]
    assert set(source_of(data.sampler.window_starts(0, 16, 32)).tolist()) == {0, 1}
    # Another weight is another data set.
    assert folder.resume("run", "--data.mixture", f"{folder.data}: 3, {second}: 2") == 2
    said = capsys.readouterr().err
    assert "was made with another data set" in said and "web 1 (" in said and "web 2 (" in said
    assert folder.resume("run", "--data.mixture", f"{folder.data}: 0.75, {second}: 0.25", "--from-step", "2") == 0
    assert [data.batch(step).digest() for step in range(1, 5)] == [r["digest"] for r in folder.records("run")]
