"""`lockstep parity`."""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from core.errors import UserError
from scripts.arguments import parse
from scripts.backends import on_its_device, spec

if TYPE_CHECKING:
    from core.parity.verdict import Check


@dataclass
class Parity:
    """Check the first steps of a run side by side with the reference: `lockstep parity CONFIG --steps 3`.

    Ends 0 if all agreed, 1 if any disagreed, 2 if it could not run. --candidate FILE.py:NAME puts your own trainer in
    the candidate's place (docs/candidates.md).
    """

    config: Annotated[Path, tyro.conf.Positional]
    """run file (TOML)"""
    steps: int = 2
    """steps to check, from the initial weights on"""
    json: Path | None = None
    """write the verdict here as JSON"""
    candidate: str = "torch"
    """who is judged: torch, jax, FILE.py:NAME or module:NAME"""
    reference: str = "jax"
    """who judges: torch, jax, FILE.py:NAME or module:NAME"""


def main(argv: list[str]) -> int:
    """Check, print the table, write the JSON; the exit code is the verdict."""
    from rich.console import Console

    from core.config_file import load_config
    from core.parity.bands import recipe
    from core.parity.load import load_backend
    from core.parity.side_by_side import check_steps
    from core.parity.verdict import overall, verdict_json
    from core.run_data import RunData
    from core.sinks.phrases import check_line
    from scripts.parity_table import print_verdict

    options, given = parse(Parity, "parity", argv, with_settings=True)
    if options.steps < 1:
        raise UserError(f"command line: steps = {options.steps}: at least one step is needed")
    config = load_config(options.config, given)
    data = RunData.open(config)
    candidate, reference = load_backend(spec(options.candidate)), load_backend(spec(options.reference))
    config = on_its_device(config, candidate)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    checks: list[Check] = []
    batches = (data.batch(step) for step in range(1, options.steps + 1))
    try:
        for check in check_steps(candidate, reference, config, batches):
            checks.append(check)
            console.print(
                check_line(check),
                style={"agreed": "green", "disagreed": "bold red"}.get(check.verdict, "yellow"),
                markup=False,
            )
    except UserError:
        raise
    except Exception as error:
        if "LOCKSTEP_TRACEBACK" in os.environ:
            traceback.print_exc(file=sys.stderr)
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"the check could not run: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} "
            f"({at.filename}:{at.lineno}; LOCKSTEP_TRACEBACK=1 shows all)"
        ) from error
    print_verdict(console, checks)
    if options.json:
        context = {"recipe": recipe(config), "candidate": options.candidate, "reference": options.reference}
        try:
            options.json.write_text(json.dumps(verdict_json(checks, **context), indent=1) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {options.json}: {error.strerror}") from error
    return {"agreed": 0, "disagreed": 1, "could_not": 2}[overall(checks)]
