"""`lockstep faults`: plant the known faults one by one, and compare each finding with the expected one."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from lockstep.core.errors import UserError
from lockstep.core.run.launch import launched
from lockstep.core.sinks.lines import tell
from lockstep.scripts.shared.arguments import check_file, parse
from lockstep.scripts.shared.installation import shipped_config
from lockstep.scripts.shared.open_data import open_data
from lockstep.scripts.shared.peers import on_every_rank, ranks_of_launch, start_ranks
from lockstep.scripts.shared.planting import chosen, configured, run
from lockstep.scripts.shared.scoreboard import HONEST, Row, in_words, print_head, print_row, read, totals, write

if TYPE_CHECKING:
    from lockstep.core.config.schema import RunConfig
    from lockstep.core.run.data import RunData

QUICKSTART = shipped_config("quickstart")


@dataclass
class Faults:
    """Plant known faults in the trainer and print the scoreboard: `lockstep faults`, `lockstep faults KvHeadsTiled`.

    Ends 0 if every fault was found in time and named as expected, 1 otherwise, 2 if it could not run.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME …]")] = ()
    """faults to plant; without a name, all that the recipe allows"""
    config: Annotated[Path, tyro.conf.arg(help_behavior_hint="(default: quickstart.toml)")] = QUICKSTART
    """run file (TOML) of the trainer in which the faults are planted"""
    recipe: Annotated[tuple[str, ...], tyro.conf.arg(metavar="RECIPE…")] = ("bf16/eager",)
    """precision policy / eager or compiled, one or more"""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: not written)")] = None
    """file for the scoreboard as JSON, written after every fault"""
    resume: bool = False
    """keep the rows that the JSON file already has"""
    causes: Literal["promised", "all", "none"] = "promised"
    """faults whose step is run again with one setting changed at a time"""


def with_recipe(given: dict[str, str], recipe: str) -> dict[str, str]:
    """Add a recipe to settings. Raises UserError for one that is not `policy/eager` or `policy/compiled`."""
    policy, _, program = recipe.partition("/")
    if program not in ("eager", "compiled"):
        raise UserError(f"command line: recipe = {recipe}: write one as bf16/eager or fp32/compiled")
    return given | {"precision.policy": policy, "compile.enabled": str(program == "compiled").lower()}


def stamp(config: RunConfig, causes: str) -> str:
    """Return a digest of a row's inputs other than code: bounds, configuration, expectations, causes sought."""
    from importlib import resources

    bounds = resources.files("lockstep.core.parity.measures").joinpath("calibrated_bounds.json").read_bytes()
    promised = [
        (f.name, f.stage, f.phase, f.layer, f.first_step, f.within, f.cause, dict(f.settings)) for f in chosen(())
    ]
    return hashlib.sha256(bounds + repr((config.model_dump(), promised, causes)).encode()).hexdigest()[:16]


@on_every_rank
def main(argv: list[str]) -> int:
    """Plant, judge and print the faults; return 0 if all findings are as expected."""
    from lockstep.core.config.file import load_config
    from lockstep.core.sinks.terminal import open_console

    options, given = parse(Faults, "faults", argv, with_settings=True)
    if not options.recipe:
        raise UserError("command line: recipe has no value")
    if options.resume and options.json is None:
        raise UserError("command line: resume: name the file to continue with --json")
    check_file("json", options.json)

    def config_of(recipe: str) -> RunConfig:
        config = load_config(options.config, with_recipe(given, recipe))
        if config.model.layers < 2:
            raise UserError(
                f"model.layers = {config.model.layers}: faults are planted in the first two blocks; set it to 2 or more"
            )
        return config

    configs = [config_of(recipe) for recipe in options.recipe]
    from lockstep.core.parity.measures import calibrated_bounds

    for config in configs:
        recipe = calibrated_bounds.recipe_of(config)
        calibrated_bounds.require(config)
        for fault in chosen(options.names):
            if recipe in fault.recipes:
                calibrated_bounds.require(configured(fault, config))
    mark = stamp(configs[0].model_copy(update={"precision": None, "compile": None}), options.causes)
    kept = read(options.json, mark) if options.resume and options.json else []
    console = open_console()
    print_head(console)
    rows: list[Row] = []

    def data(config: RunConfig) -> RunData:
        return open_data(config, options.config, given)

    def on_ranks(recipe: str, names: Sequence[str], ranks: int) -> Sequence[Row]:
        """Run this command on several ranks, and return the rows of the faults that need them."""
        with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
            file = Path(folder) / "rows.json"
            words = ["faults", *names, "--config", str(options.config), "--recipe", recipe, "--json", str(file)]
            words += ["--causes", options.causes]
            words += [word for key, text in given.items() for word in (f"--{key.replace('_', '-')}", text)]
            start_ranks(ranks, words, quiet=True)
            found = read(file, mark)
        if lost := set(names) - {row.name for row in found}:
            raise UserError(f"no row of {', '.join(sorted(lost))}: the {ranks} ranks that plant them ended first")
        return found

    with ranks_of_launch(configs[0]) as ranks:
        starts = on_ranks if launched() is None else None
        for row in run(config_of, data, options.recipe, options.names, options.causes, kept, starts, ranks):
            if row.name == HONEST:
                console.print(row.recipe, style="bold")
            rows.append(row)
            print_row(console, row)
            if options.json and ranks.rank == 0:
                write(options.json, rows, mark)
    for recipe in options.recipe:
        tell(console, f"{recipe}: {in_words(totals([r for r in rows if r.recipe == recipe]))}", "bold")
    return int(any(row.broken_promises for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
