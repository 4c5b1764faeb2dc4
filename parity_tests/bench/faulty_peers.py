"""Faulty contenders of a benchmark: other work than the race requires, or a failed process."""

from __future__ import annotations

from dataclasses import replace

from lockstep.core.backend import Batch
from lockstep.core.errors import UserError
from lockstep.torch_backend.tools.peers import nanogpt, torchtitan
from lockstep.torch_backend.tools.peers.race import Race, Turn


def one_token_less(race: Race, turn: Turn) -> None:
    """Leave out the last token of each sequence."""
    batches = [Batch(b.tokens[:, :-1], b.targets[:, :-1], b.weights[:, :-1]) for b in race.batches]
    train = race.config.train.model_copy(update={"sequence_length": race.config.train.sequence_length - 1})
    nanogpt.run(replace(race, batches=batches, config=race.config.model_copy(update={"train": train})), turn)


def other_weights(race: Race, turn: Turn) -> None:
    """Start from other initial weights."""
    nanogpt.run(replace(race, config=race.config.model_copy(update={"seed": 1})), turn)


def other_rate(race: Race, turn: Turn) -> None:
    """Train at a learning rate that is 10 % too large."""
    optim = race.config.optim.model_copy(update={"peak_lr": 1.1 * race.config.optim.peak_lr})
    nanogpt.run(replace(race, config=race.config.model_copy(update={"optim": optim})), turn)


def other_epsilon(race: Race, turn: Turn) -> None:
    """Use an ε in the norms that is 100 times too large."""
    model = race.config.model.model_copy(update={"norm_eps": 100 * race.config.model.norm_eps})
    nanogpt.run(replace(race, config=race.config.model_copy(update={"model": model})), turn)


def half_the_loss(race: Race, turn: Turn) -> None:
    """Report half of the loss."""
    nanogpt.run(race, lambda loss: turn(None if loss is None else loss / 2))


def torchtitan_with_other_pairs(race: Race, turn: Turn) -> None:
    """Load queries and keys in Lockstep's order of rows: torchtitan's RoPE then rotates wrong pairs."""
    torchtitan.in_pairs = lambda rows, heads: rows
    torchtitan.run(race, turn)


def torchtitan_without_some_targets(race: Race, turn: Turn) -> None:
    """Ignore every second target."""
    ignored = [Batch(b.tokens, b.targets.copy(), b.weights) for b in race.batches]
    for batch in ignored:
        batch.targets[:, ::2] = -100
    torchtitan.run(replace(race, batches=ignored), turn)


def refuses(race: Race, turn: Turn) -> None:
    """Raise UserError."""
    raise UserError("no such device")


def dies(race: Race, turn: Turn) -> None:
    """End the process without a message, with exit code 7."""
    import os

    turn(None)
    os._exit(7)
