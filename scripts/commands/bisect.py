"""`lockstep bisect`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from lockstep.scripts.commands.replay import (
    EXIT,
    attempt,
    batches_of,
    on_device,
    open_run,
    require_bands,
    write_json,
)
from lockstep.scripts.shared.arguments import check_file, parse
from lockstep.scripts.shared.backends import Maker, open_candidate
from lockstep.scripts.shared.peers import needs_start, on_every_rank, ranks_of_launch, reference_of, start_ranks

if TYPE_CHECKING:
    from lockstep.core.backend import Backend
    from lockstep.core.run.data import RunData
    from lockstep.core.run.directory import RunDir
    from lockstep.core.run.ranks import Ranks


@dataclass
class Bisect:
    """Find the first bad step of a run, its origin and its cause: `lockstep bisect RUN`.

    Steps are run again from the nearest checkpoint and checked by bisection, which assumes that a fault stays once it
    appears. Ends 0 if no step is bad, 1 if one is, 2 if it could not (docs/guide/replay.md).
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """run directory"""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: not written)")] = None
    """file for the verdict as JSON"""
    candidate: Annotated[
        str | None, tyro.conf.arg(metavar="BACKEND", help_behavior_hint="(default: the backend that made it)")
    ] = None
    """backend that runs steps again: torch, jax, FILE.py:NAME or module:NAME; required if neither torch nor jax made
    it"""
    reference: Annotated[str, tyro.conf.arg(metavar="BACKEND")] = "jax"
    """the reference to check against: torch, jax, FILE.py:NAME or module:NAME"""
    branch: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: the run as it is)")] = None
    """the run as it was before its Nth resume or rollback (branches/00N)"""
    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None,
        tyro.conf.arg(metavar="auto|cpu|cuda", help_behavior_hint="(default: as recorded)"),
    ] = None
    """device of the candidate"""
    reference_devices: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: as recorded)")
    ] = None
    """number of devices of the reference (docs/guide/reference_sharding.md)"""
    reference_device: Annotated[
        Literal["cpu", "cuda"] | None,
        tyro.conf.arg(metavar="cpu|cuda", help_behavior_hint="(default: as recorded)"),
    ] = None
    """device of the reference"""
    no_cause: bool = False
    """stop at the origin; do not search for a setting that removes the fault"""
    verbose: bool = False
    """also print the whole table: a row for each stage, phase and scope"""


@on_every_rank
def main(argv: list[str]) -> int:
    """Bisect, print, write the JSON; the exit code is the verdict."""
    options, _ = parse(Bisect, "bisect", argv, with_settings=False)
    check_file("json", options.json)
    run, data = open_run(options.run, options.branch, options.reference_devices, options.reference_device)
    require_bands(run)
    name = Maker.of_run(run).named("--candidate", options.candidate, ["bisect", *argv])
    candidate = open_candidate(name)
    if needs_start(run.config, candidate):
        return start_ranks(run.config.train.ranks, ["bisect", *argv])
    with ranks_of_launch(run.config) as ranks:
        return _bisect(options, run, data, name, candidate, ranks)


def _bisect(options: Bisect, run: RunDir, data: RunData, name: str, candidate: Backend, ranks: Ranks) -> int:
    from lockstep.core.parity.measures import calibrated_bounds
    from lockstep.core.parity.measures.verdict import verdict_json
    from lockstep.core.parity.modes.bisect import bisect_run
    from lockstep.core.report.text import plural
    from lockstep.core.sinks.lines import say
    from lockstep.core.sinks.terminal import open_unwrapped
    from lockstep.scripts.shared.parity_table import print_verdict

    recipe, reference = calibrated_bounds.recipe_of(run.config), reference_of(options.reference, ranks)
    config = attempt(lambda: on_device(run.asked, options.device, candidate))
    console = open_unwrapped()

    def tell(text: str) -> None:
        say(console, text)

    if options.branch is None and (branches := run.info.get("branches", [])):
        which = "--branch 1" if len(branches) == 1 else f"--branch 1 to {len(branches)}"
        tell(f"the run was set back {plural(len(branches), 'time')}: {which} bisects what was taken away")
    found = attempt(
        lambda: bisect_run(
            run, batches_of(run, data), candidate, reference, tell, config, with_cause=not options.no_cause
        )
    )
    if found.check is not None:
        print_verdict(console, [found.check], recipe, options.verbose)
    for note in found.notes:
        tell(note)
    if found.cause is not None:
        for change, outcome in found.cause.tried:
            tell(f"  {change}: {outcome}")
    tell(f"{plural(len(found.checks), 'check')}, {plural(found.steps_run, 'step')} run again")
    first = "no bad step was found" if found.first_bad_step is None else f"first bad step: {found.first_bad_step}"
    if (origin := found.origin) is not None:
        layer = "" if origin.layer is None else f", layer {origin.layer}"
        first += f"; origin: {origin.stage} ({origin.phase}{layer}) at {origin.tap}"
    tell(first + (f"; cause: {found.cause.words}" if found.cause else ""))
    if options.json and ranks.rank == 0:
        write_json(options.json, _json(found, verdict_json, recipe, name, options.reference))
    return EXIT[found.verdict]


def _json(found: Any, verdict_json: Any, recipe: str, candidate: str, reference: str) -> dict[str, Any]:
    tree: dict[str, Any] = verdict_json(
        [found.check] if found.check else [], recipe=recipe, candidate=candidate, reference=reference
    )
    tree |= {"verdict": found.verdict, "first_bad_step": found.first_bad_step}
    tree |= {"cause": found.cause.words if found.cause else None, "tried": found.cause.tried if found.cause else []}
    checked = {str(step): check.verdict for step, check in sorted(found.checks.items())}
    return tree | {"checked": checked, "differs_at": found.differs_at, "notes": list(found.notes)}
