"""List the alternatives: memory of every checkpointing policy at every micro-batch, and the largest that fits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain

from lockstep.core.config.schema import RecomputeConfig, RunConfig
from lockstep.core.plan.estimate import Estimate, fits
from lockstep.core.plan.gpus import Gpu

# Checkpointing policies by the name that tables show.
POLICIES: dict[str, RecomputeConfig] = {
    "none": RecomputeConfig(),
    "embedding": RecomputeConfig(parts="embedding"),
    "norms": RecomputeConfig(parts="norms"),
    "attention": RecomputeConfig(parts="attention"),
    "mlp": RecomputeConfig(parts="mlp"),
    "attention + mlp": RecomputeConfig(parts="attention,mlp"),
    "block, every 2nd": RecomputeConfig(parts="block", every=2),
    "block, products kept": RecomputeConfig(parts="block", keep_products=True),
    "block": RecomputeConfig(parts="block"),
}


@dataclass(frozen=True)
class Choice:
    """A policy. by_micro: estimate by micro-batch. largest: micro-batch that fits, of those that divide, and of all.

    best: the estimate at the largest that divides; None if none fits. own: whether it is the configuration's policy.
    """

    name: str
    recompute: RecomputeConfig
    by_micro: dict[int, Estimate]
    largest_dividing: int
    largest: int
    best: Estimate | None
    own: bool


def choices(config: RunConfig, gpu: Gpu, *, sharded: bool | None = None) -> list[Choice]:
    """Return every policy, in the order of POLICIES; a configuration's own comes first if it is none of those."""
    known = dict(POLICIES)
    if own_name(config) not in known:
        known = {own_name(config): config.recompute, **known}
    return [_choice(config, gpu, name, policy, sharded) for name, policy in known.items()]


def own_name(config: RunConfig) -> str:
    """Return the name of the configuration's policy."""
    chosen = config.recompute
    for name, policy in POLICIES.items():
        if (policy.chosen, policy.every, policy.keep_products) == (chosen.chosen, chosen.every, chosen.keep_products):
            return name
    words = [" + ".join(sorted(chosen.chosen)), f"every {chosen.every}" if chosen.every > 1 else ""]
    return ", ".join(filter(None, [*words, "products kept" if chosen.keep_products else ""]))


def micro_batches(config: RunConfig) -> list[int]:
    """Return powers of two up to 512 that divide a rank's part of the batch, and the configured micro-batch."""
    share = config.train.batch_size // config.train.ranks
    powers = {2**k for k in range(10) if share % 2**k == 0}
    return sorted(powers | {config.train.micro_batch_size})


def with_settings(config: RunConfig, micro: int, recompute: RecomputeConfig) -> RunConfig:
    """Return the configuration with another micro-batch and policy; a micro-batch that does not divide is allowed."""
    train = config.train.model_copy(update={"micro_batch_size": micro})
    return config.model_copy(update={"train": train, "recompute": recompute})


def _choice(config: RunConfig, gpu: Gpu, name: str, policy: RecomputeConfig, sharded: bool | None) -> Choice:
    def ask(micro: int) -> Estimate:
        return fits(with_settings(config, micro, policy), gpu, sharded=sharded)

    by_micro = {micro: ask(micro) for micro in micro_batches(config)}
    share = config.train.batch_size // config.train.ranks
    # Memory grows with the micro-batch: the largest that fits is found by halving.
    low, high = 0, share
    while gpu.memory and low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if ask(middle).fits else (low, middle - 1)
    largest = low if gpu.memory else share
    dividing = _largest_divisor(share, largest)
    best = ask(dividing) if dividing else None
    return Choice(name, policy, by_micro, dividing, largest, best, name == own_name(config))


def _largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that is at most `limit`; 0 without any."""
    if not limit:
        return 0
    root, least = math.isqrt(number), -(-number // limit)
    # Each divisor above the root belongs to one below.
    above = (number // d for d in range(least, root + 1) if number % d == 0)
    below = (d for d in range(min(limit, root), 0, -1) if number % d == 0)
    return next(chain(above, below))


def smallest_change(config: RunConfig, found: list[Choice]) -> list[str]:
    """List settings, each of which makes a configuration fit that does not; empty if none does."""
    own = next(choice for choice in found if choice.own)
    words = []
    if own.largest_dividing:
        words.append(f"train.micro_batch_size = {own.largest_dividing}")
    micro = config.train.micro_batch_size
    able = [choice for choice in found if micro in choice.by_micro and choice.by_micro[micro].fits]
    if able:
        quickest = min(able, key=lambda choice: choice.by_micro[micro].step_seconds or 0.0)
        words.append(in_settings(quickest.recompute))
    if not words and any(choice.best for choice in found):
        quickest = min((c for c in found if c.best), key=lambda c: (c.best and c.best.step_seconds) or 0.0)
        words.append(f"{in_settings(quickest.recompute)} with train.micro_batch_size = {quickest.largest_dividing}")
    return words


def in_settings(recompute: RecomputeConfig) -> str:
    """Write a policy as settings of a run file."""
    words = [f'recompute.parts = "{recompute.parts}"']
    words += [f"recompute.every = {recompute.every}"] if recompute.every > 1 else []
    words += ["recompute.keep_products = true"] if recompute.keep_products else []
    return ", ".join(words)
