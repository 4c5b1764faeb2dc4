"""`lockstep plan`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lockstep.core.errors import UserError
from lockstep.core.sinks.lines import announce, complain
from lockstep.scripts.shared.arguments import check_file, parse
from lockstep.scripts.shared.open_data import command

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.core.plan.choices import Choice
    from lockstep.core.plan.data import Reading
    from lockstep.core.plan.estimate import Estimate

# Width of the widest table.
_WIDE = 150


@dataclass
class Plan:
    """Estimate memory, time and cost of a run before you rent a GPU: `lockstep plan CONFIG --gpu h100`.

    Estimates come from formulas (docs/guide/plan.md); no GPU is needed. Ends 0 with a plan. If the run does not fit as
    configured, the last line names a micro-batch or a checkpointing policy that fits. Ends 2 if nothing fits.
    """

    config: Annotated[
        Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG", help_behavior_hint="(required)")
    ] = None
    """run file (TOML)"""
    gpu: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: h100; cpu for device = cpu)")] = ""
    """h100, h100-pcie, h200, a100-80 or cpu"""
    price: Annotated[float | None, tyro.conf.arg(metavar="DOLLARS", help_behavior_hint="(default: an assumption)")] = (
        None
    )
    """price of a GPU hour"""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: not written)")] = None
    """file for the plan as JSON, in bytes and seconds"""


def main(argv: list[str]) -> int:
    """Print the plan."""
    from lockstep.core.config.file import load_config
    from lockstep.core.plan.checks import over_budget
    from lockstep.core.plan.choices import choices, smallest_change
    from lockstep.core.plan.data import readings
    from lockstep.core.plan.estimate import fits
    from lockstep.core.plan.gpus import gpu_named
    from lockstep.core.plan.words import as_data
    from lockstep.core.sinks.terminal import open_console

    options, given = parse(Plan, "plan", argv, with_settings=True)
    check_file("json", options.json)
    if options.price is not None and not (math.isfinite(options.price) and options.price >= 0):
        raise UserError(f"command line: price = {options.price:g}: must be a number of at least 0")
    if options.config is None:
        raise UserError("nothing to plan; name a run file: lockstep plan configs/quickstart.toml")
    config = load_config(options.config, given)
    gpu = gpu_named(options.gpu or ("cpu" if config.device == "cpu" else "h100"))
    price = gpu.price if options.price is None else options.price
    data = readings(config)
    estimate, found = fits(config, gpu), choices(config, gpu)
    print_plan(open_console(), estimate, found, price, data)
    if options.json:
        try:
            options.json.write_text(json.dumps(as_data(estimate, found, price, data), indent=1) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {options.json}: {error.strerror}") from error
    for line in dict.fromkeys(one for thorough in (False, True) for one in over_budget(config, thorough=thorough)):
        complain(line)
    if estimate.fits:
        announce(f"next: {command('train', options.config, given)}")
        return 0
    changes = smallest_change(config, found)
    needed = f"{config.name} needs {estimate.peak / 1e9:,.1f} GB a device, {gpu.title} has {gpu.memory / 1e9:,.1f} GB"
    if not changes:
        raise UserError(f"{needed}, and no micro-batch or checkpointing policy makes it fit")
    complain(f"{needed}; what would fit: {'; or '.join(changes)}")
    return 0


def print_plan(
    console: Console, estimate: Estimate, found: list[Choice], price: float, data: Sequence[Reading]
) -> None:
    """Print every table of the plan."""
    from lockstep.core.plan import words
    from lockstep.core.sinks.lines import say, tell
    from lockstep.core.sinks.tables import stacked, table
    from lockstep.core.sinks.terminal import open_console

    config = estimate.config
    # A file has no width limit. A narrow terminal shows each row of a wide table as lines.
    wide = console if console.is_terminal or console.width >= _WIDE else open_console(_WIDE)

    def print_wide(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        if wide.width >= _WIDE:
            wide.print(table(title, headers, rows))
        else:
            for line in stacked(title, headers, rows, wide.width):
                say(wide, line)

    console.print(table(f"Model: {config.name}", ("", ""), words.model_rows(estimate)))
    micro = f"micro-batch [{config.train.micro_batch_size}, {config.train.sequence_length}]"
    console.print(table(f"Memory of each device, estimated: {micro}", ("", ""), words.memory_rows(estimate)))
    if rows := words.time_rows(estimate, price):
        console.print(table("Time of a step and of the run, estimated", ("", ""), rows))
    console.print(table("Data, as this run reads it", words.READINGS, words.reading_rows(data)))
    console.print(table("Checks, at most", ("", ""), words.check_rows(config)))
    headers, rows = words.choice_table(config, found)
    title = "GB needed by micro-batch; → and (…) as configured, ! does not fit"
    print_wide(title, headers, rows)
    if words.is_published_model(config):
        print_wide("Published on one H100, and estimated", words.PUBLISHED, words.published_rows(config))
        console.print(table("Checkpointing: memory against none", words.SAVED, words.saving_rows(config)))
    for line in estimate.gpu.sources:
        tell(console, f"{estimate.gpu.name}: {line}")
    tell(console, words.headline(estimate, price), "bold green" if estimate.fits else "bold red")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
