"""The rollout's four stages: three are one run on more GPUs, each fits its own, and the first trains on a laptop."""

from pathlib import Path

import pytest

from lockstep.core.config.file import load_config
from lockstep.core.plan import fits
from lockstep.core.run.resume import differing, is_elastic
from lockstep.parity_tests.loop.runs import SETTINGS
from lockstep.parity_tests.repository import REPO
from lockstep.scripts import cli

ROLLOUT = REPO / "configs/rollout"
STAGES = {"h100x1": 1, "h100x2": 2, "h100x8": 8}


def stage(name):
    return load_config(ROLLOUT / f"{name}.toml")


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_is_the_same_run_on_other_ranks(name):
    base, config = load_config(REPO / "configs/llama-1b.toml"), stage(name)
    assert config.train.ranks == STAGES[name]
    assert all(map(is_elastic, differing(base, config)))
    assert config.train.batch_size * config.train.sequence_length == 2**20


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_fits_and_the_next_micro_batch_that_divides_does_not(name):
    config = stage(name)
    assert fits(config, "h100").fits
    doubled = config.train.model_copy(update={"micro_batch_size": 2 * config.train.micro_batch_size})
    assert not fits(config.model_copy(update={"train": doubled}), "h100").fits


def test_the_laptop_s_recipe_is_the_large_one_s():
    small, large = stage("laptop"), stage("h100x1")
    for section in ("precision", "loss", "attention", "recompute", "compile", "parallel"):
        assert getattr(small, section) == getattr(large, section)
    assert small.model.head_dim == large.model.head_dim
    assert small.optim.warmup_steps / small.train.steps == large.optim.warmup_steps / large.train.steps


def flags(settings):
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    (tmp_path / "b.txt").write_text("pack my box with five dozen liquor jugs\n" * 400)
    return tmp_path


def test_the_laptop_s_stage_trains(text: Path):
    """A few steps of it, at a vocabulary that its data fill in a second, eager."""
    of_data = {
        "data.path": str(text / "data"),
        "data.source": str(text / "*.txt"),
        "data.val_fraction": "0.4",
        "model.vocab_size": SETTINGS["model.vocab_size"],
    }
    told = {
        "train.steps": 3,
        "train.batch_size": 4,
        "train.micro_batch_size": 2,
        "train.sequence_length": 16,
        "train.curriculum": "16:0.6, 32:0.4",
        "optim.warmup_steps": 1,
        "compile.enabled": "false",
        "eval.every": 0,
    }
    config = str(ROLLOUT / "laptop.toml")
    assert cli.run(["data", "prepare", config, *flags(of_data)]) == 0
    assert cli.run(["train", config, "--out", str(text), *flags(of_data | told)]) == 0
    assert len((text / "laptop" / "records.jsonl").read_text().splitlines()) >= 3
