"""Contenders that do not do the same work, or do not end it."""

from __future__ import annotations

from dataclasses import replace

from lockstep.core.backend import Batch
from lockstep.core.errors import UserError
from lockstep.torch_backend.tools.peers import nanogpt, torchtitan
from lockstep.torch_backend.tools.peers.race import Race, Turn


def one_token_less(race: Race, turn: Turn) -> None:
    """Leaves out the last token of each sequence."""
    batches = [Batch(b.tokens[:, :-1], b.targets[:, :-1], b.weights[:, :-1]) for b in race.batches]
    train = race.config.train.model_copy(update={"sequence_length": race.config.train.sequence_length - 1})
    nanogpt.run(replace(race, batches=batches, config=race.config.model_copy(update={"train": train})), turn)


def other_weights(race: Race, turn: Turn) -> None:
    """Begins elsewhere."""
    nanogpt.run(replace(race, config=race.config.model_copy(update={"seed": 1})), turn)


def other_rate(race: Race, turn: Turn) -> None:
    """Step a tenth farther."""
    optim = race.config.optim.model_copy(update={"peak_lr": 1.1 * race.config.optim.peak_lr})
    nanogpt.run(replace(race, config=race.config.model_copy(update={"optim": optim})), turn)


def other_epsilon(race: Race, turn: Turn) -> None:
    """Has another ε in its norms."""
    model = race.config.model.model_copy(update={"norm_eps": 100 * race.config.model.norm_eps})
    nanogpt.run(replace(race, config=race.config.model_copy(update={"model": model})), turn)


def half_the_loss(race: Race, turn: Turn) -> None:
    """Tells half of its loss."""
    nanogpt.run(race, lambda loss: turn(None if loss is None else loss / 2))


def torchtitan_with_other_pairs(race: Race, turn: Turn) -> None:
    """Load queries and keys in Lockstep's order, of which torchtitan's RoPE turns other pairs."""
    torchtitan.in_pairs = lambda rows, heads: rows
    torchtitan.run(race, turn)


def torchtitan_without_some_targets(race: Race, turn: Turn) -> None:
    """Ignores every other target."""
    ignored = [Batch(b.tokens, b.targets.copy(), b.weights) for b in race.batches]
    for batch in ignored:
        batch.targets[:, ::2] = -100
    torchtitan.run(replace(race, batches=ignored), turn)


def refuses(race: Race, turn: Turn) -> None:
    """Cannot."""
    raise UserError("no such device")


def dies(race: Race, turn: Turn) -> None:
    """End without a word."""
    import os

    turn(None)
    os._exit(7)
