"""Decide which settings a resumed run may change, which of them begin a branch, and compare the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.core.config.schema import RunConfig, flatten
from lockstep.core.errors import UserError

# Neither the samples, nor their order, nor what a step computes from them depends on these; rounding may. The
# handling of a step that is not finite may be changed: that is how a run goes on beyond one.
ELASTIC = frozenset(
    {
        "device",
        "data.path",
        "data.mixture",
        "data.prefetch",
        "data.wait_minutes",
        "data.memory_limit_gib",
        "train.ranks",
        "train.micro_batch_size",
        "train.on_not_finite",
        "train.skips_in_a_row",
        "parallel.bucket_mb",
        "parallel.strategy",
        "parallel.reshard_after_forward",
        "parallel.reduce_every_micro_batch",
    }
)
SECTIONS = ("checkpoint.", "eval.", "log.", "parity.")
# These change what later steps compute, but neither the samples and their order nor the form of the state. With a flag,
# they begin a branch.
BRANCHING = frozenset({"train.steps", "train.curriculum", "attention.kernel", "parallel.gradient_dtype"})
BRANCHING_SECTIONS = ("optim.", "precision.", "loss.", "compile.", "recompute.")
# The key of a mixture's data sets in the facts of run.json.
SOURCES = "sources"
# The optimizer's state is theirs.
NEVER = frozenset({"optim.name", "optim.eight_bit"})


def is_elastic(key: str) -> bool:
    """Return whether a resume may change this setting, and the run stays the same."""
    return key in ELASTIC or key.startswith(SECTIONS)


def is_branching(key: str) -> bool:
    """Return whether a resume that changes this setting begins a branch."""
    return key not in NEVER and (key in BRANCHING or key.startswith(BRANCHING_SECTIONS))


@dataclass(frozen=True)
class Changes:
    """The settings that a resume changes.

    settings: dotted key → text, all of them. branch: of those that begin a branch, the values before and now.
    """

    settings: Mapping[str, str] = field(default_factory=dict)
    branch: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)


def differing(one: RunConfig, other: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between two configurations, with both values."""
    first, second = (flatten(config.model_dump(mode="json")) for config in (one, other))
    return {key: (first[key], second[key]) for key in first if first[key] != second[key]}


def changes(run: str, own: RunConfig, asked: RunConfig, given: Mapping[str, str], done: int) -> Changes:
    """Return the changes of a run that goes on after `done` steps.

    own: the settings in force there. given: keys of the settings that were given as flags: a run file with
    others begins no branch. Raises UserError that lists what the run keeps, with both values, or what such a
    branch cannot have.
    """
    found = {key: values for key, values in differing(own, asked).items() if key != "name" or key in given}
    branch = {key: values for key, values in found.items() if is_branching(key) and key in given}
    kept = {key: values for key, values in found.items() if not is_elastic(key) and key not in branch}
    if kept:
        said = [f"{key} is {was!r} in the run, and {now!r} was asked for" for key, (was, now) in kept.items()]
        last = f"{run} keeps these settings; begin a new run for others"
        if all(map(is_branching, kept)):
            last = f"{run} keeps these settings unless they are given as flags, which begins a branch"
        raise UserError(*(f"{run}: {line}" for line in said), last)
    if wrong := [*_cannot_branch(branch, own, asked, done)]:
        raise UserError(*(f"{run}: {line}" for line in wrong))
    changed = {key: _text(now) for key, (_, now) in found.items()}
    # Validation reads as many sequences as before, a micro-batch at a time.
    if "train.micro_batch_size" in changed and "eval.batches" not in changed:
        sequences = own.eval.batches * own.train.micro_batch_size
        changed["eval.batches"] = str(math.ceil(sequences / asked.train.micro_batch_size))
    return Changes(changed, branch)


def _cannot_branch(branch: Mapping[str, tuple[Any, Any]], own: RunConfig, asked: RunConfig, done: int) -> list[str]:
    """List the reasons why a branch cannot begin after `done` steps, a line each."""
    wrong = []
    if branch and asked.train.steps <= done:
        wrong.append(
            f"a branch from step {done} needs train.steps above {done}, not {asked.train.steps}; or it begins at an "
            "earlier checkpoint: --from-step"
        )
    if "optim.warmup_steps" in branch and max(own.optim.warmup_steps, asked.optim.warmup_steps) <= done:
        wrong.append(
            f"optim.warmup_steps = {asked.optim.warmup_steps}: at step {done} the warm-up of {own.optim.warmup_steps} "
            "is over; a longer one than that step warms up again"
        )
    if asked.train.longest != own.train.longest:
        wrong.append(
            f"train.curriculum: the longest sequence is {own.train.longest}, not {asked.train.longest}: the data order "
            "is one of blocks so long"
        )
    policies = own.precision.policy, asked.precision.policy
    if own.precision.stream != asked.precision.stream:
        wrong.append(f"precision.policy: weights and moments of {policies[0]} are none of {policies[1]}")
    if "precision.loss_scale" in branch and own.precision.chosen.scaled:
        wrong.append("precision.loss_scale is the first one of a run; this run has its own, in its state")
    return wrong


def other_data(made_with: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the differences between the data that a run was made with and the present data, each in a few words."""
    keys = [key for key in now if key in made_with and key not in ("path", SOURCES) and made_with[key] != now[key]]
    found = [f"{key.replace('_', ' ')} {_short(made_with[key])}, now {_short(now[key])}" for key in keys]
    before, after = (_mixture(facts.get(SOURCES, [])) for facts in (made_with, now))
    return found + ([f"{before}, now {after}"] if before != after else [])


def _mixture(sources: Sequence[Mapping[str, Any]]) -> str:
    if not sources:
        return "one data set"
    return "mixture " + ", ".join(f"{one['name']} {one['weight']} ({one['fingerprint'][:8]})" for one in sources)


def _short(value: Any) -> str:
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    return "unknown" if value is None else str(value)[:16]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
