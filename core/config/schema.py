"""The run's configuration: its sections (core/config/sections.py), and rules between settings (core/config/rules.py).

A run file (core/config/file.py) lists only settings that differ from the defaults.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lockstep.core.config.rules import broken_rules
from lockstep.core.config.sections import (
    PARTS,
    AttentionConfig,
    CheckpointConfig,
    CompileConfig,
    Count,
    DataConfig,
    EvalConfig,
    Interval,
    LogConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    ParityConfig,
    PathText,
    Positive,
    PrecisionConfig,
    RecomputeConfig,
    Section,
    TrainConfig,
    listed,
)

__all__ = [
    "PARTS",
    "AttentionConfig",
    "CheckpointConfig",
    "CompileConfig",
    "Count",
    "DataConfig",
    "EvalConfig",
    "Interval",
    "LogConfig",
    "LossConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "ParityConfig",
    "PathText",
    "Positive",
    "PrecisionConfig",
    "RecomputeConfig",
    "RunConfig",
    "Section",
    "TrainConfig",
    "flatten",
    "listed",
]


class RunConfig(Section):
    """The configuration of a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)] = Field(
        "run", description="name of the run directory"
    )
    seed: Count = Field(0, description="seed of the initial weights")
    initial: Literal["seed", "imported"] = Field(
        "seed", description="initial weights: drawn from the seed, or those that `lockstep import` stored in the run"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="device of the torch backend")
    deterministic: bool = Field(
        False, description="the same bits every time; an operation that cannot ensure this ends the run"
    )
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    precision: PrecisionConfig = PrecisionConfig()
    loss: LossConfig = LossConfig()
    attention: AttentionConfig = AttentionConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    compile: CompileConfig = CompileConfig()
    parallel: ParallelConfig = ParallelConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parity: ParityConfig = ParityConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _rules_hold(self) -> RunConfig:
        broken = broken_rules(flatten(self.model_dump()))
        if broken:
            raise ValueError("; ".join(f"{keys[0]}: {message}" for keys, message in broken))
        return self


def flatten(tree: Mapping[str, Any], prefix: str = "", whole: Container[str] = ()) -> dict[str, Any]:
    """Flatten nested mappings into one with dotted keys. An empty mapping stays as a value.

    whole: dotted keys whose values are not flattened, even if they are mappings.
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value and f"{prefix}{key}" not in whole:
            flat |= flatten(value, f"{prefix}{key}.", whole)
        else:
            flat[f"{prefix}{key}"] = value
    return flat
