"""Small configurations and batches for tests."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.backend import Batch
from lockstep.core.config.schema import (
    CompileConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
)
from lockstep.core.data.batches import documents_of

MODEL = {"vocab_size": 300, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_hidden": 128}
TRAIN = {"steps": 12, "batch_size": 4, "micro_batch_size": 2, "sequence_length": 32}


def tiny_config(
    policy: str = "bf16", compiled: bool = False, train: dict[str, Any] | None = None, **model: Any
) -> RunConfig:
    """Return the run of a two-block Llama over bytes. Every step clips, so that tests cover clipping.

    The run file of scripts/studies/tiny_workspace.py has the same settings, so both share the reference's sessions.
    """
    return RunConfig(
        model=ModelConfig(**(MODEL | model)),
        train=TrainConfig(**(TRAIN | (train or {}))),
        optim=OptimConfig(warmup_steps=3, clip_norm=0.25),
        precision=PrecisionConfig(policy=policy),
        compile=CompileConfig(enabled=compiled, backend="aot_eager"),
    )


@cache
def text_bytes() -> np.ndarray:
    """Return the source text of a module of the standard library, as uint8."""
    return np.frombuffer((Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes(), np.uint8)


def text_batch(config: RunConfig, seed: int = 0) -> Batch:
    """Return random windows of `text_bytes`, with all loss weights 1.

    Each line is a document if the configuration's attention needs documents.
    """
    rows, length = config.train.batch_size, config.train.sequence_length
    data = text_bytes()
    starts = np.random.default_rng(seed).integers(0, len(data) - length - 1, rows)
    windows = data[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    tokens = windows[:, :-1].copy()
    documents = documents_of(tokens, ord("\n")) if config.attention.needs_documents else None
    return Batch(tokens, windows[:, 1:].copy(), np.ones((rows, length), np.float32), documents)
