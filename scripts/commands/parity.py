"""`lockstep parity`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lockstep.core.errors import UserError
from lockstep.core.sinks.lines import complain
from lockstep.scripts.shared.arguments import check_file, parse
from lockstep.scripts.shared.backends import description, on_its_device, open_candidate
from lockstep.scripts.shared.failures import in_one_line
from lockstep.scripts.shared.initial_weights import require_seed
from lockstep.scripts.shared.open_data import open_data
from lockstep.scripts.shared.peers import needs_start, on_every_rank, ranks_of_launch, reference_of, start_ranks

if TYPE_CHECKING:
    from lockstep.core.backend import Backend, Session
    from lockstep.core.config.schema import RunConfig
    from lockstep.core.parity.evidence.evidence import Evidence
    from lockstep.core.parity.measures.verdict import Check
    from lockstep.core.parity.modes.side_by_side import Alarmed
    from lockstep.core.run.data import RunData
    from lockstep.core.run.ranks import Ranks

# A check whose passes took this many seconds prints their duration before it judges them.
LONG = 30.0


@dataclass
class Parity:
    """Check the first steps of a run against the reference: `lockstep parity CONFIG --steps 3`.

    Ends 0 if all agreed, 1 if any disagreed, 2 if it could not run. --candidate FILE.py:NAME puts your own trainer in
    the candidate's place (docs/guide/candidates.md).
    """

    config: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
    """run file (TOML)"""
    steps: int = 2
    """number of steps to check, from the initial weights"""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: not written)")] = None
    """file for the verdict as JSON"""
    candidate: Annotated[str, tyro.conf.arg(metavar="BACKEND")] = "torch"
    """trainer to check: torch, jax, hf (transformers' own model), litgpt, FILE.py:NAME or module:NAME"""
    reference: Annotated[str, tyro.conf.arg(metavar="BACKEND")] = "jax"
    """reference to check it against: torch, jax, hf (transformers' own model: logits, loss, every gradient, under fp32
    and fp64), FILE.py:NAME or module:NAME"""
    capsules: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("capsules")
    """folder for a capsule of the first step that disagrees, with a script that reproduces the fault without
    Lockstep"""
    quick: bool = False
    """print only the verdict; do not rerun a step that disagrees to search for the cause"""
    free_running: bool = False
    """check nothing; train both independently, and print how far they drift apart"""
    verbose: bool = False
    """also print the whole table, a row for each stage, phase and scope"""


@on_every_rank
def main(argv: list[str]) -> int:
    """Check, print the table, write the JSON; the exit code is the verdict."""
    from lockstep.core.config.file import load_config
    from lockstep.core.run.layout import is_run

    options, given = parse(Parity, "parity", argv, with_settings=True)
    if options.steps < 1:
        raise UserError(f"command line: steps = {options.steps}: must be at least 1")
    check_file("json", options.json)
    if is_run(options.capsules.resolve().parent):
        raise UserError(
            f"command line: capsules = {options.capsules}: this folder holds a run's own capsules; name another folder"
        )
    config = load_config(options.config, given)
    require_seed(config)
    data = open_data(config, options.config, given)
    candidate = open_candidate(options.candidate)
    if needs_start(config, candidate):
        return start_ranks(config.train.ranks, ["parity", *argv])
    with ranks_of_launch(config) as ranks:
        return _check(options, config, data, candidate, ranks)


def _check(options: Parity, config: RunConfig, data: RunData, candidate: Backend, ranks: Ranks) -> int:
    from lockstep.core.parity.measures import calibrated_bounds
    from lockstep.core.parity.measures.verdict import overall, verdict_json
    from lockstep.core.parity.modes.free_running import drift
    from lockstep.core.parity.modes.side_by_side import check_steps
    from lockstep.core.sinks.lines import say as print_lines
    from lockstep.core.sinks.phrases import check_line, duration
    from lockstep.core.sinks.terminal import open_unwrapped
    from lockstep.scripts.shared.parity_table import print_drift, print_verdict

    reference = reference_of(options.reference, ranks)
    calibrated_bounds.require(on_its_device(config, candidate))
    console = open_unwrapped()
    if options.free_running:
        watched = on_its_device(config, candidate)
        print_drift(console, drift(candidate, reference, watched, map(data.batch, range(1, options.steps + 1))))
        return 0
    checks: list[Check] = []
    batches = (data.batch(step) for step in range(1, options.steps + 1))
    stopped: UserError | None = None

    def tell(text: str) -> None:
        print_lines(console, text)

    def say(text: str) -> None:
        if sys.stderr.isatty() and ranks.rank == 0:
            print(text, file=sys.stderr)

    def gathered(step: int, seconds: float) -> None:
        if seconds >= LONG:
            say(f"step {step}: its passes took {duration(seconds)}; now it is judged …")

    say("checking step 1: its programs are compiled first; this can take minutes …")
    try:
        config = on_its_device(config, candidate)
        alarm = _alarm(options, candidate, reference, config, tell)
        for check in check_steps(candidate, reference, config, batches, alarm, gathered):
            checks.append(check)
            style = {"agreed": "green", "disagreed": "bold red"}.get(check.verdict, "yellow")
            print_lines(console, check_line(check), style)
    except UserError as error:
        stopped = error
    except (Exception, SystemExit) as error:  # a candidate is foreign code
        stopped = UserError(f"the check could not run: {in_one_line(error)}")
    if stopped and not any(check.verdict == "disagreed" for check in checks):
        raise stopped
    print_verdict(console, checks, calibrated_bounds.recipe_of(config), options.verbose)
    if options.json and ranks.rank == 0:
        context = {
            "recipe": calibrated_bounds.recipe_of(config),
            "candidate": options.candidate,
            "reference": options.reference,
        }
        text = json.dumps(verdict_json(checks, **context), indent=1, allow_nan=False)
        try:
            options.json.write_text(text + "\n")
        except OSError as error:
            raise UserError(f"cannot write {options.json}: {error.strerror}") from error
    if overall(checks) == "could_not":
        stopped = UserError(check_line(next(check for check in checks if check.verdict == "could_not")))
    if stopped:
        complain(str(stopped))
    return {"agreed": 0, "disagreed": 1, "could_not": 2}[overall(checks)]


def _alarm(
    options: Parity, candidate: Backend, reference: Backend, config: RunConfig, say: Callable[[str], None]
) -> Alarmed:
    """Follow up the first check that disagrees: run the step again, look for the cause, pack the step."""
    from lockstep.core.parity.diagnose.cause import find_cause
    from lockstep.core.parity.diagnose.disagreement import sound
    from lockstep.scripts.shared.startup_banner import versions

    sounded: list[int] = []

    def alarm(session: Session, evidence: Evidence, check: Check) -> Check:
        if options.quick or sounded:
            return check
        sounded.append(check.step)

        def cause_of(evidence: Evidence, check: Check) -> str:
            return find_cause(candidate, reference, config, evidence, check).words

        try:
            found = sound(
                session,
                evidence,
                check,
                config,
                options.capsules,
                candidate=options.candidate,
                reference=options.reference,
                versions={**description(candidate, config).get("versions", {}), **versions()},
                find_cause=cause_of,
            )
        except (Exception, SystemExit) as error:  # a candidate is foreign code; the verdict stands
            say(f"the step could not be run again: {in_one_line(error)}")
            return check
        say(found.summary)
        return dataclasses.replace(check, cause="; ".join(found.cause) or None)

    return alarm
