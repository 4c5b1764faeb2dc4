"""Lockstep's own step as a contender of `lockstep bench peers`, and as a row of `lockstep bench ladder`."""

from __future__ import annotations

from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.tools.peers.race import Race, Turn


def run(race: Race, turn: Turn) -> None:
    """Train until `turn` raises Over. Raises UserError if the configuration cannot run here."""
    session = TorchBackend().open(race.config)
    turn(None)
    for batch in race.stream():
        turn(session.step(batch).loss)
