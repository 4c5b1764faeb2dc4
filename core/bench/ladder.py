"""`lockstep bench ladder`: the six rungs of the published GPT-2 ladder as training steps of one run.

The JSON:
```
{"schema": 1, "suite": "ladder", "device": {…}, "versions": {…}, "config": {…}, "tokens": of the data set, "rows": [
  {"row": "16x128", "status": "measured" | "not_the_same_work" | "failed", "reason": … or null,
   "rungs": {NAME: {"status": …, "reason": …, "seconds": [every counted step], "median": …, "tokens_per_second": …,
                    "interval": [low, high] of tokens a second, "data_seconds": [of each, making its batch],
                    "data_share": …, "losses": [first steps], "memory": peak bytes or null,
                    "over_previous", "over_first": {"median": …, "low": …, "high": …} or null}},
   "loaders": {NAME: {"seconds": [a batch, by turn], "batches_per_second": …, "interval": [low, high]}}}]}
```
`over_…` is the rung's tokens a second / the other rung's; null where one of both does not do the same work. A rung that
could not run has status and reason alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.core.bench.intervals import interval, ratio
from lockstep.core.bench.peers import COMPARED, disagreement
from lockstep.core.config.schema import RunConfig
from lockstep.core.data.tokenizer import LEAST_VOCABULARY, MIN_VOCAB_SIZE
from lockstep.core.errors import UserError

SCHEMA, SUITE = 1, "ladder"
_LOADERS = "lockstep.core.bench.loaders"


@dataclass(frozen=True)
class Rung:
    """A rung of the ladder.

    adds: its addition to the rung below. loader: a class. settings: override those of rungs below. published: seconds
    of a step. ours: its addition is a part of Lockstep.
    """

    name: str
    adds: str
    published: float
    loader: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    ours: bool = True


# By name: scripts/shared/bench_peer.py imports each loader in a process of its own. A rung without a loader uses the
# loader of the rung below.
RUNGS = (
    Rung(
        "mmap",
        "token by token from mmap",
        1.6,
        f"{_LOADERS}:MappedTokenByToken",
        {"precision.policy": "fp32", "compile.enabled": "false", "attention.kernel": "math"},
        ours=False,
    ),
    Rung("ram", "+ tokens in RAM", 0.8, f"{_LOADERS}:TokenByToken", ours=False),
    Rung("vectorised", "+ vectorised batches", 0.5, f"{_LOADERS}:InMemory"),
    Rung("compile", "+ torch.compile", 0.35, settings={"compile.enabled": "true"}),
    Rung("bf16", "+ mixed precision (bf16)", 0.225, settings={"precision.policy": "bf16"}),
    Rung("flash", "+ flash attention", 0.1, settings={"attention.kernel": "flash"}),
)
# The other rungs must have the losses and batches of this one: the run's own loader, FP32, eager.
EXPECTED = "vectorised"
NUMBER = {rung.name: number for number, rung in enumerate(RUNGS, 1)}


def settings_of(name: str) -> dict[str, str]:
    """Return the settings of a rung, those of the rungs below included."""
    found: dict[str, str] = {}
    for rung in RUNGS[: NUMBER[name]]:
        found |= rung.settings
    return found


def loader_of(name: str) -> str:
    """Return the loader of a rung, `module:class`."""
    return next(rung.loader for rung in reversed(RUNGS[: NUMBER[name]]) if rung.loader)


def row_name(config: RunConfig) -> str:
    """Name a row by its sequences and their tokens."""
    return f"{config.train.batch_size}x{config.train.sequence_length}"


def at_length(config: RunConfig, length: int) -> dict[str, str]:
    """Return the settings that cut a step's tokens, and a micro-batch's, into sequences of `length`.

    Raises UserError where no whole number of sequences has as many.
    """
    train = config.train
    sequences, rest = divmod(train.batch_size * train.sequence_length, length)
    micro, micro_rest = divmod(train.micro_batch_size * train.sequence_length, length)
    if rest or micro_rest or not micro:
        raise UserError(
            f"command line: lengths = {length}: a micro-batch of {train.micro_batch_size} sequences of "
            f"{train.sequence_length} tokens cannot be cut into sequences of {length}"
        )
    return {
        "train.batch_size": str(sequences),
        "train.micro_batch_size": str(micro),
        "train.sequence_length": str(length),
    }


def check_config(config: RunConfig) -> None:
    """Raise UserError for a run whose batches the naive loaders do not make, or whose tokens cannot be made up."""
    if config.model.vocab_size < MIN_VOCAB_SIZE:
        raise UserError(
            f"bench ladder: model.vocab_size = {config.model.vocab_size}: made-up tokens need {MIN_VOCAB_SIZE}, "
            f"{LEAST_VOCABULARY}"
        )
    unknown = {
        "attention.document_mask": config.attention.document_mask,
        "attention.reset_positions": config.attention.reset_positions,
        f"train.ranks = {config.train.ranks}": config.train.ranks != 1,
    }
    if found := [what for what, is_there in unknown.items() if is_there]:
        raise UserError(f"bench ladder: its naive loaders do not support {', '.join(found)}; name a run without")


def result(
    configs: Mapping[str, RunConfig],
    said: Mapping[str, Sequence[Mapping[str, Any]]],
    warmup: int,
    memory: Mapping[str, int | None],
    failed: Mapping[str, str],
    loaders: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Return a row's result.

    configs: of each rung. said: answers of each rung that ran, those of `warmup` steps first. failed: why the others
    did not. loaders: seconds of a batch by turn, of each loader alone.
    """
    config = configs[EXPECTED]
    tokens = config.train.batch_size * config.train.sequence_length
    rungs: dict[str, dict[str, Any]] = {}
    for rung in RUNGS:
        if rung.name in failed:
            rungs[rung.name] = {"status": "failed", "reason": failed[rung.name]}
        else:
            rungs[rung.name] = _rung(rung.name, configs, said, warmup, tokens) | {"memory": memory[rung.name]}
    same = [name for name, found in rungs.items() if found["status"] == "measured"]
    for before, name in zip([None, *NUMBER], NUMBER, strict=False):
        for key, other in (("over_previous", before), ("over_first", RUNGS[0].name)):
            both = name in same and other in same and name != other
            rungs[name][key] = ratio(rungs[name]["seconds"], rungs[other]["seconds"]) if both and other else None
    wrong = [f"{name}: {found['reason']}" for name, found in rungs.items() if found["status"] != "measured"]
    status = [found["status"] for found in rungs.values()]
    return {
        "row": row_name(config),
        "status": next((one for one in ("failed", "not_the_same_work") if one in status), "measured"),
        "reason": "; ".join(wrong) or None,
        "rungs": rungs,
        "loaders": {name: _loader(seconds) for name, seconds in loaders.items()},
    }


def _rung(
    name: str,
    configs: Mapping[str, RunConfig],
    said: Mapping[str, Sequence[Mapping[str, Any]]],
    warmup: int,
    tokens: int,
) -> dict[str, Any]:
    reason = other_work(name, configs, said)
    seconds = [float(answer["seconds"]) for answer in said[name][warmup:]]
    data = [float(answer["data"]) for answer in said[name][warmup:]]
    slow, fast = interval(seconds)[::-1]
    return {
        "status": "not_the_same_work" if reason else "measured",
        "reason": reason,
        "seconds": seconds,
        "median": statistics.median(seconds),
        "tokens_per_second": tokens / statistics.median(seconds),
        "interval": [tokens / slow, tokens / fast],
        "data_seconds": data,
        "data_share": statistics.median(part / whole for part, whole in zip(data, seconds, strict=True)),
        "losses": [answer["loss"] for answer in said[name][:COMPARED]],
    }


def _loader(seconds: Sequence[float]) -> dict[str, Any]:
    slow, fast = interval(seconds)[::-1]
    rate = 1 / statistics.median(seconds)
    return {"seconds": list(seconds), "batches_per_second": rate, "interval": [1 / slow, 1 / fast]}


def other_work(
    name: str, configs: Mapping[str, RunConfig], said: Mapping[str, Sequence[Mapping[str, Any]]]
) -> str | None:
    """Return why a rung's steps are not those of EXPECTED, in words, or None: batches bit for bit, losses but rounding.

    Without EXPECTED there is nothing to compare with.
    """
    if EXPECTED not in said:
        return f"rung {NUMBER[EXPECTED]} ({EXPECTED}), with which it is compared, did not run"
    if name == EXPECTED:
        return None
    for step, (ours, theirs) in enumerate(zip(said[name], said[EXPECTED], strict=True), 1):
        if ours["batch"] != theirs["batch"]:
            return f"step {step}: its batch is not that of rung {NUMBER[EXPECTED]} ({EXPECTED})"
    return disagreement(configs, {each: [answer["loss"] for answer in said[each]] for each in (EXPECTED, name)})
