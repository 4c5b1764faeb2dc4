"""Contenders that do not do the same work, or do not end it."""

from __future__ import annotations

from dataclasses import replace

from lockstep.core.backend import Batch
from lockstep.core.errors import UserError
from lockstep.torch_backend.tools.peers import nanogpt
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
    """Steps a tenth farther."""
    optim = race.config.optim.model_copy(update={"peak_lr": 1.1 * race.config.optim.peak_lr})
    nanogpt.run(replace(race, config=race.config.model_copy(update={"optim": optim})), turn)


def refuses(race: Race, turn: Turn) -> None:
    """Cannot."""
    raise UserError("no such device")


def dies(race: Race, turn: Turn) -> None:
    """Ends without a word."""
    import os

    turn(None)
    os._exit(7)
