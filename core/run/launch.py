"""Read torchrun's environment variables of this process."""

from __future__ import annotations

import os

from lockstep.core.errors import UserError


def launched() -> tuple[int, int] | None:
    """Return (rank, ranks) if torchrun launched several processes, else None. Raises UserError if these are invalid."""
    world = _count("WORLD_SIZE", "1")
    if world <= 1:
        return None
    if (rank := _count("RANK", "0")) >= world:
        raise UserError(f"RANK = {rank} of WORLD_SIZE = {world}: ranks count from 0; unset both, or launch by torchrun")
    return rank, world


def launch_id() -> str | None:
    """Return the id of this launch through torchrun's restarts and Slurm's requeues: its --rdzv-id; None without one.

    `--standalone` draws one. Without either torchrun sets "none", which names nothing.
    """
    found = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return None if found in ("", "none") else found


def restarts() -> int:
    """Count how often torchrun, or Slurm, has started this launch's ranks anew."""
    return _count("TORCHELASTIC_RESTART_COUNT", "0") + _count("SLURM_RESTART_COUNT", "0")


def _count(name: str, default: str) -> int:
    text = os.environ.get(name, default)
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UserError(f"environment: {name} = {text!r}: must be a number; unset it, or launch by torchrun")
    return int(text)


def require_ranks(ranks: int, command: str = "train CONFIG") -> None:
    """Raise UserError unless torchrun launched as many processes as `train.ranks`.

    command: what was called, for the line with the command that launches it.
    """
    place = launched()
    if ranks == (place[1] if place else 1):
        return
    if place is None:
        raise UserError(
            f"train.ranks = {ranks}: launch it with torchrun --nproc-per-node {ranks} -m lockstep {command}"
        )
    raise UserError(f"train.ranks = {ranks}, but torchrun launched {place[1]} processes: make them equal")
