"""`lockstep convert`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from lockstep.core.errors import UserError
from lockstep.core.files.paths import quoted
from lockstep.core.sinks.lines import announce
from lockstep.scripts.shared.arguments import parse

if TYPE_CHECKING:
    from lockstep.core.backend import State, Writing


@dataclass
class Convert:
    """Write a checkpoint's weights and moments in another format: the same bits under the same names.

    If FROM is a checkpoint's folder, TO becomes a checkpoint. If FROM is a run, its last intact checkpoint and its
    records become a new run TO, which `lockstep train --resume TO` continues in the other framework.
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FROM")]
    """checkpoint (RUN/checkpoints/step_000100) or run directory"""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TO")]
    """folder to make"""
    to: Literal["torch", "jax", "safetensors"] = "safetensors"
    """torch: torch.distributed.checkpoint; jax: orbax; safetensors: params.safetensors and a file for each kind of
    moment, with plain tensor names"""


def main(argv: list[str]) -> int:
    """Convert, read the result back, and compare every bit."""
    from lockstep.core.checkpoint.format import MANIFEST
    from lockstep.core.run.layout import LISTED, is_run

    options, _ = parse(Convert, "convert", argv, with_settings=False)
    source, target = options.source, options.target
    if target.exists():
        raise UserError(f"{target} exists already; name a new folder")
    if not is_run(source) and not (source / MANIFEST).exists():
        raise UserError(f"{source} is neither a checkpoint nor a run directory; {LISTED}")
    if not is_run(source):
        print(convert(source, target, options.to))
        return 0
    if options.to == "safetensors":
        raise UserError(
            f"{source} is a run: choose --to torch or --to jax, or name one of its checkpoints for --to safetensors"
        )
    print(convert_run(source, target, options.to))
    announce(f"continue with: lockstep train --resume {quoted(target)}")
    return 0


def convert_run(source: Path, target: Path, to: str) -> Path:
    """Make a run of another framework from a run's last intact checkpoint; return its checkpoint."""
    from lockstep.core.checkpoint.format import checkpoint_step
    from lockstep.core.config.auto import BEFORE, ON_CPU
    from lockstep.core.run.directory import RunDir

    run = RunDir.open(source)
    last = run.last_intact(print)
    step = checkpoint_step(last) or 0
    # It has the settings now in force, and no history.
    own = ("config", "settings", "resumes", "branches", "damaged", "finished", "in_force", "deterministic")
    kept = {key: value for key, value in run.info.items() if key not in own}
    kept |= {ON_CPU: run.info.get(ON_CPU, BEFORE)}
    info = {**kept, "backend": to, "wandb_id": None, "converted_from": {"run": str(source), "step": step}}
    with RunDir.create(target, run.asked, info) as made:
        made.take_history(run, step)
        return convert(last, made.checkpoint_of(step), to)


def convert(source: Path, target: Path, to: str) -> Path:
    """Write a checkpoint in another format; return its folder. Raises UserError unless it reads back bit for bit."""
    from lockstep.core.checkpoint.format import begin_checkpoint, load_checkpoint, read_random

    state, extra = load_checkpoint(source, read_orbax)
    write = writing(to)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {target.parent}: {error.strerror or error}") from error
    begin_checkpoint(target, state.step, lambda folder: write(state, folder), extra, read_random(source)).commit()
    again, _ = load_checkpoint(target, read_orbax)
    if differing := differences(state, again):
        raise UserError(f"{target} does not hold the bits of {source}: {', '.join(differing[:3])}")
    return target


def writing(to: str) -> Callable[[State, Path], Writing]:
    """Return a function that starts to write a state in a format."""
    if to == "torch":
        from lockstep.torch_backend import checkpoint as of_torch

        return of_torch.writing
    if to == "jax":
        from lockstep.jax_backend import checkpoint as of_jax

        return of_jax.writing
    from lockstep.core.checkpoint.format import WritingState

    return WritingState


def read_orbax(folder: Path) -> State:
    """Read the state that orbax wrote into a checkpoint, with the configuration beside it."""
    import json

    from lockstep.core.checkpoint.format import EXTRA
    from lockstep.core.config.schema import RunConfig
    from lockstep.jax_backend.checkpoint import read_state

    extra = json.loads((folder / EXTRA).read_text(encoding="utf-8"))
    return read_state(folder, RunConfig.model_validate(extra["config"]))


def differences(one: State, other: State) -> list[str]:
    """List the differences between two states, bit for bit."""
    from lockstep.core.arrays import bit_equal
    from lockstep.core.parity.judge.update import flat

    arrays, others = flat(one), flat(other)
    shared = arrays.keys() & others.keys()
    differing = {name for name in shared if not bit_equal(arrays[name], others[name])}
    return sorted(arrays.keys() ^ others.keys() | differing)
