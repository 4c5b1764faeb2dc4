"""`lockstep calibrate`."""

from __future__ import annotations

import datetime
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lockstep.core.errors import UserError
from lockstep.core.sinks.lines import announce, complain
from lockstep.scripts.shared.arguments import parse
from lockstep.scripts.shared.backends import on_its_device, open_named
from lockstep.scripts.shared.open_data import open_data

if TYPE_CHECKING:
    from lockstep.core.parity.measures.calibrated_bounds import Extremes
    from lockstep.core.parity.measures.distances import Distances
    from lockstep.core.parity.measures.verdict import Measure


@dataclass
class Calibrate:
    """Measure the bounds of clean checks on this machine, for later checks here.

    The shipped bounds were measured on another machine. This command runs the shipped trainer, never a candidate,
    beside its twin and keeps the extremes by machine, versions and recipe. They widen bounds or add missing ones, and
    never narrow one. If a shipped bound is exceeded, nothing is kept without --widen.
    """

    config: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
    """run file (TOML)"""
    checks: int = 6
    """checked steps"""
    between: int = 5
    """training steps between two checks"""
    widen: bool = False
    """keep the measured extremes even if a shipped bound is exceeded; find out why first"""


def main(argv: list[str]) -> int:
    """Measure, print and keep the bounds wider than shipped; 1 if a shipped bound is exceeded and nothing was kept."""
    from lockstep.core.config.file import load_config
    from lockstep.core.parity.evidence.gather import gather
    from lockstep.core.parity.judge.judge import Reference, judge
    from lockstep.core.parity.measures import calibrated_bounds, here
    from lockstep.core.parity.measures.calibrated_bounds import Extremes
    from lockstep.core.sinks.phrases import check_line

    options, given = parse(Calibrate, "calibrate", argv, with_settings=True)
    if options.checks < 1:
        raise UserError(f"command line: checks = {options.checks}: must be at least 1")
    config = load_config(options.config, given)
    if config.train.ranks > 1:
        raise UserError("calibrate runs in one process; add --train.ranks 1")
    data = open_data(config, options.config, given)
    trainer = open_named("torch")
    config = on_its_device(config, trainer)
    calibrated_bounds.require(config)
    recipe = calibrated_bounds.recipe_of(config)
    rows: dict[str, Extremes] = {}

    def record(recipe: str, kind: str, d: Distances, size: int) -> tuple[Measure, ...]:
        if 0 < d.excess < float("inf"):
            one = Extremes.of(d, size)
            rows[kind] = rows[kind] | one if kind in rows else one
        return calibrated_bounds.measures(recipe, kind, d, size)

    wrong = 0
    with ExitStack() as stack:
        session = stack.enter_context(closing(trainer.open(config)))
        reference = stack.enter_context(closing(replace(Reference.open(open_named("jax"), config), bound=record)))
        for number in range(options.checks):
            batch = data.batch(number * (options.between + 1) + 1)
            check = judge(gather(session, config, batch), reference)
            announce(check_line(check))
            wrong += check.verdict != "agreed"
            for step in range(options.between):
                session.step(data.batch(number * (options.between + 1) + 2 + step))
    found = here.Here(
        {kind: row.to_json() for kind, row in sorted(rows.items())},
        options.checks,
        datetime.date.today().isoformat(),
    )
    found = replace(found, widened=calibrated_bounds.widened(recipe, found))
    for line in found.widened:
        announce(f"wider than shipped: {line}")
    if wrong and not options.widen:
        complain(
            f"{wrong} of {options.checks} checks of the shipped trainer exceed a bound: kernels on this machine "
            "round differently, or something is wrong. Nothing was kept; --widen keeps the extremes."
        )
        return 1
    announce(f"bounds wider than shipped: {len(found.widened)}; kept in {here.write(recipe, found)}")
    return 0
