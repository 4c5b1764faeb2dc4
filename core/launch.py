"""What torchrun says of this process, in the environment."""

from __future__ import annotations

import os

from core.errors import UserError


def launched() -> tuple[int, int] | None:
    """(rank, ranks) of this process if torchrun launched several, else None."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return (int(os.environ.get("RANK", "0")), world) if world > 1 else None


def require_ranks(ranks: int, command: str = "train CONFIG") -> None:
    """Raise UserError unless torchrun launched as many processes as `train.ranks` says.

    command: what was called, for the line that says how to launch it.
    """
    place = launched()
    if ranks == (place[1] if place else 1):
        return
    if place is None:
        raise UserError(
            f"train.ranks = {ranks}: launch it with torchrun --nproc-per-node {ranks} --module scripts.cli {command}"
        )
    raise UserError(f"train.ranks = {ranks}, but torchrun launched {place[1]} processes: make them equal")
