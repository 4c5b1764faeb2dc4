"""Fixtures: data, an exported run, and models that transformers itself has saved."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.parity_tests.loop.conftest import prepare, text, tokens  # noqa: F401 - fixtures
from lockstep.parity_tests.loop.runs import Folder
from lockstep.scripts import cli

SHORT = {"train.steps": 2, "optim.warmup_steps": 1, "precision.policy": "fp32"}


@pytest.fixture(scope="session")
def exported(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """Train a run `one` of two steps in FP32, and export it to `out` in the same folder; return the folder."""
    folder = Folder(tmp_path_factory.mktemp("exported"), tokens)
    assert folder.train("one", SHORT) == 0
    assert cli.run(["export", str(folder.path / "one"), str(folder.path / "out")]) == 0
    return folder.path / "out"


@pytest.fixture
def copied(exported: Path, tmp_path: Path) -> Path:
    """Return a copy of the export, alone in a folder, which a test may change."""
    return Path(shutil.copytree(exported, tmp_path / "given" / "hub"))


@pytest.fixture(scope="session")
def llama(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:  # noqa: F811
    """Return `llama(dtype, shard, **settings)`, which saves a random LlamaForCausalLM and returns its folder.

    Its weights are large, so that one token is by far the most probable. Gains and biases are random as well.
    """

    def make(dtype: str = "float32", shard: str = "5GB", **settings: Any) -> Path:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {
            "vocab_size": 300,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "tie_word_embeddings": False,
        }
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**sizes, **settings}))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                spread = 0.3 if parameter.ndim > 1 else 0.2
                parameter.copy_(torch.randn(parameter.shape) * spread + name.endswith("norm.weight"))
        folder = tmp_path_factory.mktemp("llama") / "hub"
        model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
        shutil.copy(tokens / "tokenizer.json", folder)
        return folder

    return make


@pytest.fixture
def imported(tokens: Path) -> Callable[..., int]:  # noqa: F811
    """Return `imported(folder, run, *words)`, which runs `lockstep import` on this data and returns its exit code."""

    def run(folder: Path, target: Path, *words: str) -> int:
        small = ["--data.path", str(tokens), "--compile.enabled", "false", "--device", "cpu"]
        small += ["--train.batch-size", "4", "--train.micro-batch-size", "2", "--train.sequence-length", "32"]
        small += [
            "--train.steps",
            "4",
            "--optim.warmup-steps",
            "1",
            "--precision.policy",
            "fp32",
            "--eval.batches",
            "1",
        ]
        given = {word for word in words if word.startswith("--")}
        pairs = zip(small[::2], small[1::2], strict=True)
        return cli.run(
            [
                "import",
                str(folder),
                str(target),
                *(w for flag, v in pairs if flag not in given for w in (flag, v)),
                *words,
            ]
        )

    return run


@pytest.fixture
def folder(tmp_path: Path, tokens: Path) -> Folder:  # noqa: F811
    return Folder(tmp_path, tokens)
