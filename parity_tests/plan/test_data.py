"""`lockstep plan` shows how often each data set is passed over, and refuses data that `lockstep train` would refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lockstep.core.config.schema import DataConfig, EvalConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from lockstep.core.data import shards
from lockstep.core.data.index import TOKENIZER_NAME
from lockstep.core.data.prepare import prepare
from lockstep.core.errors import UserError
from lockstep.core.plan.data import readings
from lockstep.core.run.data import RunData
from lockstep.parity_tests.data.conftest import settings_for, write_texts
from lockstep.scripts import cli


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two prepared sets of one tokenizer, a copy of one, and a set of another tokenizer."""
    place = tmp_path_factory.mktemp("planned")
    for number, name in enumerate(("one", "two", "other")):
        texts = write_texts(place / "texts" / name, 12 + 8 * number, seed=number)
        given = {"vocab_size": None, "tokenizer": place / "one" / TOKENIZER_NAME} if name == "two" else {}
        prepare(settings_for(place / name, texts, **given))
    shutil.copytree(place / "two", place / "twin")
    return place


def config(data: DataConfig, batches: int = 2, vocabulary: int = 300) -> RunConfig:
    return RunConfig(
        model=ModelConfig(vocab_size=vocabulary),
        data=data,
        train=TrainConfig(steps=37, batch_size=8, micro_batch_size=4, sequence_length=16),
        eval=EvalConfig(batches=batches),
        optim=OptimConfig(warmup_steps=0),
    )


MIXTURE = "{0}/one: 3, {0}/other: 0, {0}/two: 1"


@pytest.mark.parametrize("windows", [0, 2])
@pytest.mark.parametrize("given", [{"mixture": MIXTURE}, {"path": "{0}/two"}])
def test_epochs_are_those_of_the_run(given: dict[str, str], windows: int, folders: Path) -> None:
    (key, text), *_ = given.items()
    of = config(DataConfig(**{key: text.format(folders), "window_shards": windows}))
    found = readings(of)
    assert [one.epochs for one in found if one.share] == pytest.approx(RunData.open(of).sampler.epochs(37 * 8))
    assert sum(one.tokens for one in found) == 37 * 8 * 16
    if key == "mixture":
        assert [(one.name, one.share, one.tokens) for one in found] == [
            ("one", 0.75, 222 * 16),
            ("other", 0.0, 0),
            ("two", 0.25, 74 * 16),
        ]


def test_no_shard_is_read(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> str:
        raise AssertionError(f"{path} is read")

    monkeypatch.setattr(shards, "_checksum", read)
    of = config(DataConfig(mixture=MIXTURE.format(folders)))
    assert len(readings(of)) == 3
    with pytest.raises(AssertionError):
        RunData.open(of)


def test_what_is_not_prepared_has_no_epochs(folders: Path, tmp_path: Path) -> None:
    found = readings(config(DataConfig(mixture=f"{folders}/one: 1, {tmp_path}/later: 1")))
    assert [one.epochs is None for one in found] == [False, True] and found[1].tokens == found[0].tokens == 148 * 16
    (alone,) = readings(config(DataConfig(path=f"{tmp_path}/later")))
    assert (alone.held, alone.epochs, alone.tokens) == (None, None, 37 * 8 * 16)


@pytest.mark.parametrize(
    ("mixture", "more"),
    [
        ("{0}/one: 1, {0}/other: 1", {}),
        ("{0}/two: 1, {0}/twin: 1", {}),
        ("{0}/one: 1, {0}/two: 1", {"vocabulary": 299}),
        ("{0}/one: 1, {0}/two: 1", {"batches": 0}),
    ],
)
def test_what_the_run_refuses_is_refused(mixture: str, more: dict[str, int], folders: Path) -> None:
    batches = more.pop("batches", 2)
    of = config(DataConfig(mixture=mixture.format(folders)), **more)
    if not batches:
        few = of.train.model_copy(update={"micro_batch_size": 1})
        of = of.model_copy(update={"eval": EvalConfig(batches=1), "train": few})
    with pytest.raises(UserError) as expected:
        RunData.open(of)
    with pytest.raises(UserError) as found:
        readings(of)
    assert found.value.lines == expected.value.lines and len(found.value.lines) == 1


def test_the_command(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("")
    small = ["--model.vocab-size", "300", "--train.sequence-length", "16", "--device", "cpu"]
    words = ["plan", "run.toml", *small, "--train.steps", "40", "--optim.warmup-steps", "4"]
    assert cli.run([*words, "--data.mixture", MIXTURE.format(folders), "--json", "plan.json"]) == 0
    out = capsys.readouterr().out
    rows = {row.split("│")[1].strip(): row for row in out.splitlines() if row.startswith("│")}
    data = json.loads((tmp_path / "plan.json").read_text())["data"]
    assert [one["name"] for one in data] == ["one", "other", "two"]
    assert "75.0%" in rows["one"] and f"{data[0]['epochs']:.3g}" in rows["one"] and "left out" in rows["other"]
    assert cli.run([*words, "--data.path", "later"]) == 0 and "not prepared here" in capsys.readouterr().out
    assert cli.run([*words, "--data.mixture", f"{folders}/two: 1, {folders}/twin: 1"]) == 2
    assert "hold the same data" in capsys.readouterr().err
