"""The published table of the 1.24B model beside our estimate of the same setup.

Published: Omkaar Kamath, "How to Train an LLM" (2025-26), one H100; the rows are core/bench/rows.py's. Its model is not
Lockstep's: torch.autocast leaves outputs of products and logits in bf16, and its loss is `cross_entropy` of those.
`autocast` of core/plan/sizes.py sets that; nothing else is set for these rows, and nothing is fitted to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.core.bench.rows import LEVERS, ROWS, Row
from lockstep.core.components.loss_heads import LOSS_HEADS
from lockstep.core.components.precision import POLICIES
from lockstep.core.config.file import load_config
from lockstep.core.config.schema import RunConfig
from lockstep.core.plan.gpus import GPUS
from lockstep.core.plan.memory import memory
from lockstep.core.plan.seconds import seconds

PARAMETERS = 1_241_581_568
STEADY = 14.90e9
# Reserved memory at [16, 2048] against none, compiled, by what is computed again.
SAVINGS = {
    "recompute-embedding": -0.005,
    "recompute-norms": 0.0,
    "recompute-attention": -0.11,
    "recompute-mlp": -0.40,
    "checkpoint-1": -0.56,
}
_BASE = "fused"
# Rows that were published as one micro-batch, which core/bench/rows.py cuts in four.
_AT_ONCE = ("checkpoint-1-64", "fp8-tensorwise", "fp8-rowwise", "head-full", "head-chunked-4096")
# Where ours is far from theirs: what is known, and what is not.
WHY = {
    "fp32-eager": "their loss is taken as eager cross_entropy, ours of Lockstep's model is larger",
    "bf16": "theirs is 4.0 bytes a parameter above the next row: what AdamW's list operations hold, after the "
    "activations are gone, so that it is reserved and not in the peak",
    "checkpoint-1": "theirs is -60 % here and -56 % in the table by part",
    "fp8-tensorwise": "theirs: -10 % of time, -20 % of memory against bf16",
    "fp8-delayed": "theirs is Transformer Engine's, of its kernels",
    "fp8-rowwise": "theirs: +2 % of time, -20 % of memory against bf16; casts along rows are not in our time",
    "head-chunked-4096": "theirs is Apple CCE",
    "head-chunked-64": "theirs is of whole logits",
    "head-full-32": "theirs would need 843 TFLOP/s of this model: another one",
    "head-chunked-32": "theirs would need 843 TFLOP/s of this model: another one",
    "attention-flash": "theirs leaves 3.3 GB for activations and logits: not this setup",
    "attention-fa3": "theirs is twice the row below: not of one setup",
}


@dataclass(frozen=True)
class Beside:
    """A published row: memory in bytes, time in seconds, theirs (None: not published) and ours."""

    name: str
    about: str
    theirs: float | None
    ours: float
    their_seconds: float | None
    our_seconds: float | None
    why: str


@dataclass(frozen=True)
class Saving:
    """The memory saved by checkpointing a part, as a share: theirs of reserved, ours of allocated memory."""

    name: str
    about: str
    theirs: float
    ours: float


def _config(config: RunConfig, row: Row) -> RunConfig:
    overrides = row.overrides("cuda")
    if row.name in _AT_ONCE:
        overrides["train.micro_batch_size"] = overrides["train.batch_size"]
    made = load_config(None, {**overrides, "log.norms_every": "0"})
    return made.model_copy(
        update={
            "model": config.model,
            "train": made.train.model_copy(update={"sequence_length": config.train.sequence_length}),
        }
    )


def comparable(row: Row) -> bool:
    """Return whether the row can be estimated: it has a figure, and is compiled or without casts."""
    settings = {**LEVERS, **row.settings}
    eager_autocast = settings["compile.enabled"] == "false" and POLICIES[settings["precision.policy"]].rounds
    figures = row.published.reserved is not None or row.published.seconds is not None
    own_head = not LOSS_HEADS[settings["loss.head"]].library
    return figures and not eager_autocast and own_head


def beside(config: RunConfig) -> list[Beside]:
    """Return every published row that can be estimated, for the model of `config`."""
    gpu, found = GPUS["h100"], []
    for row in filter(comparable, ROWS):
        made, published = _config(config, row), row.published
        ours = memory(made, gpu, autocast=True).peak
        time = seconds(made, gpu, autocast=True)
        reserved = None if published.reserved is None else published.reserved * 1e9
        said = "checkpoint every layer" if row.name == "checkpoint-1-64" else row.about
        about = f"{said} [{row.sequences * row.accumulation}, {made.train.sequence_length}]"
        step = None if time is None else time.step
        found.append(Beside(row.name, about, reserved, ours, published.seconds, step, WHY.get(row.name, "")))
    return found


def savings(config: RunConfig) -> list[Saving]:
    """Return the published checkpointing table at [16, 2048]."""
    gpu, rows = GPUS["h100"], {row.name: row for row in ROWS}
    none = memory(_config(config, rows[_BASE]), gpu, autocast=True).peak
    return [
        Saving(name, rows[name].about, theirs, memory(_config(config, rows[name]), gpu, autocast=True).peak / none - 1)
        for name, theirs in SAVINGS.items()
    ]
